"""Who begins to decode before its KV is whole, what its turn waits for, and who goes first where places are few."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.codec import decode, encode
from jdisagg.core.events import ROUTER, ChangeRole, EmitTokens, KVArrived, OpenGates, Received, Send, StepDone
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Abort, Ack, Commit, Preempted
from jdisagg.core.request import BROKEN, Attempt, Request, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.steps import Gate, KVTransfer
from jdisagg.core.tiers import MovePages, Tier
from jdisagg.core.worker_config import Role, Stages, WorkerConfig
from jdisagg.policy.cache.page_pool import PagePool, SharedPages
from jdisagg.policy.cache.prefix_cache import PAGE_NAME_BYTES, packed, page_hashes, unpacked
from jdisagg.policy.request_size import order_of, tail_tokens
from jdisagg.policy.router.request_state import RequestState, build_reserve, reserve_for
from jdisagg.policy.worker.decode import tokens_until_end
from jdisagg.policy.worker.sequence import end_of
from jdisagg.policy.worker.worker import Worker
from tests.policy.bench import OTHER, Bench
from tests.policy.tier_yard import TierYard
from tests.sim.cases import check_outputs, colocated, definition, pair, request, run_all, sent, worker
from tests.sim.costs import Costs
from tests.sim.world import World
from tests.steps import decode_runs, runs_prefill

A1 = Attempt(RequestId("a"), 1)

STAGES = ((0, 3), (3, 6), (6, 8))
SOURCE = WorkerId("prefill-0")


class StagedBench:
    """A decode worker of three stages; each prompt's KV is one chunk in three parts, a stage's layers each."""

    def __init__(self, **sizes) -> None:
        given = {"layer_groups": STAGES, "num_slots": 6, "decode": Stages(3), **sizes}
        self.worker = Worker(worker("decode-0", Role.DECODE, **given))
        self.effects: list = []

    def take(self, event) -> list:
        effects = self.worker.handle(event, 0.0)
        self.worker.check_invariants()
        self.effects += effects
        return effects

    def begin(self, each: Request, parts: tuple[int, ...] = (), layers=STAGES) -> list:
        """A reservation, these parts in it, and COMMIT."""
        self.take(Received(SOURCE, reserve_for(Attempt(each.request_id, 1), each, 0, SOURCE, 10.0)))
        for part in parts:
            self.arrive(each, part)
        return self.take(
            Received(SOURCE, Commit(Attempt(each.request_id, 1), Sampled(3), len(each.prompt), 3, layers=layers))
        )

    def arrive(self, each: Request, part: int) -> list:
        name = each.request_id
        nowhere = (NULL_PAGE,)  # as of pages that the worker holds already
        return self.take(
            KVArrived(KVTransfer(Attempt(name, 1), SOURCE, self.worker.config.worker, (1,), nowhere, 4, part))
        )

    def read(self, plan: Any) -> list:
        return self.take(StepDone(plan.step_id, tuple((slot, (Sampled(4),)) for slot in plan.decode.active)))

    @property
    def free_pages(self) -> int:
        return self.worker.shared.pool.free_pages


def plans(effects: list) -> list[Any]:
    return [run.plan for run in decode_runs(effects)]


def opened(effects: list) -> list[str]:
    return [effect.attempt.request_id for effect in effects if isinstance(effect, OpenGates)]


def test_a_sequence_is_seated_when_its_first_stage_is_in_and_later_stages_have_gates():
    bench = StagedBench()
    (plan,) = plans(bench.begin(request("a"), (0,)))
    assert plan.decode.gates == (Gate(1, A1, (1,)), Gate(2, A1, (2,))) and len(plan.decode.admit) == 1
    assert not plans(bench.arrive(request("a"), 1)), "its microbatch takes no other step"
    effects = bench.arrive(request("a"), 2)
    assert [type(each.message) for each in effects if isinstance(each, Send)].count(Ack) == 1
    (more,) = plans(effects)
    assert more.decode.microbatch == plan.decode.microbatch and not opened(bench.effects)
    assert not more.decode.gates and not more.decode.admit


def test_nobody_is_seated_while_the_first_stage_lacks_a_part_or_parts_hold_all_layers():
    for parts, layers, sizes in [
        ((1, 2), STAGES, {}),
        ((0,), (), {}),
        ((0,), STAGES, {"stage_admission": False}),
        ((0,), STAGES, {"layer_groups": ()}),
    ]:
        assert not plans(StagedBench(**sizes).begin(request("a"), parts, layers))


def test_other_microbatches_go_on_as_if_it_was_not_there():
    bench = StagedBench()
    (held,) = plans(bench.begin(request("a"), (0,)))
    steps = plans(bench.begin(request("b", max_tokens=30), (0, 1, 2)))
    assert len(steps) == 2, "two steps ahead, though the first microbatch's step waits"
    for _ in range(9):
        steps += plans(bench.read(steps.pop(0)))
    assert len(steps) == 2 and all(step.decode.microbatch != held.decode.microbatch for step in steps)


def test_an_abort_opens_the_gates_before_the_pages_can_be_anothers():
    bench = StagedBench()
    free = bench.free_pages
    (plan,) = plans(bench.begin(request("a"), (0,)))
    effects = bench.take(Received(SOURCE, Abort(A1, "no longer wanted")))
    assert opened(effects) == ["a"] and bench.free_pages == free
    assert isinstance(effects[0], OpenGates), "first of all"
    bench.read(plan)
    assert bench.worker.idle and not [each for each in bench.effects if isinstance(each, Send) and "Drawn" in str(each)]


def test_a_whole_sequence_that_finds_no_other_place_takes_that_of_one_that_waits():
    bench = StagedBench(num_slots=1, decode=Stages(1))
    free = bench.free_pages
    early, whole = request("a", max_tokens=3), request("b", max_tokens=3)
    (held,) = plans(bench.begin(early, (0,)))
    steps = plans(effects := bench.begin(whole, (0, 1, 2)))
    assert opened(effects) == ["a"] and [each.request_id for each in steps[0].decode.admit] == ["b"]
    assert steps[0].decode.retire == held.decode.active
    for part in (1, 2):
        bench.arrive(early, part)
    for step in (steps := plans(bench.effects)):
        steps += plans(bench.read(step))
    assert [each.request_id for step in steps for each in step.decode.admit] == ["a", "b", "a"]
    assert bench.worker.idle and bench.free_pages == free
    drawn = [delta for each in bench.effects if isinstance(each, Send) for delta in getattr(each.message, "deltas", ())]
    assert [(delta.attempt.request_id, delta.index) for delta in drawn] == [("b", 1), ("b", 2), ("a", 1), ("a", 2)]


def test_whole_sequences_keep_away_from_a_microbatch_that_waits_as_long_as_there_is_another():
    bench = StagedBench()
    (held,) = plans(bench.begin(request("a"), (0,)))
    steps = [plan for name in "bcde" for plan in plans(bench.begin(request(name), (0, 1, 2)))]
    assert held.decode.microbatch not in {step.decode.microbatch for step in steps} and not opened(bench.effects)


def test_the_last_step_may_be_the_first_and_its_pages_stay_until_its_kv_is_in():
    bench = StagedBench()
    free = bench.free_pages
    each = request("a", max_tokens=2)
    (plan,) = plans(bench.begin(each, (0,)))
    bench.arrive(each, 1)
    assert bench.free_pages < free
    bench.arrive(each, 2)
    assert bench.free_pages == free, "given back when the step is certain to run"
    bench.read(plan)
    assert bench.worker.idle


# What a reservation says of a prompt that it does not carry, and what COMMIT brings of it afterwards.

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
    assert [owner.request_id for owner in bench.worker.decode.sequences] == ["b"], "the other goes on"


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


# What the end of a step makes of a row that drew several tokens.

TOKENS = st.sampled_from([2, 3, 4, 5, BROKEN])
SCORES = st.sampled_from([None, -1.0, float("nan")])


class Answer:
    """As much of a sequence as its end depends on."""

    def __init__(self, sampling: SamplingParams, before: int) -> None:
        self.sampling, self.output = sampling, [9] * before


def one_by_one(answer: Answer, drawn: tuple[Sampled, ...]) -> Any:
    for count, sampled in enumerate(drawn, 1):
        if reason := end_of(answer.sampling, sampled, len(answer.output) + count):
            return drawn[: count - sampled.broken], reason
    return drawn, None


@given(
    st.lists(TOKENS, min_size=1, max_size=8),
    SCORES,
    st.lists(st.integers(2, 4), max_size=3, unique=True),
    st.integers(1, 12),
    st.integers(0, 6),
)
def test_a_row_of_several_tokens_ends_where_its_tokens_one_by_one_do(
    tokens: list[int], score: float | None, stops: list[int], max_tokens: int, before: int
) -> None:
    answer: Any = Answer(SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stops)), before)
    drawn = tuple(Sampled(token, score) for token in tokens)
    ends = tokens_until_end(answer, drawn)
    assert ends == one_by_one(answer, drawn)


# Sequences that have to stop and are to go on: what they have is put below, and fetched from there, not computed.

KEPT: dict[str, Any] = {"prefix_caching": True, "num_pages": 16, "reserve_tokens": 4}
DRAINED = WorkerId("decode-0")


def three(**sampling: Any) -> list[Request]:
    return [request(name, 20, max_tokens=40, arrival_s=0.001 * at, **sampling) for at, name in enumerate("abc")]


def names_moved(world: World, destination: Tier) -> set[int]:
    moves = [effect.move for _, _, effect in world.effects if isinstance(effect, MovePages)]
    return {name for move in moves if move.destination is destination for name in unpacked(move.names)}


def computed(world: World) -> int:
    return sum(effect.plan.prefill.num_tokens for _, _, effect in world.effects if runs_prefill(effect))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("workers", [colocated, pair], ids=["colocated", "pair"])
def test_who_has_to_yield_is_parked_whole_and_goes_on_with_the_same_tokens(workers: Any, sampling: dict[str, Any]):
    world, requests = World(workers(**KEPT, dram_pages=128)), three(**sampling)
    run_all(world, requests)
    gave_way = sent(world, Preempted)
    assert gave_way and world.yard.moved[Tier.DRAM, Tier.HBM]
    for each in gave_way:
        whole = next(one for one in requests if one.request_id == each.attempt.request_id)
        fed = (*whole.prompt, *definition(whole))[: len(whole.prompt) + len(each.output) - 1]
        assert set(page_hashes(fed, 4, "")) <= names_moved(world, Tier.DRAM), "every full page of it"


def test_a_parked_sequence_is_read_back_where_it_would_have_been_computed_again():
    without, parked = World(colocated(**KEPT)), World(colocated(**KEPT, dram_pages=128))
    for world in (without, parked):
        run_all(world, three())
        assert sent(world, Preempted)
    assert computed(parked) < 0.7 * computed(without)


def cluster(**sizes: Any) -> list[WorkerConfig]:
    sizes = {**KEPT, "num_pages": 64, **sizes}
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
    return [worker(name, role, **sizes) for name, role in roles.items()]


def drained(yard: TierYard | None = None, drain_s: float = 0.2, **sizes: Any) -> World:
    """Long answers, of which some are on a worker that is to leave in the midst of them. Prompts are dear."""
    world = World(cluster(**sizes), yard=yard, costs=Costs(prefill_token_s=2e-3))
    requests = [request(name, 12, max_tokens=90) for name in "abcd"]
    for each in requests:
        world.submit(each)
    held = world.workers[DRAINED].decode.sequences
    while not any(len(each.output) >= 30 for each in held.values()):
        world.step()
    world._at(world.now_s, ROUTER, ChangeRole(DRAINED, 1, None, drain_s))
    world.run()
    check_outputs(world, requests)
    assert all(world.output(each.request_id) == definition(each) for each in requests)
    assert world.workers[DRAINED].shared.available == 64
    return world


def whole_s() -> float:
    world = World(cluster(), costs=Costs(prefill_token_s=2e-3))
    run_all(world, [request(name, 12, max_tokens=90) for name in "abcd"])
    return max(at_s for at_s, _, effect in world.effects if isinstance(effect, EmitTokens))


def test_streams_of_a_worker_that_leaves_go_on_from_the_pool():
    """What they had is fetched by the next worker; the last page, which was not full, is computed."""
    drain_s = 0.1 * whole_s()
    without, pooled = drained(drain_s=drain_s), drained(drain_s=drain_s, shared_pool=True)
    assert pooled.yard.moved[Tier.HBM, Tier.POOL] and pooled.yard.moved[Tier.POOL, Tier.HBM]
    assert computed(pooled) < computed(without)


@pytest.mark.parametrize("fault", ["dead", "lying", "hung"])
def test_a_pool_that_fails_costs_a_worker_that_leaves_no_stream(fault: str):
    yard = TierYard()
    getattr(yard, fault).add(Tier.POOL)
    world = drained(yard, drain_s=0.1 * whole_s(), shared_pool=True)
    assert names_moved(world, Tier.POOL) and set("abcd") <= set(world.finished)


def test_where_nothing_lies_below_nothing_is_parked():
    world = drained(drain_s=0.1 * whole_s())
    assert not names_moved(world, Tier.POOL) and RequestId("a") in world.finished
