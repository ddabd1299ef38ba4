"""Estimates that the router's predictions are made of: measured rates and link speeds.

A value that was not renewed for `FORGET_S` counts as unknown, so that a worker that was slow once is tried again. A
worker without a value is taken to be like the others. `LinearFit`, `RecentMeans` and `Backoff` are
the estimators; `Pace`, `LinkSpeeds` and `Drain` say what is estimated, and `Forecasts` turns it into the
predicted costs of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from jdisagg.core.labels import NOWHERE, SHARED_BY, Labels, LinkClass, link_class
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.request import Request, WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.router.routing import CostForecast, WorkerSnapshot, run_tokens
from jdisagg.policy.router.worker_view import WorkerState

FIT_DECAY = 0.9  # weight of earlier measurements, with each new one
MEAN_DECAY = 0.8  # weight of earlier values, with each new one
FORGET_S = 60.0
CHECK_S = 1.0  # interval at which expired values leave the mean


@dataclass(slots=True)
class LinearFit:
    """Decayed least squares of seconds = fixed + each * size."""

    weight: float = 0.0
    size: float = 0.0  # decayed sums, here and below
    seconds: float = 0.0
    size_size: float = 0.0
    size_seconds: float = 0.0
    learnt_s: float = 0.0  # time of the latest measurement

    def learn(self, size: float, seconds: float, now_s: float) -> None:
        """Adds a measurement; one without size or seconds is ignored."""
        if size <= 0 or seconds <= 0:
            return
        for name, value in (
            ("weight", 1.0),
            ("size", size),
            ("seconds", seconds),
            ("size_size", size * size),
            ("size_seconds", size * seconds),
        ):
            setattr(self, name, FIT_DECAY * getattr(self, name) + value)
        self.learnt_s = now_s

    def fit(self) -> tuple[float, float]:
        """Returns (fixed, each), neither negative; all of it is `each` if sizes hardly differ."""
        spread = self.size_size - self.size * self.size / self.weight
        if spread > 1e-6 * self.size_size:
            each = (self.size_seconds - self.size * self.seconds / self.weight) / spread
            fixed = (self.seconds - each * self.size) / self.weight
            if each >= 0 and fixed >= 0:
                return fixed, each
            if each < 0:
                return self.seconds / self.weight, 0.0
        return 0.0, self.seconds / self.size

    def at(self, size: float, now_s: float) -> float | None:
        """Returns the seconds for `size`; None if nothing is known."""
        if not self.weight or now_s - self.learnt_s > FORGET_S:
            return None
        fixed, each = self.fit()
        return fixed + each * size


@dataclass(slots=True)
class Backoff:
    """A pause that doubles with each failure in a row, up to a limit."""

    first_s: float
    longest_s: float
    pause_s: float = 0.0
    until_s: float = -math.inf

    def fail(self, now_s: float) -> None:
        """Starts the next pause."""
        self.pause_s = min(self.longest_s, 2 * self.pause_s) if self.pause_s else self.first_s
        self.until_s = now_s + self.pause_s

    def is_over(self, now_s: float) -> bool:
        """Returns True if the pause is over."""
        return now_s >= self.until_s


@dataclass(slots=True)
class RecentMeans:
    """One decayed mean per name, which expires `FORGET_S` after its latest value, and the mean over all names."""

    _known: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _sum: float = 0.0
    _checked_s: float = 0.0  # time of the last check for expired values

    def learn(self, name: str, value: float, now_s: float) -> None:
        """Adds a value to the decayed mean of `name`."""
        before = self.of(name, now_s)
        self.replace(name, value if before is None else MEAN_DECAY * before + (1 - MEAN_DECAY) * value, now_s)

    def replace(self, name: str, value: float, now_s: float) -> None:
        """Sets the value of `name`, whatever it was."""
        self._sum += value - self._known.get(name, (0.0, 0.0))[0]
        self._known[name] = (value, now_s)

    def of(self, name: str, now_s: float) -> float | None:
        """Returns the mean of `name`; None if it is unknown or expired."""
        known = self._known.get(name)
        return known[0] if known is not None and now_s - known[1] < FORGET_S else None

    def usual(self, now_s: float) -> float | None:
        """Returns the mean over all names; None if nothing is known."""
        if now_s - self._checked_s >= CHECK_S:
            self._keep({name: known for name, known in self._known.items() if now_s - known[1] < FORGET_S})
            self._checked_s = now_s
        return self._sum / len(self._known) if self._known else None

    def guess(self, name: str, now_s: float) -> float | None:
        """Returns the mean of `name`, or over all names if it is unknown."""
        own = self.of(name, now_s)
        return self.usual(now_s) if own is None else own

    def forget(self, worker: WorkerId) -> None:
        """Removes the values of the worker and of its pairs."""
        self._keep({name: known for name, known in self._known.items() if worker not in name.split()})

    def _keep(self, known: dict[str, tuple[float, float]]) -> None:
        self._known, self._sum = known, sum(value for value, _ in known.values())


Counts = tuple[int, int, int]  # tokens of a prompt, run for it, and drawn


@dataclass(slots=True)
class Pace:
    """Seconds a token, by worker; of prompts a token run, padding too; of transfers exposed, by pair."""

    prompt: RecentMeans = field(default_factory=RecentMeans)
    output: RecentMeans = field(default_factory=RecentMeans)
    transfer: RecentMeans = field(default_factory=RecentMeans)
    lengths: RecentMeans = field(default_factory=RecentMeans)  # output tokens of requests

    def learn(self, ledger: Ledger, prefill: WorkerId, decode: WorkerId, tokens: Counts, now_s: float) -> float | None:
        """Learns from a finished request of one attempt; returns its mean gap between tokens, None if it has none."""
        if any(mark is Mark.REQUEUED for mark, _ in ledger.marks):
            return None
        prompt_tokens, tokens_run, output_tokens = tokens
        parts_ns = ledger.parts_ns()
        self.prompt.learn(prefill, parts_ns["prefill"] / 1e9 / tokens_run, now_s)
        if prefill != decode:
            self.transfer.learn(f"{prefill} {decode}", parts_ns["transfer"] / 1e9 / prompt_tokens, now_s)
        self.lengths.learn("", output_tokens, now_s)
        if output_tokens <= 1:
            return None
        gap_s = (parts_ns["decode"] / 1e9 + parts_ns["first_step"] / 1e9) / (output_tokens - 1)
        self.output.learn(decode, gap_s, now_s)
        return gap_s

    def forget(self, worker: WorkerId) -> None:
        """Removes what is known of a lost worker."""
        for figures in (self.prompt, self.output, self.transfer):
            figures.forget(worker)

    def expected_tokens(self, max_tokens: int, now_s: float) -> float:
        """Output tokens of a request that may have so many."""
        usual = self.lengths.usual(now_s)
        return max_tokens if usual is None else min(max_tokens, usual)


PRIOR = MappingProxyType(
    {  # bytes a second, one way: NVLink or ICI, PCIe or shared memory, and networks, as one stream gets them
        LinkClass.PROCESS: 200e9,
        LinkClass.HOST: 100e9,
        LinkClass.RACK: 25e9,
        LinkClass.POD: 10e9,
        LinkClass.BEYOND: 2.5e9,
    }
)
LINK_DECAY = 0.9  # weight of earlier transfers, with each new one
FEW = 3.0  # transfers of a pair that weigh as much as all that is known of its class
MOST_PAIRS = 1 << 16  # that are remembered; the one that was seen first goes first
TOKEN_BYTES = 1 << 17  # of KV, where a worker does not say

Pair = tuple[WorkerId, WorkerId]


@dataclass(slots=True)
class RateEstimate:
    """Decayed sums over the transfers of one kind."""

    transfers: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size_bytes: float, seconds: float) -> None:
        """Adds a transfer; earlier ones lose weight."""
        self.transfers = LINK_DECAY * self.transfers + 1
        self.size_bytes = LINK_DECAY * self.size_bytes + size_bytes
        self.seconds = LINK_DECAY * self.seconds + seconds

    @property
    def byte_s(self) -> float:
        """Returns seconds per byte."""
        return self.seconds / self.size_bytes


class LinkSpeeds:
    """Seconds per byte of every link, measured or guessed."""

    def __init__(self) -> None:
        self._measured: dict[LinkClass, RateEstimate] = {}
        self._pairs: dict[Pair, RateEstimate] = {}
        self._classes: dict[LinkClass, float] = {}  # seconds per byte of each class
        self._possible = frozenset(LinkClass)
        self._class_of: dict[tuple[Labels, Labels], LinkClass] = {}
        self._least = 0.0
        self._update()

    def learn(self, source: WorkerConfig, destination: WorkerConfig, size_bytes: float, seconds: float) -> None:
        """Learns from a transfer; one without bytes or seconds is ignored."""
        if size_bytes <= 0 or not 0 < seconds < math.inf:
            return
        self._measured.setdefault(self._class(source, destination), RateEstimate()).add(size_bytes, seconds)
        self._pairs.setdefault((source.worker, destination.worker), RateEstimate()).add(size_bytes, seconds)
        if len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        self._update()

    def forget(self, worker: WorkerId) -> None:
        """Removes the links of a worker; what they taught of their classes stays."""
        self._pairs = {pair: known for pair, known in self._pairs.items() if worker not in pair}
        self._update()

    def restrict(self, sources: Iterable[WorkerConfig], destinations: Iterable[WorkerConfig]) -> None:
        """Sets the workers between which KV travels, so that `least_byte_s` is no lower than their nearest class."""
        ends = [{each.labels for each in end} for end in (sources, destinations)]
        found = {LinkClass.BEYOND}  # workers without a common place
        for kind, names in SHARED_BY.items():
            for name in names:
                first, second = ({getattr(each, name) for each in end} - {""} for end in ends)
                if first & second:
                    found.add(kind)
        self._possible = frozenset(found)
        self._class_of.clear()
        self._update()

    def class_byte_s(self, kind: LinkClass) -> float:
        """Returns seconds per byte of a link of this class."""
        return self._classes[kind]

    def byte_s(self, source: WorkerConfig, destination: WorkerConfig) -> float:
        """Returns seconds per byte from one worker to the other."""
        like = self._classes[self._class(source, destination)]
        known = self._pairs.get((source.worker, destination.worker))
        return like if known is None else _between(like, known)

    @property
    def least_byte_s(self) -> float:
        """Returns a lower bound of all links."""
        return self._least

    @property
    def is_uniform(self) -> bool:
        """Returns True if all links are of one class and none was measured."""
        return len(self._possible) == 1 and not self._pairs

    def _class(self, source: WorkerConfig, destination: WorkerConfig) -> LinkClass:
        if source.labels is NOWHERE or destination.labels is NOWHERE:
            return LinkClass.BEYOND
        pair = source.labels, destination.labels
        found = self._class_of.get(pair)
        if found is None:
            if len(self._class_of) >= MOST_PAIRS:
                self._class_of.clear()
            found = self._class_of[pair] = link_class(*pair)
        return found

    def _update(self) -> None:
        scale = self._scale()
        for kind in LinkClass:
            known = self._measured.get(kind)
            self._classes[kind] = scale / PRIOR[kind] if known is None else known.byte_s
        least = min(self._classes[kind] for kind in self._possible)
        self._least = min([least, *[known.byte_s for known in self._pairs.values()]])

    def _scale(self) -> float:
        """Returns how many times slower than their priors links turned out, in the geometric mean of their classes."""
        ratios = [math.log(known.byte_s * PRIOR[kind]) for kind, known in self._measured.items()]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _between(like: float, known: RateEstimate) -> float:
    return (FEW * like + known.transfers * known.byte_s) / (FEW + known.transfers)


def kv_bytes(destination: WorkerConfig, tokens: float) -> float:
    """Returns the bytes of the KV of so many tokens."""
    return tokens * (destination.kv_token_bytes or TOKEN_BYTES)


# Weight of earlier prompts, with each prompt that is done: the prompts of one step end together, and the first of them
# has all of its time.
DRAIN_DECAY = 0.95


class BusySums(NamedTuple):
    """Decayed sums of busy seconds and prompt tokens, and the time of the latest prompt."""

    busy_s: float = 0.0
    tokens: float = 0.0
    at_s: float = -FORGET_S


@dataclass(slots=True)
class Drain:
    """Seconds per prompt token of each worker while it had prompts."""

    token_s: RecentMeans = field(default_factory=RecentMeans)
    _sums: dict[WorkerId, BusySums] = field(default_factory=dict[WorkerId, BusySums])

    def done(self, worker: WorkerId, tokens: float, began_s: float, now_s: float) -> None:
        """Learns from a prompt that ends now. It counts from its beginning, or from the end of the prompt before."""
        before = self._sums.get(worker, BusySums())
        if now_s - before.at_s >= FORGET_S:
            before = BusySums()
        busy_s = max(0.0, now_s - max(began_s, before.at_s))
        sums = BusySums(DRAIN_DECAY * before.busy_s + busy_s, DRAIN_DECAY * before.tokens + tokens, now_s)
        self._sums[worker] = sums
        if sums.tokens:
            self.token_s.replace(worker, sums.busy_s / sums.tokens, now_s)

    def of(self, worker: WorkerId, now_s: float) -> float | None:
        """Returns the worker's own value, else the mean of the others; None if nothing is known."""
        return self.token_s.guess(worker, now_s)

    def forget(self, worker: WorkerId) -> None:
        """Removes what is known of the worker."""
        self._sums.pop(worker, None)
        self.token_s.forget(worker)


PROMPT_TOKEN_S = 1e-4  # of a prompt token, where nothing was measured anywhere
STEP_S = 0.02  # of a decode step with nobody else in it, so


@dataclass(slots=True)
class Forecasts:
    """Makes them; learns from transfers. A step with every slot taken is held to be twice as long as a lone one's."""

    peers: Mapping[WorkerId, WorkerState]
    pace: Pace
    short_weight: float  # a prompt token on a worker that decodes, in those of one that does not
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    steps: RecentMeans = field(default_factory=RecentMeans)  # of decode workers, as if alone
    drain: Drain = field(default_factory=Drain)  # of lines of prompts

    def shipped(self, prefill: WorkerId, decode: WorkerId, tokens: int, seconds: float) -> None:
        """The KV of so many tokens took so long."""
        source, destination = self.peers.get(prefill), self.peers.get(decode)
        if source is not None and destination is not None and source is not destination:
            self.links.learn(source.config, destination.config, kv_bytes(destination.config, tokens), seconds)

    def decoded(self, decode: WorkerId, gap_s: float, now_s: float) -> None:
        """A request's mean gap there, beside as many others as are there now."""
        if decode in self.peers:
            self.steps.learn(decode, gap_s / _crowd(self.peers[decode], 0), now_s)

    def forget(self, worker: WorkerId) -> None:
        """Removes what is known of a lost worker."""
        self.links.forget(worker)
        self.steps.forget(worker)
        self.drain.forget(worker)

    def of(self, request: Request, now_s: float) -> CostForecast:
        """Returns the predicted costs of one request, in seconds, by what is known now."""
        output = max(0.0, self.pace.expected_tokens(request.sampling.max_tokens, now_s) - 1)
        waited_s = max(0.0, now_s - request.arrival_s)
        peers, links, own_step_s = self.peers, self.links, self.steps.of
        usual_step_s = self.steps.usual(now_s) or STEP_S
        least_byte_s, token_s = links.least_byte_s, self._token_s(now_s)
        runs = dict[tuple[int, tuple[int, ...]], int]()

        def queue(look: WorkerSnapshot) -> float:
            tokens = peers[look.worker].prompt_tokens
            return waited_s + tokens * token_s(look.worker) if tokens else waited_s

        def prefill(look: WorkerSnapshot, tokens: int) -> float:
            config = peers[look.worker].config
            key = tokens, config.prefill_buckets
            run = runs.get(key)
            if run is None:
                run = runs[key] = run_tokens(*key)
            weight = 1.0 if look.role is not Role.DECODE else self.short_weight
            return weight * run * token_s(look.worker)

        def transfer(source: WorkerId, destination: WorkerId, tokens: int) -> float:
            config = peers[destination].config
            return kv_bytes(config, tokens) * links.byte_s(peers[source].config, config)

        def decode(look: WorkerSnapshot) -> float:
            peer = peers[look.worker]
            step_s = own_step_s(look.worker, now_s) or usual_step_s
            return output * step_s * (1 + (len(peer.decode_work) + 1) / peer.config.num_slots)  # as `crowd`, inlined

        return CostForecast(
            queue,
            prefill,
            transfer,
            lambda destination, tokens: kv_bytes(peers[destination].config, tokens) * least_byte_s,
            decode,
            links.is_uniform,
            math.inf if request.ttft_s is None else request.ttft_s,
            math.inf if request.tpot_s is None else output * request.tpot_s,
        )

    def _token_s(self, now_s: float) -> Callable[[WorkerId], float]:
        """Returns a function from a worker to the seconds per prompt token of its queue.

        Prompts that share a step each take all of its time, and the queue does not: the lesser value counts.
        """
        usual_s, known = self.pace.prompt.usual(now_s) or PROMPT_TOKEN_S, dict[WorkerId, float]()
        prompt_s, drain_s = self.pace.prompt.of, self.drain.token_s.guess

        def token_s(worker: WorkerId) -> float:
            found = known.get(worker)
            if found is None:
                found, drained_s = prompt_s(worker, now_s) or usual_s, drain_s(worker, now_s)
                if drained_s is not None and drained_s < found:
                    found = drained_s
                known[worker] = found
            return found

        return token_s


def crowd(sequences: int, slots: int) -> float:
    """How many times longer a step of so many is than one of none."""
    return 1 + sequences / slots


def _crowd(peer: WorkerState, more: int) -> float:
    return crowd(len(peer.decode_work) + more, peer.config.num_slots)
