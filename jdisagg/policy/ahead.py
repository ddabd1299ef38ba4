"""Admission by stages: who may begin to decode before all of its KV is in, and what its first turn waits for.

Stage s of a pipeline needs the KV of its layers only s stages after the turn began, so a sequence may be seated when
COMMIT and its first stage's parts are in: its first turn's later stages have gates, and the parts follow in time.
Nobody waits for a gate but the sequence itself. It is seated only in a microbatch that is empty, which then takes no
other turn until its KV is whole; and it gives the place up to the first whole sequence that finds no other.
"""

from __future__ import annotations

from bisect import insort

from jdisagg.core.events import OpenGates
from jdisagg.core.plans import Gate
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.bed import Bed, Turn
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.slots import Slots


def gates_of(bed: Bed, stages: tuple[tuple[int, int], ...]) -> tuple[Gate, ...]:
    """For each stage whose layers are not all in, the parts that it has to wait for."""
    missing = bed.missing
    waits = [tuple(part for part in missing if bed.part_holds(part, layers)) for layers in stages]
    return tuple(Gate(stage, *bed.owner, parts) for stage, parts in enumerate(waits) if parts)


class Ahead:
    """Beds that COMMIT has reached before all of their parts, and those of them that are seated all the same."""

    def __init__(self, config: WorkerConfig, slots: Slots[Bed], turns: dict[int, Turn], out: Outbox) -> None:
        self.config, self.slots, self.turns, self.out = config, slots, turns, out
        self.stages = config.layer_groups
        self.used = config.stage_admission and config.role is Role.DECODE and len(self.stages) > 1
        self.seated: dict[int, Bed] = {}  # by microbatch, each alone there
        self._waiting: list[Bed] = []  # the others, in order

    def wait(self, bed: Bed) -> None:
        """The bed has COMMIT and lacks parts."""
        if self.used:
            insort(self._waiting, bed, key=lambda each: each.order)

    def seat_next(self) -> bool:
        """Seats the first in order that may be; False where none may, or no microbatch is empty."""
        bed = next((bed for bed in self._waiting if self._may(bed)), None)
        slot = self.slots.lonely_slot() if bed else None
        if bed is None or slot is None:
            return False
        self._waiting.remove(bed)
        bed.slot = slot
        self.slots.seat(slot, bed)
        self.seated[self.slots.microbatch_of(slot)] = bed
        return True

    def _may(self, bed: Bed) -> bool:
        """Its first stage lacks nothing."""
        return all(gate.stage for gate in gates_of(bed, self.stages))

    def gates(self, microbatch: int) -> tuple[Gate, ...]:
        """Of the microbatch's next turn."""
        bed = self.seated.get(microbatch)
        return () if bed is None else gates_of(bed, self.stages)

    @property
    def under_way(self) -> list[int]:
        """Microbatches whose turn may wait at a gate: they take no other."""
        return [microbatch for microbatch, bed in self.seated.items() if bed.on_device]

    # ------------------------------------------------------------ ends

    def whole(self, bed: Bed) -> bool:
        """The bed lacks nothing any more; whether it was seated."""
        return self._forget(bed)

    def free_slot(self) -> int | None:
        """For a whole sequence: where there is no other, who is seated ahead makes room."""
        slot = self.slots.free_slot(self.seated)
        if slot is None and self.seated:
            self._step_back(max(self.seated.values(), key=lambda each: each.order))
            slot = self.slots.free_slot(self.seated)
        return slot

    def _step_back(self, bed: Bed) -> None:
        """It waits on, and then decodes from where it was."""
        assert bed.slot is not None, "who is seated ahead has a slot"
        self.drop(bed)
        self.slots.clear(bed.slot, on_device=bed.on_device)
        bed.slot, bed.on_device, bed.dispatched = None, False, 1
        self.wait(bed)

    def drop(self, bed: Bed) -> None:
        """What its turn draws is nobody's, and the turn waits no longer: it runs before its pages can be another's."""
        if not self._forget(bed) or not bed.on_device:
            return
        self.out.put(OpenGates(*bed.owner))
        for turn in self.turns.values():
            for slot in [slot for slot, each in turn.beds.items() if each is bed]:
                del turn.beds[slot]

    def _forget(self, bed: Bed) -> bool:
        if bed in self._waiting:
            self._waiting.remove(bed)
        found = [microbatch for microbatch, each in self.seated.items() if each is bed]
        for microbatch in found:
            del self.seated[microbatch]
        return bool(found)
