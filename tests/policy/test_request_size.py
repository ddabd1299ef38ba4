"""Tests of the order and the sizes of requests, and of packing prompts into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import MAX_PRIORITY
from jdisagg.core.steps import History
from jdisagg.core.worker_config import Role
from jdisagg.policy.request_size import (
    HEAD_START_S,
    history_of,
    order_of,
    predicted_pages,
    predicted_tokens,
)
from jdisagg.policy.worker.prefill import PromptView, pick_chunks
from tests.sim.cases import request, worker

CONFIG = worker("w", Role.PREFILL, prefill_buckets=(8, 16), max_chunk_seqs=3)

views = st.lists(st.builds(PromptView, st.integers(1, 60), st.integers(0, 12)), max_size=8)


@given(views, st.integers(0, 30))
def test_a_plan_fits_its_bucket_its_pages_and_its_rows(waiting, free_pages):
    picked = pick_chunks(waiting, free_pages, CONFIG)
    assert sum(tokens for _, tokens in picked) <= 16 and len(picked) <= 3
    assert sum(waiting[index].pages_to_start for index, _ in picked) <= free_pages
    assert len({index for index, _ in picked}) == len(picked)


@given(views, st.integers(0, 30))
def test_chunks_are_cut_the_same_whoever_is_beside_them(waiting, free_pages):
    for index, tokens in pick_chunks(waiting, free_pages, CONFIG):
        assert tokens == min(16, waiting[index].tokens_left)


@given(views, st.integers(0, 30))
def test_the_first_in_line_is_never_passed_over_unless_it_lacks_pages(waiting, free_pages):
    picked = [index for index, _ in pick_chunks(waiting, free_pages, CONFIG)]
    if waiting and waiting[0].pages_to_start <= free_pages:
        assert picked[0] == 0
    blocked = next((i for i, view in enumerate(waiting) if view.pages_to_start > free_pages), len(waiting))
    assert all(index < blocked or not waiting[index].pages_to_start for index in picked)


def test_who_has_started_goes_on_behind_one_that_lacks_pages():
    waiting = [PromptView(8, 5), PromptView(8, 1), PromptView(4, 0)]
    assert pick_chunks(waiting, 4, CONFIG) == [(2, 4)]


def test_a_reservation_holds_the_prompt_and_the_output_but_never_the_last_token():
    assert predicted_tokens(request("a", 6, max_tokens=10), 512) == 15
    assert predicted_tokens(request("a", 6, max_tokens=10), 4) == 9
    assert predicted_tokens(request("a", 6, max_tokens=1), 512) == 6
    assert predicted_tokens(request("a", 6, max_tokens=10), 0) == 6
    assert predicted_pages(request("a", 6, max_tokens=3), CONFIG) == 2


def test_the_history_of_a_resumed_request_tells_prompt_from_output():
    each = request("a", 6, presence_penalty=1.0)
    assert history_of(each.prompt, each.sampling, 2, (9,)) == History(each.prompt[:4], (*each.prompt[4:], 9))
    assert history_of(each.prompt, request("a", 6).sampling, 2, (9,)) == History()


def test_priority_is_a_head_start_by_which_nobody_is_shut_out():
    honest = request("honest", arrival_s=100.0)
    pushy = [request(f"pushy{i}", arrival_s=100.0 + i, priority=-MAX_PRIORITY) for i in range(60)]
    before = [each.arrival_s for each in pushy if order_of(each) < order_of(honest)]
    assert max(before) <= 100.0 + HEAD_START_S * MAX_PRIORITY
