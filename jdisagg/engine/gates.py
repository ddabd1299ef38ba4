"""Steps that wait between two stages for KV that is still on its way.

A step is dispatched stage by stage. One with gates goes as far as its KV is in, and the rest follows from the call that
brings the last part it waits for, or that opens its gates for good. Steps of other microbatches overtake it: they share
nothing with it but the KV pools, and there no page.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from jdisagg.core.events import StepDone
from jdisagg.core.request import Attempt
from jdisagg.core.steps import Gate, KVTransfer
from jdisagg.engine.executor import PendingStep

T = TypeVar("T")
StagedStep = Generator[
    int, None, T
]  # yields each stage's number before it dispatches it; returns what comes of the step


def dispatched(stages: StagedStep[T]) -> T:
    """All stages of a step that waits for nothing."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


class HeldStep:
    """A step with gates; see `executor.PendingStep`."""

    def __init__(self, gates: Sequence[Gate], stages: StagedStep[PendingStep]) -> None:
        self._gates = {gate.stage: (gate.attempt, set(gate.parts)) for gate in gates}
        self._stages = stages
        self._stage = next(stages)  # that is not dispatched yet
        self._result: Future[PendingStep] = Future()

    def waits_for(self, attempt: Attempt) -> bool:
        return any(whose == attempt for whose, _ in self._gates.values())

    def inserted(self, part: int) -> None:
        for _, parts in self._gates.values():
            parts.discard(part)

    def open(self) -> None:
        self._gates.clear()

    def advance(self) -> bool:
        """Dispatches the stages whose parts are in; whether that was all."""
        while self._stage not in self._gates or not self._gates[self._stage][1]:
            try:
                self._stage = next(self._stages)
            except StopIteration as end:
                self._result.set_result(end.value)
                return True
        return False

    def fail(self, error: Exception) -> None:
        self._result.set_exception(error)

    @property
    def done(self) -> bool:
        return self._result.done()

    def read(self) -> StepDone:
        return self._result.result().read()


class Gates:
    """All steps of one executor that wait."""

    def __init__(self) -> None:
        self._held: list[HeldStep] = []

    def run(self, gates: Sequence[Gate], stages: StagedStep[PendingStep]) -> PendingStep:
        """Dispatches what may run. What a stage raises is raised here, or by `read` where it ran later."""
        if not gates:
            return dispatched(stages)
        held = HeldStep(gates, stages)
        if not held.advance():
            self._held.append(held)
        return held

    def inserted(self, transfer: KVTransfer) -> None:
        """The part is in its pages."""
        for held in self._of(transfer.attempt):
            held.inserted(transfer.part)
            self._pump(held)

    def open(self, attempt: Attempt) -> None:
        for held in self._of(attempt):
            held.open()
            self._pump(held)

    def _of(self, attempt: Attempt) -> list[HeldStep]:
        return [held for held in self._held if held.waits_for(attempt)]

    def _pump(self, held: HeldStep) -> None:
        try:
            over = held.advance()
        except Exception as error:
            held.fail(error)
            over = True
        if over:
            self._held.remove(held)
