"""Steps that are certain to repeat, run ahead of the clock: when each ends, so that one event can stand for many.

A worker says how many of its steps end quietly; here follows when, exactly as step by step. Whatever comes in between
takes the steps that have ended by then, and the rest of what was foreseen stands where the worker still says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, cast

import numpy as np

from jdisagg.core.events import RunStep, Send
from jdisagg.core.request import WorkerId
from jdisagg.core.steps import DecodeRows, StepPlan
from jdisagg.policy.fast_forward import next_rows
from jdisagg.policy.worker import Worker
from jdisagg.sim.cost_models import CostModel, ManySteps
from jdisagg.sim.device import TOKEN, Device, Flying, Span

WORTH = 4  # quiet steps from which on foreseeing them takes less than taking them


class FastForward:
    """The next `steps` quiet ends of one device, of plans that go round."""

    def __init__(self, device: Device, cost: CostModel, round_of: Sequence[DecodeRows], steps: int) -> None:
        self.device, self.round_of, self.steps = device, round_of, steps
        self.taken = 0
        self._ahead = len(device.flight)
        self._seconds = [
            _seconds(device, cost, plan, len(range(place, steps, len(round_of)))) for place, plan in enumerate(round_of)
        ]
        self.done_s = [each.done_s for each in device.flight]  # of the steps in flight, and then of one for each end
        self.done_s += self._one_stage() if len(device.pipeline.free_s) == 1 else self._stages()

    def stands(self, repeatable_steps: int) -> bool:
        """Whether what is left is what the worker says now: no step was dispatched that was not foreseen."""
        return self.steps - self.taken == repeatable_steps and len(self.device.flight) == self._ahead

    @property
    def next_s(self) -> float:
        """When the first step ends that is not foreseen to be quiet."""
        return self.done_s[self.steps]

    def ended(self, at_s: float) -> int:
        """Quiet steps not taken yet that have ended at `at_s`."""
        return bisect_right(self.done_s, at_s, self.taken, self.steps) - self.taken

    def _one_stage(self) -> list[float]:
        """Back to back: each step begins when the one before it is through."""
        (seconds,) = self._seconds
        return np.cumsum(np.concatenate((self.done_s[-1:], seconds)))[1:].tolist()

    def _stages(self) -> list[float]:
        pipeline, done_s = self.device.pipeline.copy(), self.done_s.copy()
        for step in range(self.steps):
            done_s.append(pipeline.run_step(done_s[step], *self._step(step)).done_s)
        return done_s[self._ahead :]

    def _step(self, step: int) -> tuple[int, float]:
        """Microbatch and seconds of the step that follows this end."""
        times, place = divmod(step, len(self.round_of))
        return self.round_of[place].microbatch, float(self._seconds[place][times])

    def take(self, steps: int, flying: Sequence[StepPlan]) -> list[tuple[DecodeRows, Span]]:
        """The device as it is after `steps` more ends; `flying`: the steps dispatched last. Returns what ran, and when.

        Back to back steps of one stage are one span.
        """
        device, first = self.device, self.taken
        self.taken = stop = first + steps
        for place, plan in enumerate(self.round_of):
            size = len(self.round_of)
            device.fed(plan.active, len(range(place, stop, size)) - len(range(place, first, size)))
        kept = [plan for plan, _ in device.flight][steps:]
        device.flight.clear()
        device.flight.extend(map(Flying, [*kept, *flying], self.done_s[stop : stop + self._ahead]))
        if len(device.pipeline.free_s) == 1:
            return [(self.round_of[0], self._pass(first, stop))]
        return [
            (
                self.round_of[step % len(self.round_of)],
                device.pipeline.run_step(self.done_s[step], *self._step(step)),
            )
            for step in range(first, stop)
        ]

    def _pass(self, first: int, stop: int) -> Span:
        pipeline = self.device.pipeline
        span = Span(self.done_s[first + self._ahead - 1], self.done_s[stop + self._ahead - 1])
        pipeline.free_s[0] = pipeline.step_done_s[0] = span.done_s
        pipeline.busy_s += span.done_s - span.start_s
        return span


class StepEnds:
    """When each worker's next step ends that an event has to stand for; quiet ones before it are taken together."""

    def __init__(self, fast_forward: bool) -> None:
        self.fast_forward = fast_forward
        self.skipped = 0  # steps that no event stood for
        self.foreseen: dict[WorkerId, FastForward] = {}
        self._due_s: dict[WorkerId, float] = {}

    def look_ahead(self, name: WorkerId, worker: Worker, device: Device, cost: CostModel) -> float | None:
        """When the next step ends that does not end quietly; None where that is known already."""
        seen = self.foreseen.get(name)
        quiet = worker.repeatable_steps if self.fast_forward else 0
        if seen is not None and seen.stands(quiet):
            return None
        due_s = device.flight[0].done_s
        if quiet < WORTH:
            self.foreseen.pop(name, None)
        else:
            seen = self.foreseen[name] = FastForward(device, cost, next_rows(worker.decode_side), quiet)
            due_s = seen.next_s
        if self._due_s.get(name) == due_s:
            return None
        self._due_s[name] = due_s
        return due_s

    def is_due(self, name: WorkerId, now_s: float) -> bool:
        """Whether it is that step that ends now; then it is due no more."""
        due = self._due_s.get(name) == now_s
        if due:
            del self._due_s[name]
        return due

    def forget(self, name: WorkerId) -> None:
        """It is gone, and its steps with it."""
        self.foreseen.pop(name, None)
        self._due_s.pop(name, None)

    def catch_up(self, name: WorkerId, worker: Worker, at_s: float) -> CaughtUp | None:
        """The worker's quiet steps that have ended by `at_s` end in its books; None where there are none."""
        seen = self.foreseen[name]
        steps = seen.ended(at_s)
        if not steps:
            return None
        effects = worker.end_repeated_steps(steps, TOKEN)
        ended_s = seen.done_s[seen.taken + steps - 1]
        ran = seen.take(steps, [effect.plan for effect in effects if isinstance(effect, RunStep)])
        self.skipped += steps
        return CaughtUp(ended_s, [effect for effect in effects if isinstance(effect, Send)], ran)


class CaughtUp(NamedTuple):
    """When the last of some quiet steps ended, what the worker says after them, and what ran when."""

    ended_s: float
    sends: list[Send]
    ran: list[tuple[DecodeRows, Span]]


@cache
def _takes_arrays(kind: type[CostModel]) -> bool:
    return issubclass(kind, ManySteps)


def _seconds(device: Device, cost: CostModel, plan: DecodeRows, steps: int) -> np.ndarray:
    """Of so many steps like the plan, f64[steps]: each reads a token a slot more than the one before it."""
    contexts = device.held_tokens(plan.active) + len(plan.active) * np.arange(1, steps + 1)
    if _takes_arrays(type(cost)):
        return cast(ManySteps, cost).steps_s(plan, contexts)
    return np.array([cost.decode_s(plan, context) for context in contexts.tolist()])
