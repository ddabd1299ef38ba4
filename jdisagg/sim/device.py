"""One worker's devices in virtual time: steps in order through its stages, and the tokens in its slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jdisagg.core.events import StepDone
from jdisagg.core.request import Sampled
from jdisagg.core.steps import DecodeRows, StepPlan
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.sim.cost_models import CostModel, MixedCostModel

TOKEN = Sampled(0)  # every sampled token


class TimeSpan(NamedTuple):
    """An interval in seconds of the virtual clock."""

    start_s: float
    done_s: float


class InFlightStep(NamedTuple):
    """A step with decode rows in flight, and its end."""

    plan: StepPlan
    done_s: float


class PipelineStages:
    """Equal stages, each on its own devices. A stage runs plans in the order of their dispatch."""

    def __init__(self, num_stages: int) -> None:
        self.free_s = [0.0] * num_stages  # the time at which each stage is free
        self.busy_s = 0.0  # of the first stage
        self.step_done_s = [0.0] * num_stages

    def copy(self) -> PipelineStages:
        other = PipelineStages(0)
        other.free_s, other.step_done_s = self.free_s.copy(), self.step_done_s.copy()
        return other

    def run(self, now_s: float, seconds: float) -> TimeSpan:
        """Runs a plan of `seconds` for all stages together."""
        stage_s = seconds / len(self.free_s)
        start_s = at_s = max(now_s, self.free_s[0])
        for stage, free_s in enumerate(self.free_s):
            at_s = self.free_s[stage] = max(at_s, free_s) + stage_s
        self.busy_s += stage_s
        return TimeSpan(start_s, at_s)

    def run_step(self, now_s: float, microbatch: int, seconds: float) -> TimeSpan:
        """Runs a decode step after the previous step of its microbatch, whose tokens it takes as input."""
        span = self.run(max(now_s, self.step_done_s[microbatch]), seconds)
        self.step_done_s[microbatch] = span.done_s
        return span


class Device:
    """A pipeline, its steps in flight, and the KV tokens of its slots."""

    def __init__(self, config: WorkerConfig) -> None:
        self.pipeline = PipelineStages(config.pipeline_stages)
        self.flight: deque[InFlightStep] = deque()  # in the order of dispatch, which is that of the ends
        self._held: dict[int, int] = {}  # KV tokens by slot

    @property
    def free_s(self) -> float:
        """Returns the time at which all dispatched plans have ended."""
        return self.pipeline.free_s[-1]

    def dispatch(self, now_s: float, plan: StepPlan, cost: CostModel) -> TimeSpan:
        """Starts a step; one with decode rows is added to the steps in flight."""
        seconds = self.step_s(plan, cost)
        if plan.decode is None:
            return self.pipeline.run(now_s, seconds)
        span = self.pipeline.run_step(now_s, plan.decode.microbatch, seconds)
        self.flight.append(InFlightStep(plan, span.done_s))
        return span

    def step_s(self, plan: StepPlan, cost: CostModel) -> float:
        """Returns the seconds of a step on these devices alone, and updates the tokens of its slots."""
        if plan.decode is None:
            assert plan.prefill is not None, "a step holds something"
            return cost.prefill_s(plan.prefill)
        context_tokens = self.read_tokens(plan.decode)
        if plan.prefill is None:
            return cost.decode_s(plan.decode, context_tokens)
        assert isinstance(cost, MixedCostModel), f"{type(cost).__name__} has no price for a mixed step"
        return cost.mixed_s(plan.prefill, plan.decode, context_tokens)

    def read_tokens(self, plan: DecodeRows) -> int:
        """Returns the KV tokens that the step reads, its own included, after applying its admissions and tokens."""
        held = self._held
        for slot in plan.retire:
            held.pop(slot, None)
        for admission in plan.admit:
            held[admission.slot] = admission.position
        for slot, width in zip(plan.active, widths_of(plan), strict=True):
            held[slot] += width
        return self.held_tokens(plan.active)

    def held_tokens(self, slots: Sequence[int]) -> int:
        held = self._held
        return sum([held[slot] for slot in slots])

    def add_steps(self, slots: Sequence[int], steps: int) -> None:
        """Adds the tokens of steps that ran without an event, one per slot and step."""
        for slot in slots:
            self._held[slot] += steps


def widths_of(plan: DecodeRows) -> Sequence[int]:
    """Returns the tokens of each active slot."""
    return plan.widths or (1,) * len(plan.active)


def done(plan: StepPlan) -> StepDone:
    """Returns the outputs of the step: one fixed token for each row and each prompt that ends with it."""
    rows = list(zip(plan.decode.active, widths_of(plan.decode), strict=True)) if plan.decode else []
    chunks = plan.prefill.chunks if plan.prefill else ()
    first = tuple([(chunk.request_id, TOKEN) for chunk in chunks if chunk.last])
    return StepDone(plan.step_id, tuple([(slot, (TOKEN,) * width) for slot, width in rows]), first)
