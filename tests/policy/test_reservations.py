"""What a reservation says of a prompt that it does not carry, and what COMMIT brings of it afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.codec import decode, encode
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Abort, Commit, Preempted
from jdisagg.core.request import Attempt, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role
from jdisagg.policy.page_pool import PagePool
from jdisagg.policy.planning import order_of, tail_tokens
from jdisagg.policy.prefix_cache import PAGE_NAME_BYTES, packed, page_hashes, unpacked
from jdisagg.policy.router.request_state import RequestState, build_reserve, reserve_for
from jdisagg.policy.shared_pages import SharedPages
from tests.policy.bench import OTHER, Bench
from tests.sim.cases import definition, pair, request, run_all, sent, worker
from tests.sim.world import World

A1 = Attempt(RequestId("a"), 1)
KEEPS = worker("decode-0", Role.DECODE, prefix_caching=True)
tokens = st.lists(st.integers(0, 99), max_size=40).map(tuple)


def row_of(each: Request, output: tuple[int, ...] = ()) -> RequestState:
    row = RequestState(each, order_of(each), Ledger(), 0.0, output=list(output))
    row.epoch, row.prefill, row.num_before = 1, WorkerId("prefill-0"), len(output)
    return row


def long_prompt(length: int) -> Request:
    return Request(RequestId("a"), tuple(10_000 + i for i in range(length)), SamplingParams(max_tokens=8))


def size_of(noun: Any) -> int:
    return len(json.dumps(encode(noun), separators=(",", ":")))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_reservation_for_a_long_prompt_does_not_carry_its_tokens(prefix_caching: bool):
    config = replace(KEEPS, page_size=16, prefix_caching=prefix_caching)
    message = build_reserve(row_of(long_prompt(100_000)), config, RouterConfig())
    names = (100_000 // 16) * PAGE_NAME_BYTES if prefix_caching else 0
    assert len(message.page_names) == names and not any(isinstance(each, list) for each in encode(message).values())
    assert size_of(message) < 4 * names / 3 + 400
    assert size_of(long_prompt(100_000)) > 600_000


def test_what_a_reservation_says_comes_back_as_it_was_said():
    message = build_reserve(row_of(long_prompt(70)), KEEPS, RouterConfig())
    assert decode(json.loads(json.dumps(encode(message)))) == message
    assert unpacked(message.page_names) == page_hashes(long_prompt(70).prompt, KEEPS.page_size)


@given(tokens, tokens, st.integers(1, 9), st.sampled_from(["", "tenant"]))
def test_names_that_continue_a_chain_are_those_of_the_whole(before: Any, after: Any, page_size: int, salt: str):
    whole = page_hashes(before + after, page_size, salt)
    names = page_hashes(before, page_size, salt)
    rest = (before + after)[len(names) * page_size :]
    assert names + page_hashes(rest, page_size, salt, continue_from=names[-1] if names else None) == whole
    assert unpacked(packed(whole)) == whole


@given(tokens.filter(len), tokens, st.integers(1, 9))
def test_a_resumed_request_names_its_pages_as_one_that_asks_for_all_of_it_at_once(
    prompt: Any, output: Any, page_size: int
):
    sampling = SamplingParams(max_tokens=64)
    row = row_of(Request(RequestId("a"), prompt, sampling, cache_salt="tenant"))
    assert row.page_names(page_size) == page_hashes(prompt, page_size, "tenant")
    row.output.extend(output)
    assert row.page_names(page_size) == page_hashes(prompt + output, page_size, "tenant")


@given(tokens.filter(len), tokens, st.integers(1, 9), st.sampled_from([0.0, 1.0]))
def test_an_answers_pages_are_named_from_the_prompts_names_and_its_tail_alone(
    prompt: Any, output: Any, page_size: int, penalty: float
):
    config = replace(KEEPS, page_size=page_size)
    each = Request(RequestId("a"), prompt, SamplingParams(max_tokens=64, presence_penalty=penalty), cache_salt="tenant")
    message = build_reserve(row_of(each), config, RouterConfig())
    tail = prompt[len(prompt) - tail_tokens(each, config) :]
    named = SharedPages(config, PagePool(8)).names_with(message, tail, output)
    assert named == page_hashes(prompt + output, page_size, "tenant")
    assert len(tail) == (len(prompt) if penalty else len(prompt) % page_size)


def test_pages_that_a_reservation_does_not_name_are_kept_under_no_name():
    shared = SharedPages(KEEPS, PagePool(8))
    unnamed = reserve_for(A1, request("a", 9), 0, OTHER, 1.0)
    assert shared.names_with(unnamed, (1,), (2, 3, 4, 5)) == ()
    off = SharedPages(replace(KEEPS, prefix_caching=False), PagePool(8))
    assert off.names_with(reserve_for(A1, request("a", 3), 0, OTHER, 1.0), (), (2, 3, 4, 5)) == ()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_tokens": 7}, "SenselessWord: other-end commits 7 tokens of 6"),
        ({"tail": (1,)}, "SenselessWord: other-end commits a tail of 1 tokens, decode-0 needs 2"),
        ({"tail": (1, 2, 3)}, "SenselessWord: other-end commits a tail of 3 tokens, decode-0 needs 2"),
        ({"tail": ()}, "SenselessWord: other-end commits a tail of 0 tokens, decode-0 needs 2"),
    ],
)
def test_a_commit_of_other_sizes_than_were_reserved_is_refused_with_both(changed: dict[str, Any], says: str):
    bench = Bench(KEEPS)
    assert bench.reserve(request("a", 6)) and bench.reserve(request("b", 6))
    bench.says(replace(Commit(A1, Sampled(3), 6, 1, tail=(1, 2)), **changed), OTHER)
    assert [each.detail for each in bench.said(Abort)] == [says]
    assert [owner.request_id for owner in bench.worker.decode_side.sequences] == ["b"], "the other goes on"


def test_only_where_something_is_made_of_it_does_a_commit_bring_the_end_of_its_prompt():
    for keeps, penalty, length in ((False, 0.0, 0), (True, 0.0, 2), (False, 1.0, 26)):
        world = World(pair(prefix_caching=keeps))
        run_all(world, [request("a", 26, frequency_penalty=penalty)])
        (commit,) = sent(world, Commit)
        assert commit.tail == request("a", 26).prompt[26 - length :]


@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("layout", ["pair", "colocated"])
def test_an_answer_that_gave_its_pages_back_on_the_way_is_found_by_the_next_turn(penalty: float, layout: str):
    """Little room: answers are preempted, and begin again with their output joined to the prompt."""
    both = pair(prefix_caching=True, num_pages=10)
    workers = both if layout == "pair" else [replace(both[0], worker=WorkerId("both"), role=Role.COLOCATED)]
    world = World([replace(each, reserve_tokens=1) for each in workers])
    first = [request(name, 7, max_tokens=20, presence_penalty=penalty) for name in "ab"]
    run_all(world, first)
    answer = tuple(definition(first[0]))
    again = Request(RequestId("c"), (*first[0].prompt, *answer, 5), SamplingParams(max_tokens=4), arrival_s=9.0)
    assert sent(world, Preempted)
    world.submit(again, 9.0)
    world.run()
    assert world.output(again.request_id) == definition(again)
