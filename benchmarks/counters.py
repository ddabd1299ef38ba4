"""What only an observer inside sees: bytes shipped, decode turns, and the host's gap between two of them.

An observer of `LiveDriver` is called on the driver thread with every event and effect: it only counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import Spread
from jdisagg.core.events import DecodeDone, PrefillDone, RunDecode, RunPrefill, ShipKV
from jdisagg.core.plans import DecodePlan, KVTransfer


@dataclass(slots=True)
class Lane:
    """One worker's turns of one microbatch."""

    out: int = 0  # turns dispatched and not yet read
    active: frozenset[int] = frozenset()  # slots of the last turn
    read_s: float | None = None  # when the last turn's tokens came, until the next turn is dispatched


@dataclass(slots=True)
class Counters:
    """Observes one driver. `bytes_per_page`: of the whole model's KV. Gaps are in seconds of `clock`.

    The *turnaround* of a turn is the time from a turn's tokens reaching the driver to the next dispatch of the same
    microbatch that carries on one of its sequences. While another turn was queued meanwhile the device did not wait for
    it; a turn for which nothing was queued, neither turn nor prefill, is *unqueued*: its turnaround is a device's gap.
    """

    bytes_per_page: int
    clock: Callable[[], float] = time.perf_counter
    turns: int = 0
    tokens: int = 0
    prefills: int = 0
    transfers: int = 0
    pages: int = 0
    unqueued: int = 0
    turnarounds_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    _lanes: dict[tuple[str, int], Lane] = field(default_factory=dict)
    _prefills_out: dict[str, int] = field(default_factory=dict)
    _microbatch: dict[tuple[str, int], int] = field(default_factory=dict)  # of (worker, plan) in flight

    def __call__(self, actor: str, item: Any, now_s: float) -> None:
        """`now_s` is that of the whole round, so an effect would seem to follow its event in no time: see `clock`."""
        match item:
            case RunDecode(plan):
                self._dispatched(actor, plan)
            case DecodeDone():
                self._read(actor, item)
            case RunPrefill(_, ships):
                self.prefills += 1
                self._prefills_out[actor] = self._prefills_out.get(actor, 0) + 1
                for transfer in ships:
                    self._shipped(transfer)
            case PrefillDone():
                self._prefills_out[actor] = self._prefills_out.get(actor, 0) - 1
            case ShipKV(transfer):
                self._shipped(transfer)

    def _shipped(self, transfer: KVTransfer) -> None:
        """A page that travels layer group by layer group is counted with its first layers."""
        self.transfers += 1
        if transfer.layers is None or transfer.layers[0] == 0:
            self.pages += len(transfer.source_pages)

    def _dispatched(self, actor: str, plan: DecodePlan) -> None:
        lane = self._lanes.setdefault((actor, plan.microbatch), Lane())
        self.turns += 1
        carried_on = lane.active.intersection(plan.active) - {each.slot for each in plan.admit}
        if lane.read_s is not None and carried_on:
            waited_s = self.clock() - lane.read_s
            self.turnarounds_s.append(waited_s)
            if not lane.out and self._prefills_out.get(actor, 0) < 1:
                self.unqueued += 1
                self.gaps_s.append(waited_s)
        lane.out += 1
        lane.active, lane.read_s = frozenset(plan.active), None
        self._microbatch[actor, plan.plan_id] = plan.microbatch

    def _read(self, actor: str, done: DecodeDone) -> None:
        microbatch = self._microbatch.pop((actor, done.plan_id), None)
        if microbatch is None:
            return  # dispatched before `reset`
        lane = self._lanes[actor, microbatch]
        lane.out -= 1
        lane.read_s = self.clock()
        self.tokens += sum(token is not None for _, token in done.sampled)

    def reset(self) -> None:
        """Forgets everything; for a moment when nothing runs."""
        self.turns = self.tokens = self.prefills = self.transfers = self.pages = self.unqueued = 0
        self.turnarounds_s, self.gaps_s = [], []
        self._lanes, self._microbatch, self._prefills_out = {}, {}, {}

    def figures(self) -> dict[str, Any]:
        """Counts, bytes and milliseconds since the last reset."""
        turnaround, gap = Spread.of(self.turnarounds_s), Spread.of(self.gaps_s)
        return {
            "decode_turns": self.turns,
            "tokens_per_turn": self.tokens / max(1, self.turns),
            "prefill_steps": self.prefills,
            "transfers": self.transfers,
            "shipped_bytes": self.pages * self.bytes_per_page,
            "unqueued_turns": self.unqueued,
            "host_gap_ms_per_turn": sum(self.gaps_s) / max(1, self.turns) * 1e3,
            "turnaround_ms_p50": turnaround.p50 if turnaround else None,
            "gap_ms_p99": gap.p99 if gap else None,
        }
