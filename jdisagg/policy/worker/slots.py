"""The decode slots of a worker: their sequences, slots to retire on the device, steps in flight, and multi-step sizes.

With several steps per dispatch (multi-step), no step is added that delays other work or that a client would notice:
while a dispatch runs no sequence gets a slot, no prompt is computed, and its tokens arrive together when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.worker.sequence import DecodeSequence

T = TypeVar("T")


class DecodeSlots(Generic[T]):
    """The slots of all microbatches; microbatch m has slots m * n to (m + 1) * n."""

    def __init__(self, config: WorkerConfig) -> None:
        assert config.num_slots % config.num_microbatches == 0, "slots must fill whole microbatches"
        self.steps_in_flight = config.steps_in_flight
        self.per_microbatch = config.slots_per_microbatch
        self.in_flight = [0] * config.num_microbatches
        self.seatings = 0  # number of changes of the slots' sequences
        self._seats: list[T | None] = [None] * config.num_slots
        self._taken = [0] * config.num_microbatches
        self._seated: list[list[tuple[int, T]] | None] = [None] * config.num_microbatches  # as last asked for
        self._retiring: list[set[int]] = [set() for _ in range(config.num_microbatches)]
        self._order = list(range(config.num_microbatches))  # as they last took a step, the latest at the end

    def microbatch_of(self, slot: int) -> int:
        return slot // self.per_microbatch

    def free_slot(self, but: Collection[int] = ()) -> int | None:
        """Returns a free slot of the emptiest microbatch not in `but`, so that all steps are about equally full."""
        open_ones = [microbatch for microbatch in range(len(self._taken)) if microbatch not in but]
        if not open_ones:
            return None
        first = min(open_ones, key=self._taken.__getitem__) * self.per_microbatch
        return next((slot for slot in range(first, first + self.per_microbatch) if self._seats[slot] is None), None)

    def slot_of_an_empty_microbatch(self) -> int | None:
        """Returns a slot of a microbatch without sequences; None if there is none."""
        return self._taken.index(0) * self.per_microbatch if 0 in self._taken else None

    def seat(self, slot: int, sequence: T) -> None:
        assert self._seats[slot] is None, f"slot {slot} is taken"
        self._seats[slot] = sequence
        self.seatings += 1
        self._taken[self.microbatch_of(slot)] += 1
        self._seated[self.microbatch_of(slot)] = None

    def clear(self, slot: int, *, on_device: bool) -> None:
        """Frees the slot; if the device knows its sequence, the next step of its microbatch retires it."""
        assert self._seats[slot] is not None, f"slot {slot} is free already"
        microbatch = self.microbatch_of(slot)
        self._seats[slot] = None
        self.seatings += 1
        self._taken[microbatch] -= 1
        self._seated[microbatch] = None
        if on_device:
            self._retiring[microbatch].add(slot)

    def seated(self, microbatch: int) -> list[tuple[int, T]]:
        """Returns the (slot, sequence) pairs of a microbatch, in order of slots."""
        found = self._seated[microbatch]
        if found is None:
            first = microbatch * self.per_microbatch
            pairs = enumerate(self._seats[first : first + self.per_microbatch], first)
            found = self._seated[microbatch] = [(slot, sequence) for slot, sequence in pairs if sequence is not None]
        return found.copy()

    def due(self, held: Collection[int] = ()) -> list[int]:
        """Returns the microbatches that may run a step now, the one that waited longest first. Microbatches in `held`
        run none, and others do not wait for them.

        They alternate: no microbatch runs two steps while another's are in flight. A stage runs steps in the order of
        their dispatch, and the second of two steps in a row waits for the first to pass through all stages; whatever is
        behind it waits as well, though it could run (two stages then work two steps in three)."""
        waiting_for = [m for m in self._order if self._taken[m] and self.in_flight[m] and m not in held]
        first = waiting_for[0] if waiting_for else None
        at = {m: place for place, m in enumerate(self._order)}
        able = [m for m in self._order if self._taken[m] and self.in_flight[m] < self.steps_in_flight and m not in held]
        return [m for m in able if first is None or at[m] <= at[first] or not self.in_flight[m]]

    def begin_step(self, microbatch: int) -> tuple[int, ...]:
        """Records a step; returns the slots that it retires."""
        self._order.remove(microbatch)
        self._order.append(microbatch)
        self.in_flight[microbatch] += 1
        retired = tuple(sorted(self._retiring[microbatch]))
        self._retiring[microbatch].clear()
        return retired

    def retires(self, microbatch: int) -> bool:
        """Returns True if the next step of the microbatch retires a slot."""
        return bool(self._retiring[microbatch])

    def go_round(self, cycle: Sequence[int], steps: int) -> None:
        """Records `steps` steps of these microbatches in rotation that began as many ended; none retires a slot."""
        latest = [cycle[step % len(cycle)] for step in range(max(0, steps - len(cycle)), steps)]
        self._order = [microbatch for microbatch in self._order if microbatch not in latest] + latest

    def end_step(self, microbatch: int) -> None:
        assert self.in_flight[microbatch] > 0, f"microbatch {microbatch} has no step in flight"
        self.in_flight[microbatch] -= 1

    def retire_again(self, microbatch: int, slots: tuple[int, ...]) -> None:
        """Records that a step failed before it could retire these slots."""
        self._retiring[microbatch].update(slots)

    @property
    def busy_microbatches(self) -> int:
        return sum(taken > 0 for taken in self._taken)

    @property
    def num_taken(self) -> int:
        return sum(self._taken)


class StepTimer:
    """Measures how long consecutive steps take, each dispatched while others run."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, float]] = {}  # in flight: how much, and when it was dispatched
        self._last_done_s = 0.0

    def dispatched(self, step_id: int, size: int, now_s: float) -> None:
        self._running[step_id] = (size, now_s)

    def done(self, step_id: int, now_s: float) -> tuple[int, float]:
        """Returns (size, seconds) of the step, from its dispatch or from the end of the step before it."""
        size, began_s = self._running.pop(step_id)
        took_s = now_s - max(began_s, self._last_done_s)
        self._last_done_s = now_s
        return size, took_s

    def failed(self, step_id: int) -> None:
        del self._running[step_id]


MOST_GAP_S = 0.04  # largest time between two updates of a stream: a reader sees no pause
FEW = 8  # most steps before the first measurement, or while a sequence waits for a slot that may be free at any step
KEPT = 17  # last times; their lower quartile counts, because other work on the machine only adds to them


class TurnTimes:
    """The measured time of one decode step of a multi-step dispatch."""

    def __init__(self, config: WorkerConfig) -> None:
        self._used, self._steps = config.decode.steps_per_dispatch > 1, StepTimer()
        self._last: deque[float] = deque(maxlen=KEPT)
        self.turn_s: float | None = None  # None before any has ended

    def dispatched(self, step_id: int, rows: DecodeRows, now_s: float) -> None:
        if self._used:
            turns = 0 if max(rows.widths, default=1) > 1 and not rows.turns else rows.num_turns
            self._steps.dispatched(step_id, turns, now_s)

    def failed(self, step_id: int) -> None:
        if self._used:
            self._steps.failed(step_id)

    def done(self, step_id: int, now_s: float) -> None:
        if not self._used:
            return
        turns, seconds = self._steps.done(step_id, now_s)
        if not turns:
            return  # a verification step
        self._last.append(seconds / turns)
        self.turn_s = sorted(self._last)[len(self._last) // 4]

    @property
    def within_gap(self) -> float:
        """Number of decode steps that end within the largest gap."""
        return MOST_GAP_S / self.turn_s if self.turn_s else FEW


def one_by_one(sampling: SamplingParams, config: WorkerConfig) -> bool:
    """Returns True if each of its tokens needs a dispatch of its own: it depends on how the last one is read, or the
    multi-step programs cannot draw it."""
    if config.takes_all_slots:
        return sampling.synchronous
    return sampling.synchronous or sampling.penalised or sampling.logprobs is not None


def most_turns(
    config: WorkerConfig, seated: Sequence[DecodeSequence], left: Sequence[int], times: TurnTimes, *, ready: bool,
    expects: bool, prompts: bool,
) -> int:  # fmt: skip
    """Returns the decode steps of the next dispatch. left: tokens that each sequence of `seated` may still draw.

    If a sequence is `ready` for a slot, as many as until the first slot is sure to be free, and few if one may be free
    at any step; if the worker `expects` KV, a quarter; if `prompts` wait to be computed between its steps, one."""
    if not seated or prompts or any(one_by_one(sequence.sampling, config) for sequence in seated):
        return 1
    turns = int(max(1, min(config.decode.steps_per_dispatch, times.within_gap)))
    if ready:
        may_stop = any(sequence.sampling.stop_token_ids for sequence in seated)
        return min(turns, FEW if may_stop else turns, *left)
    return max(1, turns // 4) if expects else turns
