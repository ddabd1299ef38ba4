"""Load turns from prompts to outputs, and the ratio of workers follows: the same tokens, and nothing lost."""

from __future__ import annotations

import math

import pytest

import jdisagg
from jdisagg.core.events import ROUTER, ChangeRole
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.scaling import Load, RoleScaler, Scaling
from jdisagg.serve.driver.autoscaling import Autoscaling
from jdisagg.serve.observability.metrics import Metrics
from tests.fixtures import conformance
from tests.policy.test_role_scaler import house
from tests.serve.live_http import eventually
from tests.serve.test_role_flip import SIZES

FAMILY = conformance.load("llama3")
EAGER = Scaling(price_s=0.5, steady_s=0.0, rest_s=1.0, idle=0.0, margin=0.05)
PROMPTS = jdisagg.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
OUTPUTS = jdisagg.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


class NoDriver:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[tuple[WorkerId, ChangeRole]] = []

    def now_s(self) -> float:
        return 0.0

    def post(self, actor: WorkerId, item: ChangeRole) -> None:
        self.posted.append((actor, item))

    def call(self, act) -> None:
        act()


def test_gauges_tell_nothing_before_anything_is_known_and_then_what_the_load_asks_for():
    metrics, scaler = Metrics("model"), RoleScaler(Scaling(), house(1, 1))
    metrics.watch_scaling(scaler)
    assert b'jdisagg_desired_replicas{model_name="model",role="prefill"} NaN' in metrics.render()
    scaler.autoscaler.look(Load(2.0, 4.3), {}, 0.0)
    text = metrics.render().decode()
    assert 'role="prefill"} 3.0' in text and 'role="decode"} 5.0' in text and "jdisagg_autoscaler_flips" in text


def test_who_only_watches_asks_for_no_flip():
    scaling, driver = Autoscaling(EAGER, house(1, 3)), NoDriver()
    assert all(not scaling._can_be(each) for each in scaling.scaler.configs)
    scaling.look(driver)
    assert driver.posted == []


def roles_of(llm: jdisagg.LLM) -> list[Role]:
    return sorted(peer.config.role for peer in llm.service.driver.actors[ROUTER].peers.values())


def ask(llm: jdisagg.LLM, prompts: list[list[int]], params: jdisagg.SamplingParams, expected: list[list[int]]) -> None:
    got = [list(answer.token_ids) for answer in llm.generate_all(prompts, params)]
    assert got == expected


@pytest.mark.slow
def test_the_ratio_follows_a_load_that_turns_from_prompts_to_outputs():
    long = [[(7 * place + number) % 90 + 1 for place in range(58)] for number in range(24)]
    short = [[number + 1, 2, 3] for number in range(12)]
    mesh = "prefill:1xtp1,decode:2xtp1"
    with jdisagg.LLM(model=str(FAMILY.folder), mesh="colocated:tp1", **SIZES, prefix_caching="off") as alone:
        first = [list(answer.token_ids) for answer in alone.generate_all(long, PROMPTS)]
        later = [list(answer.token_ids) for answer in alone.generate_all(short, OUTPUTS)]
    with jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, **SIZES, prefix_caching="off", autoscale="flip") as llm:
        scaler = llm.service.pools.scaling.scaler
        scaler.scaling = scaler.autoscaler.scaling = EAGER

        def served(prompts, params, expected, wanted) -> bool:
            ask(llm, prompts, params, expected)
            return wanted(roles_of(llm))

        eventually(lambda: served(long, PROMPTS, first, lambda roles: roles.count(Role.PREFILL) > 1), 240)
        assert len(roles_of(llm)) == 3
        eventually(lambda: served(short, OUTPUTS, later, lambda roles: roles.count(Role.DECODE) > 1), 240)
        assert scaler.autoscaler.flips >= 2 and not math.isnan(scaler.load.prefill)
        ask(llm, long, PROMPTS, first)
    assert llm.service.recompiles() == 0
