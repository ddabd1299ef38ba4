"""What only an observer inside sees: bytes shipped, decode turns, and the host's gap between two of them.

An observer of `LiveDriver` is called on the driver thread with every event and effect: it only counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import Spread
from jdisagg.core.events import RunStep, ShipKV, StepDone
from jdisagg.core.steps import KVTransfer, StepPlan


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
    _chunks_out: dict[str, set[int]] = field(default_factory=dict)  # steps of chunks alone that are not read
    _microbatch: dict[tuple[str, int], int] = field(default_factory=dict)  # of (worker, step) in flight

    def __call__(self, actor: str, item: Any, now_s: float) -> None:
        """`now_s` is that of the whole round, so an effect would seem to follow its event in no time: see `clock`."""
        match item:
            case RunStep(plan, ships):
                self._dispatched(actor, plan)
                for transfer in ships:
                    self._shipped(transfer)
            case StepDone():
                self._read(actor, item)
            case ShipKV(transfer):
                self._shipped(transfer)

    def _shipped(self, transfer: KVTransfer) -> None:
        """A page that travels layer group by layer group is counted with its first layers."""
        self.transfers += 1
        if transfer.layers is None or transfer.layers[0] == 0:
            self.pages += len(transfer.source_pages)

    def _dispatched(self, actor: str, plan: StepPlan) -> None:
        if plan.prefill is not None:
            self.prefills += 1
        if plan.decode is None:
            self._chunks_out.setdefault(actor, set()).add(plan.step_id)
            return
        rows = plan.decode
        lane = self._lanes.setdefault((actor, rows.microbatch), Lane())
        self.turns += 1
        carried_on = lane.active.intersection(rows.active) - {each.slot for each in rows.admit}
        if lane.read_s is not None and carried_on:
            waited_s = self.clock() - lane.read_s
            self.turnarounds_s.append(waited_s)
            if not lane.out and not self._chunks_out.get(actor):
                self.unqueued += 1
                self.gaps_s.append(waited_s)
        lane.out += 1
        lane.active, lane.read_s = frozenset(rows.active), None
        self._microbatch[actor, plan.step_id] = rows.microbatch

    def _read(self, actor: str, done: StepDone) -> None:
        self._chunks_out.get(actor, set()).discard(done.step_id)
        microbatch = self._microbatch.pop((actor, done.step_id), None)
        if microbatch is None:
            return  # of chunks alone, or dispatched before `reset`
        lane = self._lanes[actor, microbatch]
        lane.out -= 1
        lane.read_s = self.clock()
        self.tokens += sum(len(tokens) for _, tokens in done.decode if tokens is not None)

    def reset(self) -> None:
        """Forgets everything; for a moment when nothing runs."""
        self.turns = self.tokens = self.prefills = self.transfers = self.pages = self.unqueued = 0
        self.turnarounds_s, self.gaps_s = [], []
        self._lanes, self._microbatch, self._chunks_out = {}, {}, {}

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
