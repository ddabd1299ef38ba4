"""Which sequence sits in which decode slot, which slots the device must be told to retire, and steps in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from jdisagg.core.worker_config import WorkerConfig

T = TypeVar("T")


class Slots(Generic[T]):
    """Slots of all microbatches; microbatch m holds slots m * n to (m + 1) * n."""

    def __init__(self, config: WorkerConfig) -> None:
        assert config.num_slots % config.num_microbatches == 0, "slots must fill whole microbatches"
        self.steps_in_flight = config.steps_in_flight
        self.per_microbatch = config.slots_per_microbatch
        self.in_flight = [0] * config.num_microbatches
        self.seatings = 0  # changes of who sits where, so far
        self._seats: list[T | None] = [None] * config.num_slots
        self._taken = [0] * config.num_microbatches
        self._seated: list[list[tuple[int, T]] | None] = [None] * config.num_microbatches  # as last asked for
        self._retiring: list[set[int]] = [set() for _ in range(config.num_microbatches)]
        self._order = list(range(config.num_microbatches))  # as they last took a step, the latest at the end

    def microbatch_of(self, slot: int) -> int:
        return slot // self.per_microbatch

    def free_slot(self, but: Collection[int] = ()) -> int | None:
        """A free slot of the emptiest microbatch that is not in `but`, so that every step carries its share."""
        open_ones = [microbatch for microbatch in range(len(self._taken)) if microbatch not in but]
        if not open_ones:
            return None
        first = min(open_ones, key=self._taken.__getitem__) * self.per_microbatch
        return next((slot for slot in range(first, first + self.per_microbatch) if self._seats[slot] is None), None)

    def slot_of_an_empty_microbatch(self) -> int | None:
        """A slot of a microbatch that nobody sits in."""
        return self._taken.index(0) * self.per_microbatch if 0 in self._taken else None

    def seat(self, slot: int, sequence: T) -> None:
        assert self._seats[slot] is None, f"slot {slot} is taken"
        self._seats[slot] = sequence
        self.seatings += 1
        self._taken[self.microbatch_of(slot)] += 1
        self._seated[self.microbatch_of(slot)] = None

    def clear(self, slot: int, *, on_device: bool) -> None:
        """Frees the slot; the next step of its microbatch retires it where the device knows its sequence."""
        assert self._seats[slot] is not None, f"slot {slot} is free already"
        microbatch = self.microbatch_of(slot)
        self._seats[slot] = None
        self.seatings += 1
        self._taken[microbatch] -= 1
        self._seated[microbatch] = None
        if on_device:
            self._retiring[microbatch].add(slot)

    def seated(self, microbatch: int) -> list[tuple[int, T]]:
        """(slot, sequence), by slot."""
        found = self._seated[microbatch]
        if found is None:
            first = microbatch * self.per_microbatch
            pairs = enumerate(self._seats[first : first + self.per_microbatch], first)
            found = self._seated[microbatch] = [(slot, sequence) for slot, sequence in pairs if sequence is not None]
        return found.copy()

    def due(self, held: Collection[int] = ()) -> list[int]:
        """Microbatches that may take a step now, the one that waited longest first. `held` ones don't, nor do others
        wait for them.

        They go round: no microbatch takes two steps while another's are in flight. A stage runs steps in the order of
        their dispatch, and the second of two steps in a row waits for the first to pass through all stages; whatever
        is behind it waits as well, though it could run (two stages then work two steps in three).
        """
        waiting_for = [m for m in self._order if self._taken[m] and self.in_flight[m] and m not in held]
        first = waiting_for[0] if waiting_for else None
        at = {m: place for place, m in enumerate(self._order)}
        able = [m for m in self._order if self._taken[m] and self.in_flight[m] < self.steps_in_flight and m not in held]
        return [m for m in able if first is None or at[m] <= at[first] or not self.in_flight[m]]

    def begin_step(self, microbatch: int) -> tuple[int, ...]:
        """Books a step; returns the slots that it retires."""
        self._order.remove(microbatch)
        self._order.append(microbatch)
        self.in_flight[microbatch] += 1
        retired = tuple(sorted(self._retiring[microbatch]))
        self._retiring[microbatch].clear()
        return retired

    def retires(self, microbatch: int) -> bool:
        """Whether its next step retires a slot."""
        return bool(self._retiring[microbatch])

    def go_round(self, cycle: Sequence[int], steps: int) -> None:
        """Books `steps` steps that began as many ended, of these microbatches round and round; none retires a slot."""
        latest = [cycle[step % len(cycle)] for step in range(max(0, steps - len(cycle)), steps)]
        self._order = [microbatch for microbatch in self._order if microbatch not in latest] + latest

    def end_step(self, microbatch: int) -> None:
        assert self.in_flight[microbatch] > 0, f"microbatch {microbatch} has no step in flight"
        self.in_flight[microbatch] -= 1

    def retire_again(self, microbatch: int, slots: tuple[int, ...]) -> None:
        """A step failed before it could retire these."""
        self._retiring[microbatch].update(slots)

    @property
    def busy_microbatches(self) -> int:
        return sum(taken > 0 for taken in self._taken)

    @property
    def num_taken(self) -> int:
        return sum(self._taken)
