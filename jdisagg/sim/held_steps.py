"""Simulated steps that wait at gates: each runs in one piece, when the last part that it waits for is in."""

from __future__ import annotations

from jdisagg.core.events import InsertKV, OpenGates, RunStep
from jdisagg.core.request import Attempt, WorkerId


class HeldSteps:
    """Of all workers, by the attempt that they wait for."""

    def __init__(self) -> None:
        self._held: dict[tuple[WorkerId, Attempt], tuple[RunStep, set[int]]] = {}

    def hold(self, actor: WorkerId, effect: RunStep) -> bool:
        """Whether the step has to wait."""
        gates = effect.plan.decode.gates if effect.plan.decode else ()
        if gates:
            parts = {part for gate in gates for part in gate.parts}
            self._held[actor, gates[0].attempt] = (effect, parts)
        return bool(gates)

    def forget(self, actor: WorkerId) -> None:
        """It is gone."""
        self._held = {key: step for key, step in self._held.items() if key[0] != actor}

    def freed(self, actor: WorkerId, effect: InsertKV | OpenGates) -> RunStep | None:
        """The step that waits for nothing any more."""
        whose = effect.transfer if isinstance(effect, InsertKV) else effect
        key = actor, whose.attempt
        if key not in self._held:
            return None
        step, parts = self._held[key]
        if isinstance(effect, InsertKV):
            parts.discard(effect.transfer.part)
        else:
            parts.clear()
        if parts:
            return None
        del self._held[key]
        return step
