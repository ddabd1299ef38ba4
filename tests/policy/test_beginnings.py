"""The beginning of an answer that its grammar forces is computed with the prompt, and told with what is drawn first."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.errors import RequestError
from jdisagg.core.messages import Preempted, StartPrefill
from jdisagg.core.request import Request, SamplingParams
from tests.sim.cases import check_outputs, colocated, definition, pair, request, ring, run_all, sent
from tests.sim.fault_injector import Faults
from tests.sim.world import World
from tests.steps import runs_decode, runs_prefill

HELD = {"grammar": "even", "synchronous": True}


def begun(name: str, known: int, prompt_tokens: int = 9, **sampling: Any) -> Request:
    """Its first tokens are said to be forced, and are those that would be drawn."""
    each = request(name, prompt_tokens, **HELD, **sampling)
    return replace(each, forced=tuple(definition(each)[:known]))


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=4),
    st.sampled_from([pair, colocated, ring]),
    st.booleans(),
    st.sampled_from([0.0, 0.02]),
)
def test_answers_are_those_of_tokens_that_were_drawn_one_by_one(
    sizes: list[tuple[int, int]], cluster: Any, few: bool, fail_plan: float
):
    """Also where pages do not do for all, or steps fail, and answers are begun anew."""
    world = World(cluster(num_pages=16 if few else 64, reserve_tokens=1), faults=Faults(seed=1, fail_plan=fail_plan))
    asked = [begun(f"r{i}", known, max_tokens=most) for i, (known, most) in enumerate(sizes)]
    for each in asked:
        world.submit(each, each.arrival_s)
    world.run()
    check_outputs(world, asked)
    if not fail_plan:
        assert [world.output(each.request_id) for each in asked] == [definition(each) for each in asked]


def test_a_beginning_is_computed_in_the_chunk_of_its_prompt_and_no_step_draws_it():
    steps = []
    for known in (0, 6):
        world, each = World(pair()), begun("a", known, max_tokens=10)
        run_all(world, [each])
        chunks = [chunk for _, _, run in world.effects if runs_prefill(run) for chunk in run.plan.prefill.chunks]
        assert sum(len(chunk.tokens) for chunk in chunks) == 9 + known and chunks[-1].num_output == known
        assert [message.request.prompt_tokens for message in sent(world, StartPrefill)] == [9 + known]
        steps.append(sum(runs_decode(effect) for _, _, effect in world.effects))
        assert world.output(each.request_id) == definition(each)
    assert steps[1] == steps[0] - 6


def test_an_answer_whose_pages_are_taken_goes_on_behind_its_beginning():
    world = World(pair(num_pages=16, reserve_tokens=1))
    asked = [begun(f"r{i}", 4, max_tokens=24) for i in range(4)]
    run_all(world, asked)
    assert any(isinstance(message, Preempted) for message in sent(world, Preempted))
    assert [world.output(each.request_id) for each in asked] == [definition(each) for each in asked]


@pytest.mark.parametrize(
    ("forced", "stops", "beginning"),
    [((), (), ()), ((1, 2, 3), (), (1, 2, 3)), ((1, 2, 3), (2,), (1,)), ((1,) * 9, (), (1,) * 7), ((4,), (4,), ())],
)
def test_a_token_is_left_to_draw_and_what_ends_an_answer_is_drawn(
    forced: tuple[int, ...], stops: tuple[int, ...], beginning: tuple[int, ...]
):
    each = replace(request("a", stop_token_ids=stops, **HELD), forced=forced)
    assert each.beginning == beginning


@pytest.mark.parametrize(
    ("sampling", "forced"),
    [({}, (1,)), ({**HELD, "logprobs": 1}, (1,)), (HELD, (500,)), (HELD, [1]), ({**HELD, "prompt_logprobs": 0}, (1,))],
)
def test_a_beginning_without_a_grammar_or_whose_scores_are_asked_for_is_refused(sampling: Any, forced: Any):
    each = replace(request("a"), sampling=SamplingParams(**sampling), forced=forced)
    with pytest.raises(RequestError, match="forced"):
        each.check(97, 64)
