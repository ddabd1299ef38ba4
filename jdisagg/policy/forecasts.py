"""What a request is predicted to meet on each worker and each link, in seconds, from what was measured of late."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jdisagg.core.request import Request, WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.choice import CostForecast, WorkerSnapshot
from jdisagg.policy.drain import Drain
from jdisagg.policy.fallback import run_tokens
from jdisagg.policy.link_speeds import LinkSpeeds, kv_bytes
from jdisagg.policy.pace import Pace, RecentMeans
from jdisagg.policy.worker_state import WorkerState

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
        """It is gone."""
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
