"""Steps of one kind, as most tests have them: what is asked of an effect found here is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

from jdisagg.core.events import RunStep
from jdisagg.core.steps import DecodeRows, PrefillChunks, StepPlan


def decode_plan(step_id: int, *fields: Any, **named: Any) -> StepPlan:
    """A step of decode rows alone."""
    return StepPlan(step_id, DecodeRows(*fields, **named))


def prefill_plan(step_id: int, *fields: Any) -> StepPlan:
    """A step of chunks alone."""
    return StepPlan(step_id, prefill=PrefillChunks(*fields))


def runs_decode(effect: object) -> TypeGuard[Any]:
    return isinstance(effect, RunStep) and effect.plan.decode is not None


def runs_prefill(effect: object) -> TypeGuard[Any]:
    return isinstance(effect, RunStep) and effect.plan.prefill is not None


def decode_runs(effects: Iterable[Any]) -> list[Any]:
    return [effect for effect in effects if runs_decode(effect)]


def prefill_runs(effects: Iterable[Any]) -> list[Any]:
    return [effect for effect in effects if runs_prefill(effect)]
