"""What bursts on three architectures say: medians with their spread, where curves cross, and why. Pure arithmetic.

A *cell* is one architecture under one workload at one number of streams, over all rounds. Times in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.figures import SLO, Spread, ledger_means
from benchmarks.load import Burst, Sample

SINGLE, REPLICATED, DISAGGREGATED = "single", "replicated", "disaggregated"
ARCHITECTURES = (SINGLE, REPLICATED, DISAGGREGATED)
ALIKE = 0.05  # medians nearer than this share of the larger count as equal, however narrow their ranges
STALLED = 2.0  # turns of an idle machine over which a gap between tokens is a stall
RISING = ("tokens_per_s", "good_per_s")  # the more the better; of all others less is
METRICS = {
    "tokens_per_s": "tokens/s",
    "ttft_ms": "TTFT p50",
    "tpot_ms": "TPOT p50",
    "itl_p99_ms": "ITL p99",
    "good_per_s": "good requests/s",
}


@dataclass(frozen=True, slots=True)
class Middle:
    """The median of rounds, and their range."""

    mid: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Middle:
        """nan of nothing."""
        if not values:
            return Middle(math.nan, math.nan, math.nan)
        return Middle(median(values), min(values), max(values))

    def apart(self, other: Middle) -> bool:
        """Whether no round of one is within the range of the other, and the medians are not alike."""
        alike = abs(self.mid - other.mid) <= ALIKE * max(abs(self.mid), abs(other.mid))
        return not alike and (self.low > other.high or self.high < other.low)


def short(value: float) -> str:
    """Three digits, more for large numbers, never a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One burst, and how busy each device was during it: shares of a core by the worker's role."""

    burst: Burst
    busy: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """See the head of this file. `ledger_ms` is of the mean request; `stalled` a share of the time between tokens."""

    architecture: str
    workload: str
    streams: int
    rounds: int
    failed: int
    tokens_per_s: Middle
    ttft_ms: Middle
    tpot_ms: Middle
    itl_p99_ms: Middle
    good_per_s: Middle
    good_share: Middle
    stalled: Middle
    ledger_ms: Mapping[str, float]
    busy: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Key = tuple[str, str, int]  # workload, architecture, streams


def objectives(unloaded: Sequence[Burst], times: tuple[float, float]) -> SLO:
    """A TTFT and a TPOT, each so many times the median of an idle `single` with one stream."""
    samples = [sample for burst in unloaded for sample in burst.samples if sample.ok]
    ttfts = [sample.ttft_s for sample in samples]
    tpots = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    if not ttfts or not tpots:
        raise ValueError("no answer of the idle stack to set objectives by")
    return SLO(times[0] * median(ttfts) * 1e3, times[1] * median(tpots) * 1e3)


def turn_s(unloaded: Sequence[Burst]) -> float:
    """The median gap between tokens of an idle stack."""
    gaps = [gap for burst in unloaded for sample in burst.samples if sample.ok for gap in sample.itl_s]
    return median(gaps) if gaps else math.nan


def cell(key: Key, turns: Sequence[Turn], slo: SLO, idle_turn_s: float) -> Cell:
    """All rounds of one cell."""
    workload, architecture, streams = key
    done = [[sample for sample in turn.burst.samples if sample.ok] for turn in turns]
    wall = [turn.burst.wall_s for turn in turns]

    def rate(count: Callable[[Sample], float]) -> Middle:
        return Middle.of([sum(map(count, each)) / wall_s for each, wall_s in zip(done, wall, strict=True)])

    def spread(values: Callable[[Sample], Sequence[float]], name: str) -> Middle:
        found = [Spread.of(value for sample in each for value in values(sample)) for each in done]
        return Middle.of([getattr(each, name) for each in found if each is not None])

    return Cell(
        architecture,
        workload,
        streams,
        rounds=len(turns),
        failed=sum(not sample.ok for turn in turns for sample in turn.burst.samples),
        tokens_per_s=rate(lambda sample: sample.num_tokens),
        ttft_ms=spread(lambda sample: (sample.ttft_s,), "p50"),
        tpot_ms=spread(lambda sample: () if sample.tpot_s is None else (sample.tpot_s,), "p50"),
        itl_p99_ms=spread(lambda sample: sample.itl_s, "p99"),
        good_per_s=rate(slo.met_by),
        good_share=Middle.of([sum(map(slo.met_by, t.burst.samples)) / len(t.burst.samples) for t in turns]),
        stalled=Middle.of([stalled_share(each, idle_turn_s) for each in done]),
        ledger_ms=ledger_means([sample for each in done for sample in each]),
        busy={role: median(turn.busy[role] for turn in turns) for role in (turns[0].busy if turns else ())},
    )


def stalled_share(samples: Sequence[Sample], idle_turn_s: float) -> float:
    """Of the time between tokens: what gaps over STALLED idle turns have beyond one idle turn.

    From the second token on: the gap before it is the handoff's, which the ledger has as transfer and first step.
    """
    gaps = [gap for sample in samples for gap in sample.itl_s[1:]]
    stalls = sum(gap - idle_turn_s for gap in gaps if gap > STALLED * idle_turn_s)
    return stalls / sum(gaps) if gaps else 0.0


# ---------------------------------------------------------------------- where curves cross


@dataclass(frozen=True, slots=True)
class Crossing:
    """From `streams` on (between two levels, along their logarithm) the first one is ahead, or behind."""

    streams: float
    ahead: bool


def lead(ours: Middle, theirs: Middle, rising: bool) -> int:
    """1 where ours is better, -1 where worse, 0 where rounds of the two overlap."""
    if not ours.apart(theirs):
        return 0
    return 1 if (ours.mid > theirs.mid) is rising else -1


def crossings(streams: Sequence[int], ours: Sequence[Middle], theirs: Sequence[Middle], rising: bool) -> list[Crossing]:
    """Every change of the lead; levels at which neither leads are passed over."""
    led = [(n, a, b, lead(a, b, rising)) for n, a, b in zip(streams, ours, theirs, strict=True)]
    told = [each for each in led if each[3]]
    return [
        Crossing(_where((n, _distance(a, b)), (m, _distance(c, d))), after > 0)
        for (n, a, b, before), (m, c, d, after) in pairwise(told)
        if before != after
    ]


def _distance(ours: Middle, theirs: Middle) -> float:
    """0 where they are equal, and near their ratio's logarithm there; defined where one of them is 0."""
    return (ours.mid - theirs.mid) / (ours.mid + theirs.mid)


def _where(left: tuple[int, float], right: tuple[int, float]) -> float:
    """The streams at which a straight line over log(streams) is 0; `left` and `right` are on its two sides."""
    (n, before), (m, after) = left, right
    share = before / (before - after)
    return math.exp(math.log(n) + share * (math.log(m) - math.log(n)))


def crossing_text(metric: str, streams: Sequence[int], ours: Sequence[Cell], theirs: Sequence[Cell]) -> str:
    """Who leads where, by one metric, in one line."""
    rising, name = metric in RISING, METRICS[metric]
    mine, other = [getattr(each, metric) for each in ours], [getattr(each, metric) for each in theirs]
    leads = [lead(a, b, rising) for a, b in zip(mine, other, strict=True)]
    first, second = ours[0].architecture, theirs[0].architecture
    ends = f"{_against(mine[0], other[0])} at {streams[0]}, {_against(mine[-1], other[-1])} at {streams[-1]} streams"
    found = crossings(streams, mine, other, rising)
    if found:
        steps = ", ".join(
            f"{first if each.ahead else second} from about {each.streams:.2g} streams on" for each in found
        )
        return f"{name}: crosses: {steps} ({ends})"
    if not any(leads):
        return f"{name}: no difference beyond the spread ({ends})"
    winner = first if max(leads, key=abs) > 0 else second
    where = (
        "at every level" if all(leads) else f"at {', '.join(str(n) for n, k in zip(streams, leads, strict=True) if k)}"
    )
    return f"{name}: does not cross: {winner} better {where} ({ends})"


def _against(ours: Middle, theirs: Middle) -> str:
    return f"{(ours.mid / theirs.mid - 1) * 100:+.0f} %" if theirs.mid else "-"


# ---------------------------------------------------------------------- why

CAUSES = {
    "queue": ("waits longer for a prefill to begin", "waits less for a prefill to begin"),
    "reserve_wait": ("waits longer for its reservation", "waits less for its reservation"),
    "prefill": ("is prefilled more slowly", "is prefilled faster"),
    "transfer": ("waits for its KV after the first token (exposed transfer)", "waits less for its KV"),
    "first_step": ("waits longer for its first decode turn", "waits less for its first decode turn"),
    "decode": ("decodes more slowly", "decodes faster"),
}
WORTH_TELLING = 0.04  # of a request's time


def why(ours: Cell, theirs: Cell) -> list[str]:
    """Lines that say where our request's time differs from theirs, largest first; the ledger's parts are all of it."""
    total = {each.architecture: sum(each.ledger_ms.values()) for each in (ours, theirs)}
    if not all(total.values()):
        return ["no ledger to explain it by"]
    more = total[ours.architecture] - total[theirs.architecture]
    lines = [
        f"a request of {ours.architecture} takes {total[ours.architecture]:.0f} ms, of {theirs.architecture}"
        f" {total[theirs.architecture]:.0f} ms ({more:+.0f}): it"
    ]
    differences = {part: ours.ledger_ms[part] - theirs.ledger_ms.get(part, 0.0) for part in ours.ledger_ms}
    for part, ms in sorted(differences.items(), key=lambda pair: -abs(pair[1])):
        if abs(ms) >= WORTH_TELLING * total[theirs.architecture]:
            lines.append(f"  {CAUSES[part][ms < 0]}: {ms:+.0f} ms")
    return [*lines, interference(ours, theirs), devices(ours, theirs)]


def interference(ours: Cell, theirs: Cell) -> str:
    """How much of the decoding is stalls: where devices do both, a stall is another request's prefill."""
    parts = [f"{each.stalled.mid:.0%} on {each.architecture}" for each in (ours, theirs)]
    worst = [f"{each.itl_p99_ms.mid:.0f}" for each in (ours, theirs)]
    return (
        f"  stalls take {' against '.join(parts)} of decoding (ITL p99 {' against '.join(worst)} ms, handoffs included)"
    )


def devices(ours: Cell, theirs: Cell) -> str:
    """How busy each device was: the one that idles is throughput not had."""
    said = [f"{each.architecture} {', '.join(f'{r} {s:.0%}' for r, s in each.busy.items())}" for each in (ours, theirs)]
    return f"  devices busy: {'; '.join(said)}"


def single_cost(alone: Cell, apart: Cell) -> str:
    """What disaggregation costs a request that has the machine to itself."""
    before, after = sum(alone.ledger_ms.values()), sum(apart.ledger_ms.values())
    parts = ", ".join(
        f"{part.replace('_', ' ')} {apart.ledger_ms[part] - alone.ledger_ms[part]:+.1f}" for part in apart.ledger_ms
    )
    return (
        f"one stream: {before:.1f} ms on {alone.architecture}, {after:.1f} ms on {apart.architecture}"
        f" ({(after / before - 1) * 100:+.0f} %): {parts} ms"
    )
