"""Sequences that begin to decode before all of their KV is in: the same tokens, and all pages come back."""

from dataclasses import replace

import pytest

from jdisagg.core.events import OpenGates
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import FinishReason, Request
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.steps import StepPlan
from jdisagg.core.worker_config import Role, Stages, TransferMode
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.cluster_spec import cluster_spec, longest, plain_settings, published
from tests.sim.cases import definition, reasons, request, worker
from tests.sim.costs import Costs
from tests.sim.fault_injector import Faults
from tests.sim.test_cluster import one
from tests.sim.world import World
from tests.steps import runs_decode

STAGES = {"layer_groups": ((0, 3), (3, 6), (6, 8)), "prefill_buckets": (8,), "transfer": TransferMode.LAYER}
PIPELINE = {"num_slots": 6, "decode": Stages(3)}
SLOW_LINK = Costs(ship_s=2e-3)
ROUTER = RouterConfig(max_retries=20)


def world_of(faults: Faults | None = None, **sizes) -> World:
    sizes = {"part_timeout_s": 0.05, **STAGES, **sizes}
    workers = [worker("prefill-0", Role.PREFILL, **sizes), worker("decode-0", Role.DECODE, **sizes, **PIPELINE)]
    return World(workers, ROUTER, SLOW_LINK, faults)


def gated(world: World) -> list[StepPlan]:
    return [effect.plan for _, _, effect in world.effects if runs_decode(effect) and effect.plan.decode.gates]


def asked() -> list[Request]:
    return [request(f"r{n}", prompt_tokens=5 + 3 * n, max_tokens=2 + n) for n in range(12)]


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(seed=3, lose_transfer=0.1, flip_bit=0.1),
        Faults(seed=4, fail_transfer=0.03, fail_plan=0.05),
        Faults(seed=5, lose_message=0.05, double_message=0.1, jitter_s=2e-3),
    ],
)
@pytest.mark.parametrize("stage_admission", [True, False])
def test_every_output_is_the_definition_whether_or_not_stages_wait(stage_admission, faults):
    world = world_of(faults, stage_admission=stage_admission)
    for number, each in enumerate(asked()):
        world.submit(each, 0.005 * number)
    world.run()
    world.check_all_ended()
    for each in asked():
        gave_up = not faults.calm and FinishReason.ERROR in reasons(world, each)
        assert gave_up or world.output(each.request_id) == definition(each)
    assert bool(gated(world)) == stage_admission


def test_a_cancel_while_a_stage_waits_returns_every_page_and_changes_nobody_elses_tokens():
    opened = 0
    for step in range(40):
        world = world_of()
        for number, each in enumerate(asked()):
            world.submit(each, 0.005 * number)
        for name in ("r3", "r7"):
            world.cancel(request(name).request_id, 0.02 + 0.001 * step)
        world.run()
        world.check_all_ended()
        for each in asked():
            (finish,) = world.finished[each.request_id]
            assert finish.reason is FinishReason.ABORT or world.output(each.request_id) == definition(each)
        opened += sum(isinstance(effect, OpenGates) for _, _, effect in world.effects)
    assert opened, "no cancel met a closed gate"


def test_a_sequence_begins_before_its_last_part_and_has_its_second_token_sooner():
    second_s = {}
    for on in (True, False):
        world = world_of(stage_admission=on)
        world.submit(request("a", 30))
        world.run()
        at_s = [at_s for at_s, _, effect in world.effects if runs_decode(effect)]
        second_s[on] = at_s[0]
    assert second_s[True] < second_s[False]


def test_a_simulated_step_begins_when_its_gates_are_open():
    work = one(900, 12)
    settings = plain_settings(longest(work))
    given = cluster_spec(MeshSpec.parse("prefill:tp1,decode:pp2tp1"), settings, published("opt-13b"), 1e9)
    ended_s = {}
    for on in (True, False):
        workers = [
            replace(each, layer_groups=((0, 20), (20, 40)), transfer=TransferMode.LAYER, stage_admission=on)
            for each in given.workers
        ]
        hosted = Cluster(workers, given.costs, given.links)
        outcome = hosted.run(work)
        hosted.check_all_ended()
        assert outcome.records[0].emitted_tokens == 12
        ended_s[on] = outcome.records[0].end_s
    assert ended_s[True] == pytest.approx(ended_s[False])
