"""The router's directory of what workers keep: it follows them by number, finds out what it has missed, and asks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import RouterLost, WorkerJoined, WorkerLost
from jdisagg.core.messages import PAGES_A_WORD, CacheChanged, CacheHeld, CacheWanted, Holder, Priced
from jdisagg.core.request import Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.cache.directory import AGAIN, PrefixDirectory, PrefixIndex, TierDirectory
from jdisagg.policy.cache.prefix_cache import CacheChangeLog, PrefixCache, check_of, packed, page_hashes
from jdisagg.policy.router.decisions import Decision
from jdisagg.policy.router.routing import FetchEstimate, RoutingRequest, WorkerSnapshot, choose_pair
from tests.policy.bench import Bench
from tests.policy.cache.test_lending import LENT, both
from tests.policy.cache.test_tiers import ask
from tests.policy.router.test_router import Talk
from tests.sim.cases import check_ended, check_outputs, colocated, definition, pair, request, run_all, sent, worker
from tests.sim.fault_injector import Faults
from tests.sim.world import World

CONFIG = worker("decode-0", Role.DECODE, prefix_caching=True, num_pages=12)
AWARE = RouterConfig(routing=Routing.CACHE_AWARE)


class Followed:
    """A worker's cache and the router's directory of it, and a link between them that may do anything with words."""

    def __init__(self, config: WorkerConfig = CONFIG) -> None:
        self.config, self.directory = config, PrefixDirectory()
        self.directory.follow(config)
        self.words: list[Any] = []  # under way to the router
        self.asked = 0  # questions under way to the worker
        self.begin()

    def begin(self) -> None:
        """The worker is new and holds nothing; nobody is told."""
        self.cache, self.pages = PrefixCache(), iter(range(1, 10**9))
        self.changes = CacheChangeLog(self.cache)

    def keep(self, *path: int) -> None:
        names = page_hashes(path, 1)
        self.cache.insert(names, [next(self.pages) for _ in names])
        self.cache.evict(len(self.cache) - self.config.num_pages)
        self.tell()

    def drop(self, count: int) -> None:
        self.cache.evict(count)
        self.tell()

    def tell(self) -> None:
        word = self.changes.take_delta()
        if word is not None:
            self.words.append(word)

    def hear(self, at: int = 0, *, again: bool = False) -> None:
        word = self.words[at] if again else self.words.pop(at)
        self.directory.hear(self.config, word)

    def answer(self) -> None:
        """Questions reach the worker, which says all that it keeps."""
        self.asked += len(self.directory.to_ask())
        for _ in range(self.asked):
            self.words += self.changes.take_snapshot()
        self.asked = 0

    def settle(self) -> None:
        """All words arrive, in order, and so does every question."""
        for _ in range(4):
            while self.words:
                self.hear()
            self.answer()

    @property
    def known(self) -> Any:
        return self.directory._known[self.config.worker]

    @property
    def equal(self) -> bool:
        return self.known.names == set(self.cache.names()) and self.known.number is not None


def test_a_directory_follows_a_cache_change_by_change():
    link = Followed()
    link.settle()
    link.keep(1, 2, 3)
    link.keep(1, 4)
    link.drop(1)
    assert [word.number for word in link.words] == [1, 2, 3]
    assert len(link.words[1].added) == 16, "one name is new: only that travels"
    link.settle()
    assert link.equal and not link.directory.to_ask()
    assert link.directory.cached_tokens(CONFIG, page_hashes((1, 4, 5), 1)) == 2 * CONFIG.page_size


def test_nothing_is_told_before_somebody_asks_and_nothing_of_what_did_not_change():
    link = Followed()
    link.directory.to_ask()
    link.keep(1, 2)
    assert not link.words
    link.words += link.changes.take_snapshot()
    link.cache.insert(page_hashes((7,), 1), [99])
    link.cache.touch(page_hashes((1, 2), 1))
    link.cache.evict(1)
    link.tell()
    assert [type(word) for word in link.words] == [CacheHeld], "it came and went"


@pytest.mark.parametrize("fault", ["lost", "reordered", "doubled", "restarted"])
def test_a_fault_on_the_way_is_found_out_and_the_whole_is_asked_for(fault: str):
    link = Followed()
    link.settle()
    link.keep(1, 2)
    link.settle()
    if fault == "restarted":
        link.begin()
        link.keep(8)  # nobody has asked the new one: it says nothing
        assert not link.words
        link.directory.found(CONFIG, page_hashes((1, 2), 1), 0)
    else:
        link.keep(3)
        link.keep(4)
        {
            "lost": lambda: link.words.pop(0),
            "reordered": link.words.reverse,
            "doubled": lambda: link.hear(0, again=True),
        }[fault]()
    link.settle()
    assert link.equal
    link.keep(5)
    link.settle()
    assert link.equal


def test_a_late_word_of_an_earlier_life_is_found_out_by_the_next_one():
    link = Followed()
    link.settle()
    link.keep(1)
    late = link.words[0]
    link.settle()
    link.begin()
    link.directory.follow(CONFIG)
    link.settle()
    link.directory.hear(CONFIG, late)
    assert not link.equal
    for name in (2, 3):
        link.keep(name)
    link.settle()
    assert link.equal


def test_a_question_that_was_lost_is_asked_again_after_a_while():
    link = Followed()
    assert link.directory.to_ask() == ["decode-0"]
    for _ in range(AGAIN - 1):
        link.directory.found(CONFIG, (), 0)
    assert link.directory.to_ask() == []
    link.directory.found(CONFIG, (), 0)
    assert link.directory.to_ask() == ["decode-0"]


def test_who_finds_less_of_a_prompt_than_it_was_thought_to_keep_is_asked():
    link = Followed()
    link.settle()
    link.keep(1, 2, 3)
    link.settle()
    names, size = page_hashes((1, 2, 3), 1), CONFIG.page_size
    link.directory.found(CONFIG, names, 3 * size)
    link.directory.found(CONFIG, names[:2], 2 * size)  # it could read no more
    link.directory.found(CONFIG, page_hashes((1, 2, 9), 1), 2 * size)
    assert not link.directory.to_ask()
    link.directory.found(CONFIG, names, size)
    assert link.directory.to_ask() == ["decode-0"]


def test_a_large_cache_is_told_in_parts_of_a_bounded_size_in_any_order():
    config = replace(CONFIG, num_pages=3 * PAGES_A_WORD)
    link = Followed(config)
    link.cache.insert(tuple(range(2 * PAGES_A_WORD + 5)), tuple(range(2 * PAGES_A_WORD + 5)))
    link.answer()
    assert [(word.part, word.num_parts, len(word.names) // 16) for word in link.words] == [
        (0, 3, PAGES_A_WORD), (1, 3, PAGES_A_WORD), (2, 3, 5)
    ]  # fmt: skip
    link.words.reverse()
    link.hear()
    assert not link.known.names
    link.settle()
    assert link.equal


def test_a_worker_that_keeps_more_than_it_has_makes_no_sense():
    directory = PrefixDirectory()
    directory.follow(CONFIG)
    with pytest.raises(SenselessWord, match="decode-0 keeps 13 pages for their content, it has 12"):
        directory.hear(CONFIG, CacheHeld(0, packed(range(13))))
    assert directory.cached_tokens(CONFIG, (1,)) == 0


def test_nobody_is_blamed_for_what_a_word_of_an_earlier_life_has_added():
    directory = PrefixDirectory()
    directory.follow(CONFIG)
    directory.hear(CONFIG, CacheHeld(0, packed(range(12))))
    directory.hear(CONFIG, CacheChanged(1, 77, packed(range(20, 25))))  # it does not lead to what it says
    directory.hear(CONFIG, CacheChanged(2, 78, packed((99,))))
    directory.hear(CONFIG, CacheHeld(2, packed((1, 2))))
    assert directory.cached_tokens(CONFIG, (1, 2, 20)) == 2 * CONFIG.page_size
    assert directory.to_ask() == ["decode-0"] * 2


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_after_whatever_happened_on_the_way_the_two_become_equal(seed: int):
    lots, link, joins = random.Random(seed), Followed(), 0
    for _ in range(lots.randrange(60)):
        match lots.randrange(9):
            case 0 | 1 | 2:
                link.keep(*[lots.randrange(3) for _ in range(lots.randrange(1, 6))])
            case 3:
                link.drop(lots.randrange(4))
            case 4 if link.words:
                link.hear(lots.randrange(len(link.words)), again=lots.random() < 0.3)
            case 5 if link.words:
                link.words.pop(lots.randrange(len(link.words)))
            case 6:
                link.asked += len(link.directory.to_ask()) - (lots.random() < 0.2)
                link.asked = max(0, link.asked)
                link.answer()
            case 7 if lots.random() < 0.2:
                link.begin()
                joins = lots.randrange(3)  # at once, later, or not until all is well
                if joins == 0:
                    link.directory.follow(CONFIG)
            case 8 if joins == 1:
                joins = 0
                link.directory.follow(CONFIG)
            case _:
                while link.words and lots.random() < 0.8:
                    link.hear()
    if joins:
        link.directory.follow(CONFIG)
    for number in range(AGAIN + 3):  # from now on all is well, and prompts are looked up
        link.keep(100 + number)
        names = page_hashes((100 + number,), 1)
        link.settle()
        link.directory.found(CONFIG, names, link.cache.match(names) * CONFIG.page_size)
        stale = [name for name in link.known.names if not link.cache.match((name,))]
        link.directory.found(CONFIG, tuple(stale[:1]), 0)
        link.settle()
    assert link.equal


# ------------------------------------------------------------ the actors


def kept(world: World) -> dict[WorkerId, bool]:
    """Of each worker, whether the router knows what it keeps."""
    known = world.router.routes.directory._known
    return {name: known[name].names == set(each.shared.cache.names()) for name, each in world.workers.items()}


def turns(count: int, **more: Any) -> list[Request]:
    """Conversations of a few turns, and others between them."""
    prompts = [tuple(range(10 * (i % 3), 10 * (i % 3) + 9 + i)) for i in range(count)]
    return [
        Request(RequestId(f"r{i}"), prompt, SamplingParams(max_tokens=6), arrival_s=0.02 * i, **more)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("workers", [pair, colocated])
@pytest.mark.parametrize("num_pages", [64, 16])
def test_the_router_knows_what_every_worker_keeps(workers: Any, num_pages: int):
    world = World(workers(prefix_caching=True, num_pages=num_pages), AWARE)
    run_all(world, turns(20))
    assert all(kept(world).values()) and len(sent(world, CacheChanged)) > 5
    assert len(sent(world, CacheWanted)) == len(world.workers), "nothing was lost, so nobody was asked twice"


@pytest.mark.parametrize("routing", [Routing.LEAST_LOADED, Routing.ROUND_ROBIN])
def test_where_it_is_routed_by_something_else_nothing_is_told(routing: Routing):
    world = World(pair(prefix_caching=True), RouterConfig(routing=routing))
    run_all(world, turns(5))
    assert not sent(world, CacheWanted) and not sent(world, CacheChanged)


def test_where_nothing_is_kept_nobody_is_asked():
    world = World(pair(), AWARE)
    run_all(world, turns(5))
    assert not sent(world, CacheWanted) and not sent(world, CacheHeld)


@pytest.mark.parametrize("seed", range(3))
def test_words_that_are_lost_doubled_or_late_cost_no_token(seed: int):
    faults = Faults(seed=seed, lose_message=0.04, double_message=0.1)
    world = World(pair(prefix_caching=True, num_pages=24), AWARE, faults=faults)
    requests = turns(30)
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)


class Liar(PrefixDirectory):
    """Knows nothing and says something."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def cached_tokens(self, config: WorkerConfig, names: Any) -> int:
        return self.random.randrange(len(names) + 1) * config.page_size


@pytest.mark.parametrize("seed", range(4))
def test_a_directory_that_is_all_wrong_changes_no_token(seed: int):
    four = [worker(f"{role}-{i}", role, prefix_caching=True) for role in (Role.PREFILL, Role.DECODE) for i in range(2)]
    world = World(four, AWARE)
    world.router.routes.directory = Liar(seed)
    requests = turns(20)
    run_all(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]


def test_a_worker_that_joins_again_is_asked_and_begins_with_nothing():
    talk = Talk(pair(prefix_caching=True), routing=Routing.CACHE_AWARE)
    decode = pair(prefix_caching=True)[1]
    directory = talk.router.routes.directory
    talk.submit(request("a"))
    assert [to for to, _ in talk.sent(CacheWanted)] == ["prefill-0", "decode-0"]
    talk.says(decode.worker, CacheHeld(4, packed((1, 2))))
    assert directory.cached_tokens(decode, (1, 2, 3)) == 2 * decode.page_size
    talk.take(WorkerLost(decode.worker))
    assert directory.cached_tokens(decode, (1, 2, 3)) == 0
    talk.take(WorkerJoined(decode))
    assert [to for to, _ in talk.sent(CacheWanted)][2:] == ["decode-0"]
    assert directory.cached_tokens(decode, (1, 2, 3)) == 0
    talk.says(WorkerId("stranger"), CacheHeld(4, packed((1, 2))))


def test_a_worker_tells_the_next_router_only_when_that_one_asks():
    bench = Bench(CONFIG)
    bench.says(CacheWanted())
    bench.take(RouterLost())
    for name in "ab":
        bench.reserve(request(name, 8, max_tokens=1))
    assert [type(each) for each in bench.heard if isinstance(each, CacheHeld | CacheChanged)] == [CacheHeld]


def test_what_a_prompt_is_sent_for_is_expected_until_it_is_told_or_others_came():
    directory = PrefixDirectory()
    directory.follow(CONFIG)
    directory.sent(CONFIG, (1, 2, 3))
    assert directory.cached_tokens(CONFIG, (1, 2, 3, 4)) == 3 * CONFIG.page_size
    directory.hear(CONFIG, CacheHeld(0, b""))
    directory.hear(CONFIG, CacheChanged(1, 1 ^ 2, packed((1, 2))))
    directory.hear(CONFIG, CacheChanged(2, 1, b"", packed((2,))))
    assert directory.cached_tokens(CONFIG, (1, 2, 3)) == CONFIG.page_size, "2 is gone, whatever was expected"


# What the router knows of where pages lie, tier by tier; who may lend to whom, and what fetching would save.

NAMES = (1, 2, 3, 4, 5, 6)


def config(name: str, **sizes: Any) -> WorkerConfig:
    return worker(name, Role.COLOCATED, **{**LENT, "dram_pages": 16, **sizes})


ME, OTHER, THIRD = config("me"), config("other"), config("third")


def known(**held: dict[Tier, tuple[int, ...]]) -> TierDirectory:
    """Of workers by their names; a worker of other sizes follows by `follow`."""
    holdings = TierDirectory()
    for each in (ME, OTHER, THIRD):
        holdings.follow(each)
        for tier, names in held.get(each.worker, {}).items():
            holdings.hear(each, CacheHeld(0, packed(names), tier=tier))
    return holdings


def test_who_holds_more_of_a_prompt_in_any_tier_may_lend_it():
    holdings = known(
        me={Tier.HBM: (1,)}, other={Tier.HBM: (1, 2), Tier.DRAM: (3, 4)}, third={Tier.HBM: (1, 2, 3, 4, 5, 6)}
    )
    assert holdings.holders(ME, NAMES) == (Holder(THIRD.worker, 0, 6), Holder(OTHER.worker, 0, 4))
    assert holdings.holders(THIRD, NAMES) == ()


def test_who_has_lost_the_beginning_lends_what_is_behind_it():
    holdings = known(me={Tier.HBM: (1, 2)}, other={Tier.DRAM: (2, 3, 4)})
    assert holdings.holders(ME, NAMES) == (Holder(OTHER.worker, 1, 4),)


def test_each_tier_is_followed_by_its_own_numbers():
    holdings = known(other={Tier.HBM: (1, 2), Tier.DRAM: ()})
    holdings.hear(OTHER, CacheChanged(1, 3, packed((3,)), tier=Tier.DRAM))
    holdings.hear(OTHER, CacheChanged(1, 1, b"", packed((2,))))
    assert holdings.holders(ME, NAMES) == (Holder(OTHER.worker, 0, 1),)
    assert holdings.by_tier[Tier.DRAM].told(OTHER.worker) == {3}


@pytest.mark.parametrize("unlike", [{"page_size": 8}, {"tier_wire": "int8"}, {"peer_fetch": False}])
def test_who_keeps_other_records_lends_nothing(unlike):
    holdings, strange = known(), replace(OTHER, worker=WorkerId("strange"), **unlike)
    holdings.follow(strange)
    holdings.hear(strange, CacheHeld(0, packed(NAMES)))
    assert holdings.holders(ME, NAMES) == ()


def test_who_is_gone_lends_nothing():
    holdings = known(other={Tier.HBM: NAMES})
    holdings.forget(OTHER.worker)
    assert holdings.holders(ME, NAMES) == ()


def priced(**lines: float) -> Priced:
    """Seconds a page; a second more at all from another worker."""
    return Priced(tuple((source, float(source == "other"), each) for source, each in lines.items()))


def test_the_source_that_saves_most_is_weighed():
    holdings = known(me={Tier.HBM: (1,), Tier.DRAM: (2, 3)}, other={Tier.HBM: NAMES})
    holdings.hear_prices(ME.worker, priced(computed=1.0, dram=0.1, other=0.2))
    assert holdings.reach(ME, NAMES, 1) == ("other", 24, pytest.approx(0.4))
    holdings.hear_prices(ME.worker, priced(computed=1.0, dram=0.1, other=0.9))
    assert holdings.reach(ME, NAMES, 1) == ("dram", 12, pytest.approx(0.1))
    assert holdings.reach(ME, NAMES, 6) is None


@pytest.mark.parametrize("lines", [{}, {"dram": 0.1}, {"computed": 0.05, "dram": 0.1}])
def test_what_is_not_known_to_save_anything_is_not_weighed(lines):
    holdings = known(me={Tier.DRAM: NAMES})
    holdings.hear_prices(ME.worker, priced(**lines))
    assert holdings.reach(ME, NAMES, 0) is None


def test_a_decision_weighs_what_could_be_fetched_and_names_its_source():
    near = WorkerSnapshot(WorkerId("near"), Role.COLOCATED, 10.0, 0, True, reach=FetchEstimate("dram", 80, 0.1))
    far = WorkerSnapshot(WorkerId("far"), Role.COLOCATED, 5.0, 0, True)
    choice = choose_pair([near, far], RoutingRequest(prompt_tokens=100), Routing.CACHE_AWARE)
    assert choice.taken is not None and choice.taken.prefill == "near"
    assert ("fetch from dram", pytest.approx(8.0)) in choice.colocated[0].parts
    assert "fetch from dram 8" in choice.reason


def test_what_is_cheaper_to_compute_is_not_said_to_be_fetched():
    look = WorkerSnapshot(
        WorkerId("near"), Role.COLOCATED, 0.0, 0, True, cached_tokens=80, reach=FetchEstimate("dram", 80, 0.5)
    )
    choice = choose_pair([look], RoutingRequest(prompt_tokens=100), Routing.CACHE_AWARE)
    assert choice.colocated[0].parts == (("queue", 0.0), ("prefill", 20.0), ("decode", 0.0))


def test_workers_tell_what_pages_cost_them_and_the_router_reckons_with_it():
    decisions = list[Decision]()
    world = World(both(num_pages=16, dram_pages=200), RouterConfig(routing=Routing.CACHE_AWARE))
    world.router.routes.note = decisions.append
    requests = [ask(f"r{number}", number % 3, 1.5 * number) for number in range(12)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_outputs(world, requests)
    told = world.router.routes.kept.prices
    assert {"computed", "dram"} <= {source for lines in told.values() for source in lines}
    assert any("fetch from" in each.choice.reason for each in decisions if each.choice is not None)


# Who keeps each page: what workers were heard to keep, or are expected to, and nothing else.

A, B, C = map(WorkerId, "abc")
CONFIGS = [worker(name, Role.PREFILL, prefix_caching=True, num_pages=6) for name in (A, B)]
MANY_NAMES = st.lists(st.integers(1, 9), max_size=8, unique=True)
WORDS = st.tuples(
    st.sampled_from(["held", "changed", "sent", "forget", "follow"]), st.integers(0, 1), MANY_NAMES, MANY_NAMES
)


@given(st.lists(MANY_NAMES.map(lambda names: names[:6]), min_size=2, max_size=2), st.lists(WORDS, max_size=30))
def test_the_index_is_what_the_directory_knows_whatever_it_was_told(begun, words):
    """Words that are too large and of those that are gone among them."""
    directory = PrefixDirectory()
    for config, names in zip(CONFIGS, begun, strict=True):
        directory.follow(config)
        directory.hear(config, CacheHeld(1, packed(tuple(names))))
    for kind, which, some, others in words:
        config = CONFIGS[which]
        known = directory._known.get(config.worker)
        number, check = (known.number or 0, known.check) if known else (0, 0)
        try:
            match kind:
                case "held":
                    directory.hear(config, CacheHeld(number + 1, packed(tuple(some))))
                case "changed":
                    after = check_of(some, check_of(others, check))
                    directory.hear(config, CacheChanged(number + 1, after, packed(tuple(some)), packed(tuple(others))))
                case "sent":
                    directory.sent(config, tuple(some))
                case "forget":
                    directory.forget(config.worker)
                case _:
                    directory.follow(config)
        except SenselessWord:
            pass
        for name in range(1, 10):
            kept = {each for each, known in directory._known.items() if name in known.names or name in known.expected}
            assert set(directory.index.keepers(name)) == kept
            assert len(directory.index.keepers(name)) == len(kept)


def test_the_longest_beginnings_come_first_and_nobody_twice():
    index = PrefixIndex()
    index.add(A, (1,))
    index.add(B, (1, 2, 3, 4))
    index.add(C, (1, 2))
    assert index.nearest((1, 2, 3, 4, 5), 8, 0) == [B, C, A]
    assert index.nearest((1, 2, 3, 4, 5), 1, 0) == [B]
    assert index.nearest((9, 1), 8, 0) == [] == index.nearest((), 8, 0)


def test_of_many_that_keep_the_same_others_are_found_each_turn():
    index, workers = PrefixIndex(), [WorkerId(f"w{number}") for number in range(10)]
    for each in workers:
        index.add(each, (1,))
    turns = [index.nearest((1, 2), 4, turn) for turn in range(0, 20, 4)]
    assert all(len(set(turn)) == 4 for turn in turns)
    assert {each for turn in turns for each in turn} == set(workers)


@given(st.integers(0, 70))
def test_the_longest_beginning_is_found_by_halving(depth):
    index, names = PrefixIndex(), tuple(range(1, 65))
    index.add(A, names[:depth])
    assert index.nearest(names, 2, 0) == ([A] if depth else [])
    assert index._longest(names) == min(depth, 64)
