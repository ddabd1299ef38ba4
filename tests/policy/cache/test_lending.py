"""Pages that one worker fetches from another, over toy machines: the right tokens, whatever becomes of the lender."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jdisagg.core.events import Send
from jdisagg.core.messages import FetchPages, NoPages
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.tiers import MovePages, PageMove, PagesMoved, Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.fetch import MOST_LENT
from jdisagg.policy.cache.page_pool import PagePool, SharedPages
from jdisagg.policy.cache.prefix_cache import packed, unpacked
from jdisagg.policy.worker.worker import Worker
from tests.policy.cache.test_fetch import Desk
from tests.policy.cache.test_tiers import ask, cached, several
from tests.policy.tier_yard import TierYard
from tests.sim.cases import check_ended, check_outputs, definition, run_all, sent, worker
from tests.sim.fault_injector import Faults
from tests.sim.world import World

LENT = {"prefix_caching": True, "num_pages": 40, "peer_fetch": True}
IN_TURN = RouterConfig(routing=Routing.ROUND_ROBIN)


def both(**sizes: Any) -> list[WorkerConfig]:
    return several(Role.COLOCATED, **{**LENT, **sizes})


def again(name: str, before: Request, arrival_s: float, more: int = 12) -> Request:
    """The next turn of a conversation."""
    text = (*before.prompt, *definition(before), *((3 * at + 1) % 97 for at in range(more)))
    return Request(RequestId(name), text, SamplingParams(max_tokens=4), arrival_s=arrival_s)


def served(workers: list[WorkerConfig], requests: list[Request], **more: Any) -> World:
    world = World(workers, more.pop("router", IN_TURN), **more)
    run_all(world, requests)
    check_outputs(world, requests)
    check_ended(world, requests)
    return world


def lent(world: World) -> int:
    return world.yard.moved[Tier.PEER, Tier.HBM]


@pytest.mark.parametrize("role", [Role.COLOCATED, Role.PREFILL])
def test_a_worker_that_lacks_a_prompt_fetches_it_from_the_one_that_has_it(role):
    """Requests of one text go to each worker in turn."""
    requests = [ask(f"r{turn}", 0, 1.0 * turn) for turn in range(2)]
    world = served(several(role, **LENT), requests)
    assert lent(world) == 9 and cached(world, "r1") == 36
    without = served(several(role, **{**LENT, "peer_fetch": False}), requests)
    assert cached(without, "r1") == 0 and not sent(without, FetchPages)


def test_what_the_decode_worker_wrote_comes_to_the_prefill_worker():
    """The next turn begins with the last answer, which no prefill worker has computed."""
    first = ask("first", 0, 0.0, length=20, tokens=8)
    workers = [worker("prefill-0", Role.PREFILL, **LENT), worker("decode-0", Role.DECODE, **LENT)]
    world = served(workers, [first, again("next", first, 1.0)])
    assert cached(world, "next") == 24 and {to for to, _ in asked(world)} == {"decode-0"}


def asked(world: World) -> list[tuple[WorkerId, FetchPages]]:
    sends = [effect for _, _, effect in world.effects if isinstance(effect, Send)]
    return [(each.to, each.message) for each in sends if isinstance(each.message, FetchPages)]


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.DISK])
def test_a_page_that_lies_below_hbm_is_lent_from_there(tier):
    """One worker is asked for several prompts, until the first has left its HBM; then another is asked for that one."""
    sizes = {**LENT, "num_pages": 16, **({"dram_pages": 200} if tier is Tier.DRAM else {"disk_pages": 200})}
    decode = worker("decode-0", Role.DECODE, **{**LENT, "peer_fetch": False})
    world = World([*several(Role.PREFILL, **sizes)[:2], decode], IN_TURN)
    first, second = (world.router.peers[WorkerId(f"prefill-{number}")] for number in range(2))
    second.leaving = True
    requests = [ask(f"r{number}", number // 2, 1.0 * number) for number in range(8)]
    run_all(world, requests)
    first.leaving, second.leaving = True, False
    last = ask("last", 0, world.now_s + 1)
    world.submit(last, last.arrival_s)
    world.run()
    assert world.output(last.request_id) == definition(last) and cached(world, "last") == 36
    assert {move.source for move in loans(world)} == {tier}


def loans(world: World) -> list[PageMove]:
    moves = [effect.move for _, _, effect in world.effects if isinstance(effect, MovePages)]
    return [move for move in moves if move.destination is Tier.PEER]


def repeated(count: int = 9, prompts: int = 3) -> list[Request]:
    """Each prompt again and again, an odd number of them, so that each is asked of both workers in turn."""
    order = [(turn, prompt) for turn in range(count // prompts) for prompt in range(prompts)]
    return [ask(f"r{turn}-{prompt}", prompt, 0.4 * at) for at, (turn, prompt) in enumerate(order)]


def test_what_is_asked_for_everywhere_is_copied_to_everywhere_and_what_is_not_stays_where_it_is():
    requests = [ask(f"hot{turn}", 0, 1.0 * turn) for turn in range(4)] + [ask("cold", 1, 0.5), ask("more", 2, 1.5)]
    world = served(several(Role.COLOCATED, **LENT), requests)
    held = {prompt: [at(each, prompt) for each in world.workers.values()] for prompt in (0, 1)}
    assert held[0] == [9, 9] or held[0] == [10, 10]
    assert sorted(held[1])[0] == 0 and lent(world) == 9, "the hot one crossed once, the cold one never"


def at(actor: Worker, beginning: int) -> int:
    """Leading pages of that prompt in its HBM."""
    names = actor.shared.names(ask("any", beginning, 0.0))
    return actor.shared.cache.match(names)


def test_what_is_cheaper_to_compute_stays_where_it_is():
    yard = TierYard()
    yard.move_s[Tier.PEER] = (5.0, 1.0)
    world = served(both(), repeated(12), yard=yard)
    assert len(sent(world, FetchPages)) <= 4, "each has asked once or twice, and found it dear"


@pytest.mark.parametrize("fault", ["dead", "lying", "hung"])
def test_a_lender_that_fails_costs_time_and_no_token(fault):
    yard = TierYard()
    {"dead": yard.dead, "lying": yard.lying, "hung": yard.hung}[fault].add(Tier.PEER)
    world = World(both(), IN_TURN, yard=yard)
    run_all(world, repeated())
    assert not lent(world) or fault == "lying"


def moments(workers: list[WorkerConfig], requests: list[Request]) -> Iterator[World]:
    """Worlds that stand right behind each event of a fetch between two workers."""
    whole = served(workers, requests)
    steps = of_fetches(whole)
    assert steps > 4
    for place in range(1, steps + 1):
        world = World(workers, IN_TURN)
        for each in requests:
            world.submit(each, each.arrival_s)
        while world.waiting and of_fetches(world) < place:
            world.step()
        yield world


def of_fetches(world: World) -> int:
    """Effects that belong to fetches between workers."""
    number = 0
    for _, _, effect in world.effects:
        move, message = getattr(effect, "move", None), getattr(effect, "message", None)
        number += isinstance(message, FetchPages | NoPages) or (move is not None and bool(move.peer))
    return number


@pytest.mark.parametrize("role", [Role.COLOCATED, Role.PREFILL])
@pytest.mark.parametrize("who", ["lender", "asker"])
@pytest.mark.parametrize("told", [True, False], ids=["lost", "killed unsaid"])
def test_whoever_dies_at_any_moment_of_a_fetch_takes_no_request_and_no_page_with_it(role, who, told):
    requests = repeated()
    for world in moments(several(role, **LENT), requests):
        asker, lender = last_question(world)
        gone = lender if who == "lender" else asker
        if not told:
            world.kill(gone, world.now_s)
        world.lose(gone, world.now_s + (0.0 if told else 1.0))
        world.run()
        check_outputs(world, requests)
        replaced = any(name.startswith(gone[:-1]) for name in world.workers)
        assert not replaced or all(world.output(each.request_id) == definition(each) for each in requests)
        for each in world.workers.values():
            assert not each.tiers.busy and not each.tiers.lending.under_way


def last_question(world: World) -> tuple[WorkerId, WorkerId]:
    sends = [(actor, effect) for _, actor, effect in world.effects if isinstance(effect, Send)]
    return [(actor, each.to) for actor, each in sends if isinstance(each.message, FetchPages)][-1]


@pytest.mark.parametrize("fault", ["lose_message", "double_message", "lose_transfer", "late"])
@pytest.mark.parametrize("seed", range(4))
def test_words_of_a_fetch_may_be_lost_doubled_or_late(fault, seed):
    faults = Faults(seed=seed, **({"jitter_s": 0.3} if fault == "late" else {fault: 0.05}))
    requests = repeated(12)
    world = World(both(), IN_TURN, faults=faults)
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_outputs(world, requests)
    for each in world.workers.values():
        assert not each.tiers.busy and not each.tiers.lending.under_way


# ------------------------------------------------------------------ the lender's ledger alone

ASKER, OTHER = WorkerId("asker"), WorkerId("other")
QUESTION = Attempt(RequestId("fetch"), 7)
PREFIX = (1, 2, 3, 4, 5, 6, 7, 8)


def desk(**sizes: Any) -> Desk:
    config = worker("both", Role.COLOCATED, **{"prefix_caching": True, "num_pages": 16, "peer_fetch": True, **sizes})
    return Desk(config)


def question(*names: int, first: int = 0) -> FetchPages:
    return FetchPages(QUESTION, packed(names), first)


def ask_for(lender: Desk, message: FetchPages, asker: WorkerId = ASKER) -> list[Any]:
    """What is done or said at once."""
    lender.tiers.hear(message, asker, 0.0, lends=True)
    effects = lender.out.drain()
    lender.shared.check_invariants()
    return effects


def test_pages_of_hbm_may_make_room_as_soon_as_they_are_packed():
    lender = desk()
    lender.compute(*PREFIX)
    (effect,) = ask_for(lender, question(*PREFIX, first=3))
    assert unpacked(effect.move.names) == PREFIX[3:] and (effect.move.peer, effect.move.asked) == (ASKER, QUESTION)
    assert lender.shared.available == 16
    lender.tiers.moved(PagesMoved(effect.move, (True,) * 5, 0.1), 0.0)
    assert not lender.out.drain() and not lender.tiers.lending.under_way


def test_pages_below_hbm_are_locked_while_they_are_read_and_no_longer():
    lender = desk(dram_pages=16)
    lender.compute(*PREFIX)
    lender.compute(*range(100, 116))
    lender.answer_downs()
    (effect,) = ask_for(lender, question(*PREFIX, first=3))
    dram = lender.tiers.pools[Tier.DRAM]
    assert effect.move.source is Tier.DRAM and dram.by_use()["live"] == 5
    lender.tiers.moved(PagesMoved(effect.move, (True,) * 5, 0.1), 0.0)
    assert dram.by_use()["live"] == 0 and dram.match(PREFIX) == 8


def test_what_was_lent_is_the_last_to_make_room():
    lender = desk()
    lender.compute(*PREFIX)
    lender.compute(*range(100, 108))
    ask_for(lender, question(*PREFIX))
    lender.compute(*range(200, 208))
    assert lender.held(*PREFIX) == 8 and not lender.held(100)


def test_who_asks_for_more_than_there_is_gets_what_is_there():
    lender = desk()
    lender.compute(1, 2, 3)
    (effect,) = ask_for(lender, question(*PREFIX, first=1))
    assert unpacked(effect.move.names) == (2, 3)


@pytest.mark.parametrize("names", [PREFIX, (1, 2, 3, 9)])
def test_who_asks_for_what_is_not_there_is_told_so(names):
    lender = desk()
    lender.compute(1, 2, 3)
    (effect,) = ask_for(lender, question(*names, first=3))
    assert effect == Send(ASKER, NoPages(QUESTION)) and lender.shared.available == 16


def test_a_question_that_comes_twice_is_answered_once_and_two_askers_each():
    lender = desk()
    lender.compute(*PREFIX)
    assert ask_for(lender, question(*PREFIX)) and not ask_for(lender, question(*PREFIX))
    assert ask_for(lender, question(*PREFIX), OTHER)


def test_pages_that_cannot_be_read_are_said_not_to_come():
    lender = desk()
    lender.compute(*PREFIX)
    (effect,) = ask_for(lender, question(*PREFIX))
    lender.tiers.moved(PagesMoved(effect.move, (False,) * 8, failed="out of memory"), 0.0)
    assert lender.out.drain() == [Send(ASKER, NoPages(QUESTION, "out of memory"))] and lender.shared.available == 16


def test_no_more_is_read_at_once_than_a_bounded_number_of_pages():
    lender = desk(num_pages=MOST_LENT + 10)
    lender.compute(*range(1, MOST_LENT + 1))
    ask_for(lender, question(*range(1, MOST_LENT + 1)))
    (effect,) = ask_for(lender, question(1, 2), OTHER)
    assert effect == Send(OTHER, NoPages(QUESTION))


def test_a_worker_that_becomes_another_hears_the_end_of_what_it_lent_before():
    lender = desk()
    lender.compute(*PREFIX)
    (effect,) = ask_for(lender, question(*PREFIX))
    lender.tiers.follow(lender.config, SharedPages(lender.config, PagePool(16)))
    lender.tiers.moved(PagesMoved(effect.move, (True,) * 8, 0.1), 0.0)
    assert not lender.tiers.lending.under_way
