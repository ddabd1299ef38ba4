"""Admission by stages: who may begin to decode before all of its KV is in, and what its first step waits for.

Stage s of a pipeline needs the KV of its layers only s stages after the step began, so a sequence may be seated when
COMMIT and its first stage's parts are in: its first step's later stages have gates, and the parts follow in time.
Nobody waits for a gate but the sequence itself. It is seated only in a microbatch that is empty, which then takes no
other step until its KV is whole; and it gives the place up to the first whole sequence that finds no other.
"""

from __future__ import annotations

from bisect import insort

from jdisagg.core.events import OpenGates
from jdisagg.core.steps import Gate
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.decode_sequence import DecodeSequence, Step
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.slots import Slots


def gates_of(sequence: DecodeSequence, stages: tuple[tuple[int, int], ...]) -> tuple[Gate, ...]:
    """For each stage whose layers are not all in, the parts that it has to wait for."""
    arrivals = sequence.arrivals
    waits = [tuple(part for part in arrivals.missing if arrivals.part_holds(part, layers)) for layers in stages]
    return tuple(Gate(stage, sequence.owner, parts) for stage, parts in enumerate(waits) if parts)


class EarlyAdmission:
    """DecodeSide that COMMIT has reached before all of their parts, and those of them that are seated all the same."""

    def __init__(self, config: WorkerConfig, slots: Slots[DecodeSequence], steps: dict[int, Step], out: Outbox) -> None:
        self.config, self.slots, self.steps, self.out = config, slots, steps, out
        self.stages = config.layer_groups
        self.used = config.stage_admission and config.role is Role.DECODE and len(self.stages) > 1
        self.seated: dict[int, DecodeSequence] = {}  # by microbatch, each alone there
        self._waiting: list[DecodeSequence] = []  # the others, in order

    def wait(self, sequence: DecodeSequence) -> None:
        """The sequence has COMMIT and lacks parts."""
        if self.used:
            insort(self._waiting, sequence, key=lambda each: each.order)

    def seat_next(self) -> bool:
        """Seats the first in order that may be; False where none may, or no microbatch is empty."""
        sequence = next((sequence for sequence in self._waiting if self._may(sequence)), None)
        slot = self.slots.slot_of_an_empty_microbatch() if sequence else None
        if sequence is None or slot is None:
            return False
        self._waiting.remove(sequence)
        sequence.slot = slot
        self.slots.seat(slot, sequence)
        self.seated[self.slots.microbatch_of(slot)] = sequence
        return True

    def _may(self, sequence: DecodeSequence) -> bool:
        """Its first stage lacks nothing."""
        return all(gate.stage for gate in gates_of(sequence, self.stages))

    def gates(self, microbatch: int) -> tuple[Gate, ...]:
        """Of the microbatch's next step."""
        sequence = self.seated.get(microbatch)
        return () if sequence is None else gates_of(sequence, self.stages)

    @property
    def under_way(self) -> list[int]:
        """Microbatches whose step may wait at a gate: they take no other."""
        return [microbatch for microbatch, sequence in self.seated.items() if sequence.on_device]

    # ------------------------------------------------------------ ends

    def whole(self, sequence: DecodeSequence) -> bool:
        """The sequence lacks nothing any more; whether it was seated."""
        return self._forget(sequence)

    def free_slot(self) -> int | None:
        """For a whole sequence: where there is no other, who is seated ahead makes room."""
        slot = self.slots.free_slot(self.seated)
        if slot is None and self.seated:
            self._step_back(max(self.seated.values(), key=lambda each: each.order))
            slot = self.slots.free_slot(self.seated)
        return slot

    def _step_back(self, sequence: DecodeSequence) -> None:
        """It waits on, and then decodes from where it was."""
        assert sequence.slot is not None, "who is seated ahead has a slot"
        self.drop(sequence)
        self.slots.clear(sequence.slot, on_device=sequence.on_device)
        sequence.step_back()
        self.wait(sequence)

    def drop(self, sequence: DecodeSequence) -> None:
        """What its step draws is nobody's, and the step waits no longer: it runs before its pages can be another's."""
        if not self._forget(sequence) or not sequence.on_device:
            return
        self.out.put(OpenGates(sequence.owner))
        for step in self.steps.values():
            for slot in [slot for slot, each in step.sequences.items() if each is sequence]:
                del step.sequences[slot]

    def _forget(self, sequence: DecodeSequence) -> bool:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        found = [microbatch for microbatch, each in self.seated.items() if each is sequence]
        for microbatch in found:
            del self.seated[microbatch]
        return bool(found)
