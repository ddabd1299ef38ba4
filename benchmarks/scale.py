"""How far one router goes: 1,000 workers and 10^5 streams, the pure `Router` on one core, its workers' words made up.

Every stream is followed as live: reserved, prefilled, shipped, its tokens told in words of `--tokens_a_word`, ended.
Measured: decisions a second (a request taken and a pair chosen, all effects made), events a second in all, bytes of
state a running stream, messages a token. And drawn: failures of devices at the rate that was published for Llama 3's
training (419 unexpected interruptions in 54 days of 16,384 GPUs), and the share of goodput they take, by what a lost
decode worker's streams do (prompt and output prefilled again; or KV kept elsewhere, shipped again), and by whether a
spare worker stands by or the group is started again.

    python -m benchmarks.scale --output=benchmarks/results/scale.json
"""

from __future__ import annotations

import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.events import Event, Finish, Received, Send, Submit
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import (
    CacheWanted,
    Drawn,
    Ended,
    Message,
    Progress,
    Reserve,
    Reserved,
    StartPrefill,
    TokenDelta,
)
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.router.router import Router

FLAGS = flags.FlagValues()
flags.DEFINE_list("workers", ["16", "128", "1000"], "of each run, half of them of each role", flag_values=FLAGS)
flags.DEFINE_integer(
    "streams", 100_000, "that run at once on the most workers; of fewer, as many less", flag_values=FLAGS
)
flags.DEFINE_integer("tokens_a_word", 8, "that a worker tells of a stream at once", 1, flag_values=FLAGS)
flags.DEFINE_integer("output_tokens", 64, "of a stream that is followed to its end", 1, flag_values=FLAGS)
flags.DEFINE_integer("followed", 2000, "streams followed to their ends", 1, flag_values=FLAGS)
flags.DEFINE_list("routings", ["least_loaded", "cache_aware"], "of --routing of launch", flag_values=FLAGS)
flags.DEFINE_integer("days", 365, "over which failures are drawn", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
PROMPTS = [(first, *range(1, 512)) for first in range(1000)]
DEVICE_FAILURES_PER_HOUR = 419 / (54 * 24 * 16_384)


@dataclass(frozen=True, slots=True)
class Row:
    """One size of cluster; one core."""

    routing: str
    workers: int
    streams: int
    decisions_per_s: float
    events_per_s: float
    state_bytes: float  # of the router, a running stream; prompts apart
    messages_per_token: float


def workers_of(count: int, *, keep: bool) -> list[WorkerConfig]:
    """keep: pages, which the router then follows."""
    roles = [Role.PREFILL] * (count // 2) + [Role.DECODE] * (count - count // 2)
    return [
        WorkerConfig(WorkerId(f"{role}-{number}"), role, 1 << 20, 32, 8192, num_slots=1024, prefix_caching=keep)
        for number, role in enumerate(roles)
    ]


def request(number: int, conversation: int = 0) -> Request:
    """Of a conversation that begins like a thousandth of all others."""
    prompt = PROMPTS[conversation % len(PROMPTS)]
    return Request(RequestId(f"r{number:07d}"), prompt, SamplingParams(max_tokens=FLAGS.output_tokens))


class Driven:
    """A router, and workers that answer at once. `messages` counts both ways."""

    def __init__(self, workers: int, routing: Routing) -> None:
        config = RouterConfig(
            queue_limit=1 << 30, prefill_timeout_s=1e9, stall_timeout_s=1e9, handoff_timeout_s=1e9,
            routing=routing,
        )  # fmt: skip
        self.router = Router(config, workers_of(workers, keep=routing is Routing.CACHE_AWARE))
        self.messages, self.events, self.ended, self.now_s = 0, 0, 0, 0.0

    def take(self, event: Event) -> list[tuple[WorkerId, Message]]:
        """What the router says to whom."""
        self.events += 1
        self.now_s += 1e-6
        effects = self.router.handle(event, self.now_s)
        self.ended += sum(isinstance(each, Finish) for each in effects)
        sent = [(each.to, each.message) for each in effects if isinstance(each, Send)]
        said = [each for each in sent if not isinstance(each[1], CacheWanted)]  # asked once of each
        self.messages += len(said) + isinstance(event, Received)
        return said

    def admit(self, number: int) -> list[tuple[WorkerId, Message]]:
        return self.take(Submit(request(number, number)))

    def begin(self, said: list[tuple[WorkerId, Message]]) -> tuple[Attempt, WorkerId]:
        """From the reservation to the first step of decode."""
        ((decode, reserve),) = said
        assert isinstance(reserve, Reserve), reserve
        attempt = reserve.attempt
        ((prefill, start),) = self.take(Received(decode, Reserved(attempt, (1, 2))))
        assert isinstance(start, StartPrefill), start
        self.take(Received(prefill, Progress(attempt, Mark.PREFILL_STARTED, self.now_s)))
        self.take(Received(prefill, Drawn((TokenDelta(attempt, 0, (Sampled(1),)),))))
        self.take(Received(decode, Progress(attempt, Mark.COMMITTED, self.now_s)))
        self.take(Received(decode, Progress(attempt, Mark.FIRST_STEP, self.now_s)))
        return attempt, decode

    def follow(self, attempt: Attempt, decode: WorkerId) -> None:
        """To its end."""
        for event in words(attempt, decode, self.now_s):
            self.take(event)


def words(attempt: Attempt, decode: WorkerId, now_s: float) -> Iterator[Received]:
    token, last = Sampled(1), FLAGS.output_tokens
    for first in range(1, last, FLAGS.tokens_a_word):
        sampled = (token,) * min(FLAGS.tokens_a_word, last - first)
        yield Received(decode, Drawn((TokenDelta(attempt, first, sampled),)))
    yield Received(decode, Ended(attempt, FinishReason.LENGTH, now_s, last))


def measure(workers: int, streams: int, routing: Routing) -> Row:
    """Those that are followed begin as others did, which some workers have computed."""
    driven = Driven(workers, routing)
    gc.collect()
    tracemalloc.start()
    begun = [driven.begin(driven.admit(number)) for number in range(streams // 10)]
    state_bytes = tracemalloc.get_traced_memory()[0] / len(begun)
    tracemalloc.stop()
    begun += [driven.begin(driven.admit(number)) for number in range(len(begun), streams)]
    decided_s, followed = 0.0, min(FLAGS.followed, streams)
    driven.messages = driven.events = 0
    began_s = time.process_time()
    for number in range(streams, streams + followed):
        submitted = Submit(request(number, number - streams))
        before_s = time.process_time()
        said = driven.take(submitted)
        decided_s += time.process_time() - before_s
        driven.follow(*driven.begin(said))
    whole_s = time.process_time() - began_s
    assert driven.ended == followed, f"{driven.ended} of {followed} ended"
    tokens = followed * FLAGS.output_tokens
    return Row(
        routing.value, workers, streams, followed / decided_s, driven.events / whole_s, state_bytes,
        driven.messages / tokens,
    )  # fmt: skip


# ------------------------------------------------------------------ failures


@dataclass(frozen=True, slots=True)
class Fleet:
    """A thousand groups of eight devices; half of them decode. Seconds."""

    groups: int = 1000
    devices: int = 8
    streams: int = 100  # of a decode group
    held_tokens: int = 4000  # of a stream, prompt and output so far
    prefill_token_s: float = 50e-6
    ship_token_s: float = 320e3 / 25e9  # 320 kB over 25 GB/s
    restart_s: float = 300.0  # a group is started again: noticed, scheduled, weights read, programs from the cache
    standby_s: float = 15.0  # a spare worker takes its place: noticed, joined
    noticed_s: float = 5.0  # --peer_silence_s


@dataclass(frozen=True, slots=True)
class Loss:
    """Of goodput: worker-seconds that nobody got anything for, over all there were."""

    failures: int
    hours_between: float
    reshipped: bool
    standby: bool
    lost: float
    stalled_s: float  # of a stream on a group that fails, until it goes on
    spares: int  # workers that stand by, so that there was one in all but a ten-thousandth of the failures


def losses(fleet: Fleet, days: int) -> list[Loss]:
    random = np.random.default_rng(0)
    hours = days * 24
    count = int(random.poisson(fleet.groups * fleet.devices * DEVICE_FAILURES_PER_HOUR * hours))
    times_s = np.sort(random.uniform(0.0, hours * 3600.0, count))
    decodes = random.random(count) < 0.5
    cases = [(reshipped, standby) for reshipped in (False, True) for standby in (False, True)]
    return [_loss(fleet, times_s, decodes, hours, *case) for case in cases]


def _loss(fleet: Fleet, times_s: np.ndarray, decodes: np.ndarray, hours: float, reshipped: bool, standby: bool) -> Loss:
    away_s = fleet.standby_s if standby else fleet.restart_s
    again_s = fleet.streams * fleet.held_tokens * (fleet.ship_token_s if reshipped else fleet.prefill_token_s)
    down_s = away_s * len(times_s) + again_s * float(decodes.sum())
    out = np.searchsorted(times_s, times_s) - np.searchsorted(times_s, times_s - fleet.restart_s)
    spares = int(np.quantile(out, 0.9999)) + 1 if standby else 0
    whole_s = (fleet.groups + spares) * hours * 3600.0
    lost = (down_s + spares * hours * 3600.0) / whole_s
    one_s = fleet.held_tokens * (fleet.ship_token_s if reshipped else fleet.prefill_token_s)
    return Loss(len(times_s), hours / max(1, len(times_s)), reshipped, standby, lost, fleet.noticed_s + one_s, spares)


def table(rows: list[Row]) -> Table:
    shown = Table(title="one router, one core")
    shown.add_column("routing")
    for name in ("workers", "streams", "decisions/s", "events/s", "bytes a stream", "messages a token"):
        shown.add_column(name, justify="right")
    for each in rows:
        rates = f"{each.decisions_per_s:,.0f}", f"{each.events_per_s:,.0f}"
        shown.add_row(
            each.routing,
            f"{each.workers:,}",
            f"{each.streams:,}",
            *rates,
            f"{each.state_bytes:,.0f}",
            f"{each.messages_per_token:.2f}",
        )
    return shown


def main() -> int:
    sizes = [int(each) for each in FLAGS.workers]
    streams = {each: max(20, FLAGS.streams * each // max(sizes)) for each in sizes}
    rows = [measure(each, streams[each], Routing(routing)) for routing in FLAGS.routings for each in sizes]
    Console().print(table(rows))
    found = losses(Fleet(), FLAGS.days)
    for each in found:
        Console().print(each)
    if FLAGS.output:
        about = {name: FLAGS[name].value for name in ("tokens_a_word", "output_tokens", "days")}
        report = {**described(), **about, "rows": [asdict(each) for each in rows], "fleet": asdict(Fleet())}
        report |= {"failures": [asdict(each) for each in found]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
