"""Live: the last stage's KV comes late, is lost or cannot be written, or nobody wants it any more."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from jdisagg.core.events import ROUTER, Cancel
from jdisagg.core.request import FinishReason
from jdisagg.core.steps import StepPlan
from jdisagg.core.worker_config import Stages, TransferMode
from jdisagg.engine.executor import GroupDone
from jdisagg.engine.runner import HeldStep
from jdisagg.engine.toy import ToyExecutor, ToyShipment, toy_output
from tests.serve.live_http import eventually
from tests.serve.live_toy import worker_config
from tests.serve.test_broken_machines import PAIR, Stack, answer, answers, requests, started

STAGES = {"layer_groups": ((0, 2), (2, 4)), "transfer": TransferMode.LAYER}


class LateToy(ToyExecutor):
    """The parts of its last stage land `late_s` later than they did; it counts steps that had to wait."""

    late_s = 0.0
    waited = 0

    def check(self, shipment: ToyShipment) -> Callable[[], bool]:
        def verdict() -> bool:
            time.sleep(self.late_s if shipment.transfer.layers == (2, 4) else 0.0)
            return shipment.intact()

        return verdict

    def run(self, plan: StepPlan, group_done: GroupDone | None = None):
        pending = super().run(plan, group_done)
        self.waited += isinstance(pending, HeldStep) and not pending.done
        return pending


def stack_of(late_s: float) -> tuple[Stack, LateToy]:
    prefill, decode = (worker_config(f"{role}-0", role, 64) for role in PAIR)
    late = LateToy(replace(decode, decode=Stages(2), **STAGES))
    late.late_s = late_s
    return Stack([ToyExecutor(replace(prefill, **STAGES)), late]), late


def right(asked) -> list:
    return [(FinishReason.LENGTH, toy_output(each.prompt, each.sampling)) for each in asked]


def test_tokens_are_right_though_stages_wait_and_others_go_on_meanwhile():
    stack, machine = stack_of(0.2)
    with started(stack):
        asked = requests(6)
        assert answers(stack, asked) == right(asked)
        eventually(stack.idle)
    assert machine.waited


@pytest.mark.parametrize("part", ["insert", "bits", "decode"])
def test_a_failure_while_a_stage_waits_costs_no_token(part):
    stack, machine = stack_of(0.2)
    with started(stack):
        asked = requests(4)
        for each in asked:  # one by one, so that each is seated ahead
            stack.machines[machine.config.worker].left[part] = 1
            assert answers(stack, [each]) == right([each])
        eventually(stack.idle)
    assert machine.waited


def test_a_cancel_while_a_stage_waits_gives_every_page_back():
    stack, machine = stack_of(1.0)
    (gone,) = requests(1)

    async def cancelled() -> FinishReason:
        task = asyncio.create_task(answer(stack, gone))
        async with asyncio.timeout(60):
            while not machine.waited:
                await asyncio.sleep(0.005)
        stack.service.driver.post(ROUTER, Cancel(gone.request_id))
        return (await task)[0]

    with started(stack):
        assert asyncio.run(cancelled()) is FinishReason.ABORT
        eventually(stack.idle)
        machine.late_s = 0.0
        more = [replace(each, request_id=f"again-{each.request_id}") for each in requests(3)]
        assert answers(stack, more) == right(more)
