"""KV below HBM, over toy machines: it goes down before it makes room, comes up where that pays, and is never wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jdisagg.core.events import ROUTER, Received, RouterLost
from jdisagg.core.messages import Preempted, Refused, Reserved
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.tiers import MovePages, Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from tests.policy.tier_yard import TierYard
from tests.sim.cases import check_ended, check_outputs, colocated, definition, pair, run_all, sent, worker
from tests.sim.world import World
from tests.steps import runs_prefill

KEPT = {"prefix_caching": True, "num_pages": 16}
DRAM = {**KEPT, "dram_pages": 128}


def ask(name: str, beginning: int, arrival_s: float, length: int = 40, tokens: int = 4) -> Request:
    """Prompts of the same `beginning` are equal: ten pages of four tokens."""
    prompt = tuple((13 * beginning + 5 * at) % 97 for at in range(length))
    return Request(RequestId(name), prompt, SamplingParams(max_tokens=tokens), arrival_s=arrival_s)


def rounds(count: int = 3, prompts: int = 4) -> list[Request]:
    """Each prompt in its turn, again and again: together they are larger than HBM."""
    turns = [(turn, prompt) for turn in range(count) for prompt in range(prompts)]
    return [ask(f"r{turn}-{prompt}", prompt, 1.0 * (turn * prompts + prompt)) for turn, prompt in turns]


def served(workers, requests: list[Request], yard: TierYard | None = None) -> World:
    world = World(workers, yard=yard)
    run_all(world, requests)
    check_outputs(world, requests)
    check_ended(world, requests)
    return world


def cached(world: World, name: str) -> int:
    return world.finished[RequestId(name)][0].ledger.cached_tokens


@pytest.mark.parametrize("workers", [colocated, pair], ids=["colocated", "pair"])
def test_a_prompt_that_left_hbm_comes_back_from_dram(workers):
    world = served(workers(**DRAM), rounds())
    assert world.yard.moved[Tier.HBM, Tier.DRAM] and world.yard.moved[Tier.DRAM, Tier.HBM]
    assert cached(world, "r2-0") == 36
    assert cached(served(workers(**KEPT), rounds()), "r2-0") == 0


@pytest.mark.parametrize("workers", [colocated, pair], ids=["colocated", "pair"])
def test_what_was_used_twice_comes_back_from_disk(workers):
    world = served(workers(**KEPT, dram_pages=12, disk_pages=256), rounds(8))
    assert world.yard.moved[Tier.DRAM, Tier.DISK] and world.yard.moved[Tier.DISK, Tier.HBM]


@pytest.mark.parametrize("disk_pages", [0, 3, 8, 20])
@pytest.mark.parametrize("dram_pages", [1, 2, 4, 6, 8, 10])
def test_pages_do_not_take_each_others_places_for_ever_in_tiers_smaller_than_hbm(dram_pages, disk_pages):
    """In a worker at rest every move ends, and asks for no next one."""
    world = served(colocated(**KEPT, dram_pages=dram_pages, disk_pages=disk_pages), rounds(2))
    assert moves_of(world) < 100


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.POOL])
@pytest.mark.parametrize("fault", ["dead", "lying", "hung"])
def test_a_tier_that_fails_costs_time_and_no_token(tier, fault):
    yard = TierYard()
    {"dead": yard.dead, "lying": yard.lying, "hung": yard.hung}[fault].add(tier)
    sizes = {"dram_pages": 128} if tier is Tier.DRAM else {"shared_pool": True}
    requests = rounds()
    world = World(colocated(**KEPT, **sizes), yard=yard)
    run_all(world, requests)
    check_outputs(world, requests)
    assert cached(world, "r2-0") == 0


def test_pages_of_one_worker_come_to_another_by_way_of_the_pool():
    first = World(colocated(**KEPT, shared_pool=True))
    run_all(first, rounds(1))
    second = served(colocated(**KEPT, shared_pool=True), [ask("again", 0, 0.0)], yard=first.yard)
    assert cached(second, "again") == 36


def preempted(world: World) -> int:
    return len(sent(world, Preempted))


@pytest.mark.parametrize("sizes", [{}, {"dram_pages": 128}], ids=["computed again", "parked"])
def test_a_sequence_that_had_to_yield_goes_on_with_the_same_tokens(sizes):
    """Parked, what it had is read back and not computed: only the page that was not full is."""
    requests = [ask(f"s{number}", number, 0.001 * number, length=20, tokens=40) for number in range(3)]
    world = served(colocated(**KEPT, reserve_tokens=4, **sizes), requests)
    assert preempted(world)
    again = [effect.plan.prefill for _, _, effect in world.effects if runs_prefill(effect)]
    computed = sum(chunk.num_tokens for chunk in again) - sum(len(each.prompt) for each in requests)
    assert computed < 40 if sizes else computed > 40, f"{computed} tokens were computed twice"


def moves_of(world: World) -> int:
    return sum(isinstance(effect, MovePages) for _, _, effect in world.effects)


def moments(workers: list[WorkerConfig], requests: list[Request]) -> Iterator[World]:
    """Worlds that stand right behind one of the moves between tiers that these requests bring about."""
    whole = served(workers, requests)
    for at in range(1, moves_of(whole) + 1, 3):
        world = World(workers)
        for each in requests:
            world.submit(each, each.arrival_s)
        while world.waiting and moves_of(world) < at:
            world.step()
        yield world


@pytest.mark.parametrize("workers", [colocated, pair], ids=["colocated", "pair"])
@pytest.mark.parametrize("fault", ["cancel", "hang", "die", "lie"])
def test_whatever_ends_at_any_moment_of_a_move_every_page_comes_back_and_no_token_is_wrong(workers, fault):
    requests = rounds(2)
    for world in moments(workers(**DRAM), requests):
        if fault == "cancel":
            running = [each for each in requests if each.arrival_s <= world.now_s][-1]
            world.cancel(running.request_id, world.now_s)
        else:
            {"hang": world.yard.hung, "die": world.yard.dead, "lie": world.yard.lying}[fault].add(Tier.DRAM)
        world.run()
        check_outputs(world, requests)
        for each in world.workers.values():
            each.check_invariants()
            assert not each.tiers.busy and each.shared.available == each.config.num_pages


def waiting_for_pages() -> tuple[World, Request]:
    """A decode worker that has been asked for a reservation, and fetches what lies below first."""
    requests = rounds(2)
    world = World(pair(**DRAM))
    for each in requests:
        world.submit(each, each.arrival_s)
    decode = world.workers[WorkerId("decode-0")].decode
    while world.waiting and not decode.awaiting_fetch:
        world.step()
    (owner,) = decode.awaiting_fetch
    return world, next(each for each in requests if each.request_id == owner.request_id)


def test_a_reservation_that_is_asked_for_twice_while_it_waits_is_made_once():
    world, each = waiting_for_pages()
    decoder = world.workers[WorkerId("decode-0")]
    (message,) = decoder.decode.awaiting_fetch.values()
    again = decoder.handle(Received(ROUTER, message), world.now_s)
    assert Reserved not in {type(getattr(effect, "message", None)) for effect in again}
    world.run()
    answers = [told for told in sent(world, Reserved) if told.attempt == message.attempt]
    assert len(answers) == 1 and world.output(each.request_id) == definition(each)


def test_a_reservation_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    world, each = waiting_for_pages()
    world.cancel(each.request_id, world.now_s)
    world.run()
    assert not sent(world, Refused) and world.output(each.request_id) == []
    world.check_all_ended()


def test_a_router_that_is_lost_leaves_no_reservation_waiting():
    world, _ = waiting_for_pages()
    decoder = world.workers[WorkerId("decode-0")]
    decoder.handle(RouterLost(), world.now_s)
    decoder.check_invariants()
    assert decoder.idle and decoder.shared.available == decoder.config.num_pages


def several(role: Role, **sizes) -> list[WorkerConfig]:
    """Two workers of this role, and one of what else is needed."""
    others = {Role.COLOCATED: (), Role.PREFILL: (Role.DECODE,), Role.DECODE: (Role.PREFILL,)}[role]
    rows = [(role, "0"), (role, "1"), *((each, "0") for each in others)]
    return [worker(f"{each}-{number}", each, **sizes) for each, number in rows]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("told", [True, False], ids=["lost", "killed unsaid"])
def test_a_worker_that_dies_at_any_moment_of_a_move_takes_no_request_with_it(role, told):
    requests = rounds(2)
    for world in moments(several(role, **DRAM), requests):
        mover = next(actor for _, actor, effect in reversed(world.effects) if isinstance(effect, MovePages))
        if not told:
            world.kill(mover, world.now_s)
        world.lose(mover, world.now_s + (0.0 if told else 1.0))  # by its silence
        world.run()
        check_outputs(world, requests)
        replaced = any(name.startswith(mover[:-1]) for name in world.workers)
        whole = [each for each in requests if world.output(each.request_id) == definition(each)]
        assert not replaced or len(whole) == len(requests)
