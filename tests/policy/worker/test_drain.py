"""Workers change their roles under load: every output is the definition, every page comes back, and nobody waits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jdisagg.commands.replay import replay
from jdisagg.core.errors import IllegalTransition
from jdisagg.core.events import ROUTER, ChangeRole, Reshape, Reshaped, RouterLost, WorkerLost, WorkerStands
from jdisagg.core.journal import Header, Journal, read_lines
from jdisagg.core.messages import Abort, Joined, Leave, Left, Refused, Reserve, View
from jdisagg.core.request import FinishReason, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.tiers import MovePages, Tier
from jdisagg.core.worker_config import Role, Stages, WorkerConfig
from jdisagg.policy.worker.drain import DRAIN_TABLE, DrainSignal, WorkerStatus, next_status, why_not
from tests.policy.bench import Bench
from tests.policy.router.test_router import Talk
from tests.sim.cases import check_outputs, definition, pair, request, run_all, sent, worker
from tests.sim.fault_injector import Faults
from tests.sim.world import World

P0, P1, D0, D1, C0 = map(WorkerId, ("prefill-0", "prefill-1", "decode-0", "decode-1", "colocated-0"))
FOUR = [*pair(), worker(P1, Role.PREFILL), worker(D1, Role.DECODE)]
TARGETS = {
    "prefill to decode": (P0, Role.DECODE, {}),
    "prefill to colocated": (P0, Role.COLOCATED, {"decode": Stages(2)}),
    "decode to prefill": (D0, Role.PREFILL, {}),
    "decode to two stages": (D0, Role.DECODE, {"decode": Stages(2)}),
    "decode to larger pages": (D0, Role.DECODE, {"page_size": 8, "num_pages": 32, "table_buckets": (2, 4, 16)}),
}


def flip(world: World, name: WorkerId, role: Role, at_s: float, drain_s: float = 1e3, **sizes) -> WorkerConfig:
    config = replace(world.workers[name].config, role=role, **sizes)
    world._at(at_s, ROUTER, ChangeRole(name, 7, config, drain_s))
    return config


def load(count: int = 40):
    return [request(f"r{i}", 1 + 5 * i % 60, max_tokens=4 + 7 * i % 40, arrival_s=0.01 * i) for i in range(count)]


def check_all(world: World, requests) -> None:
    check_outputs(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]
    for each in world.workers.values():
        assert each.idle and each.shared.available == each.config.num_pages


@pytest.mark.parametrize(("name", "role", "sizes"), TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("drain_s", [1e3, 0.05, 0.0])
def test_a_flip_under_load_loses_no_request_and_changes_no_token(name, role, sizes, drain_s):
    requests, world = load(), World(FOUR, RouterConfig(max_retries=0))
    for each in requests:
        world.submit(each, each.arrival_s)
    config = flip(world, name, role, 0.15, drain_s, **sizes)
    world.run()
    check_all(world, requests)
    assert world.workers[name].config == config == world.router.peers[name].config
    later = [replace(each, request_id=RequestId(f"later-{each.request_id}")) for each in load(12)]
    run_all(world, later)
    check_all(world, later)
    assert world.router.peers[name].served > 0, "who has joined is given work"


KEPT = {"prefix_caching": True, "num_pages": 40, "dram_pages": 256, "disk_pages": 64, "shared_pool": True}


def turns(count: int = 16):
    """Conversations that begin alike, six of them, each in its turn, with more KV than a worker's HBM holds."""
    asked = [request(f"talk-{number % 6}", 60, max_tokens=4, arrival_s=0.05 * number) for number in range(count)]
    return [replace(each, request_id=RequestId(f"{each.request_id}-{at}")) for at, each in enumerate(asked)]


def moves_below(world: World) -> int:
    return sum(isinstance(effect, MovePages) for _, _, effect in world.effects)


@pytest.mark.parametrize(("name", "role"), [(P0, Role.DECODE), (D0, Role.PREFILL), (P0, Role.COLOCATED)])
@pytest.mark.parametrize("hung", [(), (Tier.DRAM,), (Tier.POOL,)], ids=["", "DRAM hangs", "pool hangs"])
def test_a_flip_at_any_moment_of_a_move_between_tiers_loses_no_page_and_no_request(name, role, hung):
    four = [replace(each, **KEPT) for each in FOUR]
    for at in range(1, 40, 13):
        requests, world = turns(), World(four, RouterConfig(max_retries=0))
        for each in requests:
            world.submit(each, each.arrival_s)
        while world.waiting and moves_below(world) < at:
            world.step()
        world.yard.hung.update(hung)
        config = flip(world, name, role, world.now_s, 0.02)
        world.run()
        check_all(world, requests)
        assert world.workers[name].config == config
        if not hung:
            for each in world.workers.values():
                tiers = each.tiers.pools.values()
                assert not each.tiers.fetches.late and all(pool.by_use()["in_flight"] == 0 for pool in tiers)


def test_what_a_worker_kept_below_hbm_is_read_back_after_its_role_has_changed():
    four = [replace(each, **{**KEPT, "shared_pool": False}) for each in FOUR]
    world = World(four)
    run_all(world, turns())
    kept = {tier: set(pool.kept) for tier, pool in world.workers[P0].tiers.pools.items()}
    assert kept[Tier.DRAM]
    flip(world, P0, Role.COLOCATED, world.now_s)
    world.run()
    assert {tier: set(pool.kept) for tier, pool in world.workers[P0].tiers.pools.items()} == kept
    before = world.yard.moved[Tier.DRAM, Tier.HBM]
    later = [replace(each, request_id=RequestId(f"later-{each.request_id}")) for each in turns(6)]
    world.lose(P1, world.now_s)
    run_all(world, later)
    assert world.yard.moved[Tier.DRAM, Tier.HBM] > before


def test_tiers_cannot_follow_a_worker_to_pages_of_another_size():
    tiers = World([replace(each, **KEPT) for each in FOUR]).workers[D0].tiers
    with pytest.raises(AssertionError, match="cannot be those of"):
        tiers.follow(replace(tiers.config, page_size=8), tiers.shared)


def test_each_transition_is_told_in_order():
    world = World(FOUR)
    run_all(world, load(4))
    flip(world, P0, Role.DECODE, world.now_s)
    world.run()
    assert [(each.standing, each.role) for each in world.stood] == [
        ("leaving", "prefill"),
        ("drained", "prefill"),
        ("changing", "prefill"),
        ("serving", "decode"),
    ]


def test_with_a_deadline_of_nothing_what_runs_goes_on_elsewhere_and_is_not_counted_as_a_failure():
    each = request("long", 9, max_tokens=60)
    world = World(FOUR, RouterConfig(max_retries=0))
    world.submit(each)
    world.run(0.04)
    (row,) = world.router.rows.values()
    first = row.decode
    assert first is not None and row.output
    flip(world, first, Role.PREFILL, world.now_s, 0.0)
    world.run()
    check_all(world, [each])
    assert world.finished[each.request_id][0].decode_worker != first


def test_a_worker_that_was_drained_waits_until_it_is_told_what_to_become():
    world = World(FOUR)
    world._at(0.0, ROUTER, ChangeRole(D0, 1))
    requests = load(6)
    run_all(world, requests)
    assert world.router.members.standing_of(D0) is WorkerStatus.DRAINED and world.router.peers[D0].served == 0
    flip(world, D0, Role.DECODE, world.now_s)
    world.run()
    assert world.router.members.standing_of(D0) is WorkerStatus.SERVING


@pytest.mark.parametrize("role", [Role.DECODE, Role.COLOCATED])
def test_a_prompt_whose_place_is_still_being_reserved_when_its_prefill_worker_leaves_goes_elsewhere(role):
    """The worker has nothing, and changes at once; the prompt that was to come is no failure of anybody's."""
    each = request("late", 9)
    world = World(FOUR, RouterConfig(max_retries=0))
    world.submit(each)
    while world.waiting and not sent(world, Reserve):
        world.step()
    (row,) = world.router.rows.values()
    assert row.prefill is not None
    flip(world, row.prefill, role, world.now_s)
    world.run()
    check_all(world, [each])


REFUSED = {
    "unknown": ("decode-9", "there is no worker decode-9; there are decode-0, prefill-0"),
    "last of its phase": ("decode-0", "decode-0 is the last worker for decode"),
}


@pytest.mark.parametrize(("name", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_a_change_that_cannot_be_is_refused_with_why(name, why):
    world = World(pair())
    world._at(0.0, ROUTER, ChangeRole(WorkerId(name), 3))
    world.run()
    (told,) = world.stood
    assert told.number == 3 and told.refused == why
    requests = load(4)
    run_all(world, requests)
    check_all(world, requests)


def test_a_second_change_of_the_same_worker_is_refused_while_the_first_is_under_way():
    world = World(FOUR)
    for _ in range(2):
        flip(world, P0, Role.DECODE, 0.0)
    world.run()
    assert [each.refused for each in world.stood if each.refused] == ["prefill-0 is leaving already"]


def test_two_workers_may_not_leave_a_phase_empty_between_them():
    world = World(FOUR)
    flip(world, P0, Role.DECODE, 0.0)
    flip(world, P1, Role.DECODE, 0.0)
    world.run()
    assert [each.refused for each in world.stood if each.refused] == ["prefill-1 is the last worker for prefill"]


def test_beside_a_worker_of_both_roles_no_other_is_the_last():
    standings = {name: (role, WorkerStatus.SERVING) for name, role in ((P0, Role.PREFILL), (C0, Role.COLOCATED))}
    assert why_not(P0, standings) == "" and why_not(C0, standings) == "colocated-0 is the last worker for decode"


def test_a_request_that_no_worker_can_hold_after_a_change_ends_at_once():
    talk = Talk(FOUR[:3], queue_timeout_s=0.0)
    talk.says(D0, View(0, 0, 0, 0))
    talk.submit(request("long", 60, max_tokens=60))
    talk.take(ChangeRole(P0, 1, small := replace(FOUR[0], role=Role.DECODE, num_pages=8)))
    talk.says(P0, Joined(1, small))
    assert not talk.finishes()
    talk.take(ChangeRole(D0, 2, smaller := replace(FOUR[1], num_pages=8)))
    talk.says(D0, Joined(2, smaller))
    (finish,) = talk.finishes()
    assert finish.reason is FinishReason.ERROR and "fit no pair" in finish.detail


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=pytest.mark.hostile)], ids=str)
def test_a_lossy_link_delays_a_change_and_does_not_stop_it(seeds):
    requests = load(20)
    config = RouterConfig(handoff_timeout_s=0.4, lease_s=0.3, max_retries=50, stall_timeout_s=2.0)
    for seed in seeds:
        sizes = {"ack_timeout_s": 1.0, "part_timeout_s": 0.2}
        workers = [replace(each, **sizes) for each in FOUR]
        world = World(workers, config, faults=Faults(seed, lose_message=0.1, double_message=0.1, jitter_s=0.02))
        for each in requests:
            world.submit(each, each.arrival_s)
        flip(world, P0, Role.DECODE, 0.1, 0.3)
        flip(world, D0, Role.COLOCATED, 2.0, 0.3)
        world.run()
        check_outputs(world, requests)
        assert world.workers[P0].config.role is Role.DECODE is world.router.peers[P0].config.role
        assert world.workers[D0].config.role is Role.COLOCATED is world.router.peers[D0].config.role


def test_a_journal_with_changes_of_role_replays_to_the_same_decisions():
    router, requests = RouterConfig(routing=Routing.CACHE_AWARE), load(24)
    workers = [replace(each, prefix_caching=True) for each in FOUR]
    journal = Journal(Header(router, tuple(workers)))
    world = World(workers, router, journal=journal)
    for each in requests:
        world.submit(each, each.arrival_s)
    flip(world, P0, Role.DECODE, 0.1, 0.05)
    flip(world, D0, Role.PREFILL, 1.0, 0.05)
    world.run()
    check_outputs(world, requests)
    assert replay(*read_lines([line + "\n" for line in journal.lines()])) == journal.num_recorded


# ---------------------------------------------------------------------- word by word


def test_a_worker_takes_nothing_while_its_machine_is_changed_and_is_another_afterwards():
    bench, target = Bench(worker("decode-0", Role.DECODE)), worker("decode-0", Role.PREFILL)
    bench.says(Leave(4, target))
    assert bench.said(Left) and bench.made(Reshape) == [Reshape(target)]
    assert not bench.reserve(request("late")) and bench.said(Refused)
    bench.take(Reshaped(target))
    (joined,) = bench.said(Joined)
    assert joined == Joined(4, target) and bench.worker.config is target


def test_a_lost_worker_is_no_longer_changing():
    talk = Talk(FOUR)
    talk.take(ChangeRole(P0, 1, replace(FOUR[0], role=Role.DECODE)))
    talk.take(WorkerLost(P0))
    assert talk.says(P0, Left(1)) == [] and P0 not in talk.router.members.changes


def test_a_word_of_an_earlier_change_is_void():
    talk = Talk(FOUR)
    talk.take(ChangeRole(P0, 1))
    talk.says(P0, Left(99))
    assert talk.router.members.standing_of(P0) is WorkerStatus.LEAVING
    talk.says(P0, Left(1))
    assert talk.router.members.standing_of(P0) is WorkerStatus.DRAINED


def test_a_leaving_worker_whose_router_is_lost_serves_the_next_one():
    bench = Bench(worker("decode-0", Role.DECODE))
    assert bench.reserve(request("a"))
    bench.says(Leave(1))
    bench.take(RouterLost())
    assert bench.reserve(request("b")) and not bench.said(Left)


@pytest.mark.parametrize("standing", WorkerStatus)
@pytest.mark.parametrize("signal", DrainSignal)
def test_what_the_table_lacks_is_an_illegal_transition(standing, signal):
    if (standing, signal) in DRAIN_TABLE:
        assert next_status(standing, signal) is DRAIN_TABLE[standing, signal]
    else:
        with pytest.raises(IllegalTransition, match=f"{standing} cannot take {signal}"):
            next_status(standing, signal)


def test_asked_again_a_worker_says_again_what_it_has_said():
    bench, target = Bench(worker("decode-0", Role.DECODE)), worker("decode-0", Role.PREFILL)
    for _ in range(2):
        bench.says(Leave(1))
    assert bench.said(Left) == [Left(1)] * 2
    bench.says(Leave(2, target))
    bench.says(Leave(2, target))
    assert len(bench.made(Reshape)) == 1, "while it is changed, it is changed once"
    bench.take(Reshaped(target))
    bench.says(Leave(2, target))
    assert bench.said(Joined) == [Joined(2, target)] * 2


def test_a_prompt_that_comes_while_the_machine_is_changed_is_given_up_at_once():
    bench = Bench(worker("prefill-0", Role.PREFILL))
    bench.says(Leave(1, worker("prefill-0", Role.DECODE)))
    bench.start(request("late"))
    (abort,) = bench.said(Abort)
    assert "being changed" in abort.detail and bench.worker.idle


def test_a_change_that_failed_says_why_and_the_worker_serves_as_what_it_was():
    talk = Talk(FOUR)
    talk.take(ChangeRole(P0, 9, replace(FOUR[0], role=Role.DECODE)))
    talk.says(P0, Left(1))
    told = talk.says(P0, Joined(1, FOUR[0], "no room for the weights"))
    stands = [each for each in told if isinstance(each, WorkerStands)]
    assert stands == [WorkerStands(P0, 9, "serving", "prefill", "no room for the weights")]
    assert talk.router.peers[P0].config is FOUR[0] and not talk.router.peers[P0].leaving


def test_a_router_that_asked_for_nothing_hears_what_a_worker_has_become():
    talk, target = Talk(FOUR), replace(FOUR[0], role=Role.DECODE)
    talk.says(P0, Joined(77, target))
    assert talk.router.peers[P0].config is target
    talk.says(WorkerId("stranger"), Joined(1, target))
    assert "stranger" not in talk.router.peers


def test_a_worker_that_is_lost_while_it_leaves_costs_no_token():
    requests, world = load(), World(FOUR)
    for each in requests:
        world.submit(each, each.arrival_s)
    flip(world, D0, Role.PREFILL, 0.1)
    world.lose(D0, 0.11)
    world.run()
    check_outputs(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]
    assert D0 not in world.router.members.changes


@pytest.mark.parametrize("seed", range(6))
def test_roles_may_change_to_and_fro_at_any_moment(seed):
    draw, requests = random.Random(seed), load(60)
    world = World(FOUR, RouterConfig(max_retries=0))
    for each in requests:
        world.submit(each, each.arrival_s)
    for step in range(8):
        name, role = draw.choice((P0, P1, D0, D1)), draw.choice(list(Role))
        flip(world, name, role, 0.05 + 0.7 * step, draw.choice((0.0, 0.02, 10.0)))
    for each in requests[:8]:
        world.cancel(each.request_id, draw.random())
    world.run()
    check_outputs(world, requests)
    kept = [each for each in requests if each not in requests[:8]]
    assert [world.output(each.request_id) for each in kept] == [definition(each) for each in kept]
    assert all(each.idle and each.shared.available == each.config.num_pages for each in world.workers.values())


def test_beside_others_a_worker_of_both_roles_takes_what_their_phase_lacks():
    requests, world = load(30), World(FOUR[:3])
    for each in requests:
        world.submit(each, each.arrival_s)
    flip(world, P1, Role.COLOCATED, 0.05, 0.1)
    world._at(1.0, ROUTER, ChangeRole(D0, 2))  # now P1 decodes, so the only decode worker may go
    later = [request(f"later-{index}", 9, arrival_s=2.0 + 0.01 * index) for index in range(6)]
    for each in later:
        world.submit(each, each.arrival_s)
    world.run()
    check_all(world, [*requests, *later])
    assert not [each for each in world.stood if each.refused]
    assert world.router.members.standing_of(D0) is WorkerStatus.DRAINED
    ends = [world.finished[each.request_id][0] for each in later]
    assert {end.decode_worker for end in ends} == {P1}


def test_a_drained_worker_is_no_longer_counted_among_those_of_its_phase():
    standings = {P0: (Role.PREFILL, WorkerStatus.SERVING), P1: (Role.PREFILL, WorkerStatus.DRAINED)}
    assert why_not(P0, standings) == "prefill-0 is the last worker for prefill"
    assert why_not(P1, standings) == ""
