"""Whole clusters in virtual time: outputs are those of the definition on every path, and every page comes back."""

import itertools
from dataclasses import replace

import pytest

from jdisagg.core.events import EmitTokens, RunStep, Send, ShipKV
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Commit, Preempted, Refused, Renew, Resend, Reserve, StartPrefill
from jdisagg.core.request import FinishReason, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role, Stages, TransferMode
from jdisagg.engine.toy import ToyShipment
from tests.sim.cases import (
    NATURAL,
    check_ended,
    check_outputs,
    colocated,
    definition,
    pair,
    reasons,
    request,
    run_all,
    sent,
    stopping,
    worker,
)
from tests.sim.costs import Costs
from tests.sim.fault_injector import Faults
from tests.sim.world import World
from tests.steps import runs_decode, runs_prefill

SPLIT = (Role.PREFILL, Role.DECODE)
LAYOUTS = {
    "pair": pair(),
    "two stages": pair(decode=Stages(2)),
    "colocated": colocated(),
    "replicated": [worker("colocated-0", Role.COLOCATED, decode=Stages(2)), worker("colocated-1", Role.COLOCATED)],
    "two pairs": [*pair(), worker("prefill-1", Role.PREFILL), worker("decode-1", Role.DECODE)],
}
both_layouts = pytest.mark.parametrize("workers", [pair(), colocated()], ids=["pair", "colocated"])


@pytest.mark.parametrize("workers", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_output_is_the_definition_on_every_layout(workers):
    world, requests = World(workers), [request(f"r{i}", 1 + 5 * i % 60, max_tokens=1 + 3 * i % 20) for i in range(24)]
    run_all(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]


@both_layouts
@pytest.mark.parametrize("after", [1, 2, 3, 7])
def test_a_stop_token_ends_the_output_wherever_it_comes(workers, after):
    world, each = World(workers), stopping("stop", after=after)
    run_all(world, [each])
    assert len(world.output(each.request_id)) == after


def test_a_stop_at_the_first_token_gives_the_reserved_reservation_back():
    world, each = World(pair()), stopping("first", after=1)
    run_all(world, [each])
    assert not sent(world, Commit) and len(sent(world, Abort)) == 1
    assert world.workers[WorkerId("decode-0")].shared.pool.free_pages == 64


@both_layouts
def test_a_single_token_needs_no_decode(workers):
    world, each = World(workers), request("one", max_tokens=1)
    run_all(world, [each])
    assert not [effect for _, _, effect in world.effects if (runs_decode(effect) or isinstance(effect, ShipKV))]


@both_layouts
def test_stops_are_masked_until_min_tokens_are_out(workers):
    late = stopping("late", after=1, min_tokens=5)
    world = World(workers)
    run_all(world, [late])
    assert len(world.output(late.request_id)) >= 5


def test_the_first_token_is_told_before_its_kv_is_shipped():
    world = World(pair(), costs=Costs(ship_s=1.0))
    run_all(world, [request("early")])
    times = {
        type(effect): at_s for at_s, _, effect in reversed(world.effects) if isinstance(effect, EmitTokens | ShipKV)
    }
    committed = next(at_s for at_s, who, effect in world.effects if who == "decode-0" and runs_decode(effect))
    assert times[EmitTokens] < times[ShipKV] + 0.001 < committed


def test_a_reservation_is_reserved_before_its_prefill_starts():
    world = World(pair())
    run_all(world, [request(f"r{i}") for i in range(6)])
    kinds = [type(effect.message) for _, who, effect in world.effects if who == "router" and isinstance(effect, Send)]
    starts = [index for index, kind in enumerate(kinds) if kind is StartPrefill]
    reserves = [index for index, kind in enumerate(kinds) if kind is Reserve]
    assert len(starts) == len(reserves) == 6
    assert all(reserve < start for reserve, start in zip(reserves, starts, strict=True))


def test_decode_goes_on_while_kv_is_on_its_way():
    world = World(pair(), costs=Costs(ship_s=0.5))
    run_all(world, [request("a", max_tokens=100), request("b", max_tokens=100, arrival_s=0.55)])
    shipped = next(at_s for at_s, _, effect in reversed(world.effects) if isinstance(effect, ShipKV))
    steps = [at_s for at_s, _, effect in world.effects if runs_decode(effect)]
    assert sum(shipped < at_s < shipped + 0.05 for at_s in steps) > 10


def test_a_colocated_worker_ships_nothing():
    world = World(colocated())
    run_all(world, [request(f"r{i}") for i in range(6)])
    assert not [effect for _, _, effect in world.effects if isinstance(effect, ShipKV)]
    assert not sent(world, Commit)


def test_in_a_colocated_worker_steps_and_chunks_alternate():
    world = World(colocated(decode_steps_per_chunk=1, prefill_buckets=(8,)))
    run_all(world, [request("runs", max_tokens=60), *(request(f"p{i}", 40, arrival_s=0.01) for i in range(3))])
    phases = [bool(runs_prefill(effect)) for _, _, effect in world.effects if isinstance(effect, RunStep)]
    after = phases[phases.index(False) :]
    assert after.count(True) == 15
    assert not any(pair == (True, True) for pair in itertools.pairwise(after))


@both_layouts
def test_a_preempted_request_loses_no_token_and_gets_none_twice(workers):
    world = World([replace(each, num_pages=12, reserve_tokens=1, reservations_ahead=0) for each in workers])
    requests = [request(f"r{i}", 5, max_tokens=30, arrival_s=i * 1e-3) for i in range(4)]
    run_all(world, requests)
    assert sent(world, Preempted)


def test_the_oldest_of_the_highest_priority_is_never_preempted():
    world = World(colocated(num_pages=12, reserve_tokens=1))
    requests = [request(f"r{i}", 5, max_tokens=30, arrival_s=i * 1e-3, priority=3 - i) for i in range(4)]
    run_all(world, requests)
    assert sent(world, Preempted) and "r3" not in {each.attempt.request_id for each in sent(world, Preempted)}


def test_priority_goes_first_and_then_arrival():
    world = World(colocated(num_slots=1, reservations_ahead=0))
    requests = [
        request("a"),
        request("b", arrival_s=1e-4),
        request("c", arrival_s=2e-4, priority=-1),
        request("d", arrival_s=3e-4),
    ]
    run_all(world, requests)
    assert list(world.finished) == ["a", "c", "b", "d"]


def test_who_is_first_in_line_and_too_big_for_now_is_not_overtaken():
    world = World(pair(num_pages=16))
    small = [request(f"s{i}", 4, max_tokens=12, arrival_s=i * 1e-4) for i in range(8)]
    big = request("big", 40, max_tokens=20, arrival_s=1.5e-4)
    run_all(world, [*small, big])
    order = [message.attempt.request_id for message in sent(world, StartPrefill)]
    assert order.index("big") == 2


@both_layouts
@pytest.mark.parametrize("at_s", [0.0, 5e-6, 1.5e-5, 1e-3, 2.4e-3, 3.2e-3, 4e-3, 8e-3])
def test_a_cancelled_request_returns_every_page(workers, at_s):
    world, each, other = World(workers), request("gone", max_tokens=40), request("stays", max_tokens=9)
    world.submit(each)
    world.submit(other)
    world.cancel(each.request_id, at_s)
    world.run()
    check_ended(world, [each, other])
    assert reasons(world, each) == [FinishReason.ABORT] and reasons(world, other) == [FinishReason.LENGTH]


def test_kv_that_arrives_after_an_abort_enters_no_page():
    world = World(pair(), costs=Costs(ship_s=0.1))
    each = request("gone", max_tokens=40)
    world.submit(each)
    world.cancel(each.request_id, 0.05)
    world.run()
    assert "DropKV" in {type(effect).__name__ for _, _, effect in world.effects}
    assert all(slot == -1 for page in world.machines[WorkerId("decode-0")].pages for slot in page)
    check_ended(world, [each])


def test_cancelling_what_is_unknown_or_over_changes_nothing():
    world, each = World(pair()), request("a")
    world.cancel(each.request_id, 0.0)
    world.submit(each, 0.001)
    world.cancel(each.request_id, 5.0)
    world.run()
    check_ended(world, [each])


@both_layouts
def test_a_full_house_rejects_and_says_when_to_come_back(workers):
    world = World(workers, RouterConfig(queue_limit=3))
    requests = [request(f"r{i:02}", 20, max_tokens=20) for i in range(20)]
    for each in requests:
        world.submit(each)
    world.run()
    check_ended(world, requests)
    assert world.rejected and all(1 <= reject[0].retry_after_s <= 60 for reject in world.rejected.values())
    assert not world.rejected.keys() & world.finished.keys()


def test_a_request_that_no_pool_could_hold_ends_with_both_numbers():
    world, each = World(pair(num_pages=4)), request("huge", 30, max_tokens=30)
    world.submit(each)
    world.run()
    (finish,) = world.finished[each.request_id]
    assert finish.reason is FinishReason.ERROR and "60 tokens" in finish.detail and "decode-0 16" in finish.detail


def test_a_wait_in_the_queue_has_a_deadline():
    world = World(colocated(num_slots=1, reservations_ahead=0), RouterConfig(queue_timeout_s=0.01))
    requests = [request("long", max_tokens=100), request("waits", arrival_s=1e-3)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)
    assert reasons(world, requests[1]) == [FinishReason.TIMEOUT]


@pytest.mark.parametrize("lost", ["prefill-1", "decode-1"])
@pytest.mark.parametrize("at_s", [1e-5, 2e-3, 4e-3, 6e-3, 2e-2])
def test_the_requests_of_a_lost_worker_go_on_elsewhere(lost, at_s):
    world = World(LAYOUTS["two pairs"])
    requests = [request(f"r{i}", 10, max_tokens=40) for i in range(8)]
    world.lose(WorkerId(lost), at_s)
    run_all(world, requests)
    assert [world.output(each.request_id) for each in requests] == [definition(each) for each in requests]
    assert lost not in world.router.peers


def test_losing_the_last_worker_of_a_phase_ends_everything_as_an_error():
    world = World(pair())
    requests = [request(f"r{i}", 10, max_tokens=40) for i in range(12)]
    for each in requests:
        world.submit(each)
    world.lose(WorkerId("decode-0"), 5e-3)
    late = request("late")
    world.submit(late, 0.1)
    world.run()
    check_ended(world, [*requests, late])
    assert {reasons(world, each)[0] for each in requests} == {FinishReason.ERROR} and late.request_id in world.rejected


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(lose_transfer=1.0), FinishReason.TIMEOUT),
        (Faults(fail_transfer=1.0), FinishReason.ERROR),
        (Faults(fail_plan=1.0), FinishReason.ERROR),
        (Faults(lose_message=1.0), FinishReason.TIMEOUT),
    ],
)
def test_what_always_fails_ends_as_a_failure_and_never_as_length(faults, reason):
    world = World(pair(), RouterConfig(max_retries=2), faults=faults)
    requests = [request(f"r{i}") for i in range(5)]
    for each in requests:
        world.submit(each)
    world.run()
    check_ended(world, requests)
    assert {reasons(world, each)[0] for each in requests} == {reason}
    assert (
        all("attempt 3" in world.finished[each.request_id][0].detail for each in requests)
        or reason is FinishReason.TIMEOUT
    )


@both_layouts
def test_the_parts_of_a_ledger_sum_exactly_to_its_whole(workers):
    world = World(workers, faults=Faults(jitter_s=1e-3, fail_plan=0.02))
    requests = [request(f"r{i}", 10, max_tokens=10) for i in range(20)]
    for each in requests:
        world.submit(each)
    world.run()
    for each in requests:
        (finish,) = world.finished[each.request_id]
        assert sum(finish.ledger.parts_ns().values()) == finish.ledger.total_ns > 0
        assert finish.ledger.marks[0][0] is Mark.ARRIVED and finish.ledger.marks[-1][0] is Mark.ENDED


every_mode = pytest.mark.parametrize("mode", TransferMode)
THREE_GROUPS = {"layer_groups": ((0, 3), (3, 6), (6, 8)), "prefill_buckets": (8,)}


@every_mode
def test_every_output_is_the_definition_in_every_mode_though_bits_flip_and_parts_are_lost(mode):
    faults = Faults(seed=5, jitter_s=1e-3, flip_bit=0.1, lose_transfer=0.03, fail_transfer=0.03)
    world = World(pair(transfer=mode, **THREE_GROUPS), faults=faults)
    requests = [request(f"r{i}", 1 + 5 * i % 60, max_tokens=1 + 3 * i % 20) for i in range(24)]
    run_all(world, requests)
    assert sent(world, Resend)
    assert len(sent(world, StartPrefill)) == 24, "shipping again was to mend all of it"


def test_a_flipped_bit_that_nobody_looks_for_would_give_wrong_tokens(monkeypatch):
    monkeypatch.setattr(ToyShipment, "intact", lambda _: True)
    world, each = World(pair(), faults=Faults(flip_bit=1.0)), request("a")
    world.submit(each)
    world.run()
    assert world.output(each.request_id)[1:] != definition(each)[1:]


def test_prefill_may_take_longer_than_any_lease():
    world = World(pair(**THREE_GROUPS), RouterConfig(lease_s=0.5), costs=Costs(prefill_s=0.3))
    run_all(world, [request("long", 60)])
    assert sent(world, Renew) and world.now_s > 2.0


@every_mode
@pytest.mark.parametrize("dead", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("at_s", [1e-5, 3e-3, 8e-3, 1.6e-2, 3e-2])
def test_requests_of_a_worker_that_dies_and_tells_nobody_go_on_elsewhere(mode, dead, at_s):
    limits = RouterConfig(lease_s=2.0, handoff_timeout_s=3.0, prefill_timeout_s=5.0, stall_timeout_s=5.0)
    workers = [worker(f"{role}-{i}", role, transfer=mode, **THREE_GROUPS) for i in range(2) for role in SPLIT]
    world = World(workers, limits)
    requests = [request(f"r{i}", 30, max_tokens=40) for i in range(6)]
    for each in requests:
        world.submit(each)
    world.kill(WorkerId(dead), at_s)
    world.run()
    check_outputs(world, requests)
    assert all(reasons(world, each)[0] in NATURAL for each in requests), world.finished


def test_streaming_hides_the_transfer_behind_the_prefill():
    exposed = {}
    for mode in (TransferMode.WHOLE, TransferMode.CHUNK, TransferMode.LAYER):
        costs = Costs(prefill_s=0.0, prefill_token_s=1e-3, ship_s=1e-5, ship_token_s=8e-4)
        world = World(pair(transfer=mode, **THREE_GROUPS), costs=costs)
        run_all(world, [request("a", 64)])
        (finish,) = world.finished[RequestId("a")]
        hidden_ns, exposed[mode] = finish.ledger.transfer_ns()
        assert hidden_ns + exposed[mode] == pytest.approx(64 * 8e5, rel=0.1)
        assert exposed[mode] == finish.ledger.parts_ns()["transfer"]
    whole, chunk, layer = exposed.values()
    assert chunk < 0.14 * whole and layer < 0.08 * whole


def test_time_of_the_transfer_is_booked_as_transfer():
    world = World(pair(), costs=Costs(ship_s=0.25))
    run_all(world, [request("a")])
    (finish,) = world.finished[RequestId("a")]
    assert 0.25e9 <= finish.ledger.parts_ns()["transfer"] < 0.26e9
    assert (finish.prefill_worker, finish.decode_worker) == ("prefill-0", "decode-0")


def test_prompt_logprobs_come_once_and_before_the_first_token():
    world = World(pair(prefill_buckets=(4,), num_pages=12, reserve_tokens=1))
    requests = [request(f"r{i}", 9, max_tokens=20, prompt_logprobs=0, arrival_s=i * 1e-4) for i in range(3)]
    run_all(world, requests)
    assert sent(world, Preempted)
    for each in requests:
        assert [sampled.token for sampled in world.scored[each.request_id]] == list(each.prompt[1:])


def test_both_pools_serve_when_several_requests_come_at_once():
    world = World(LAYOUTS["two pairs"])
    run_all(world, [request(f"r{i}", 10) for i in range(12)])
    ends = [finish for finishes in world.finished.values() for finish in finishes]
    assert {end.prefill_worker for end in ends} == {"prefill-0", "prefill-1"}
    assert {end.decode_worker for end in ends} == {"decode-0", "decode-1"}


def test_outstanding_work_is_struck_off_when_all_is_over():
    world = World(LAYOUTS["two pairs"], faults=Faults(jitter_s=1e-3, fail_plan=0.05))
    for i in range(20):
        world.submit(request(f"r{i}", 10))
    world.run()
    assert all(peer.work_tokens == 0 and not peer.unanswered for peer in world.router.peers.values())


def test_a_reservation_that_is_refused_waits_for_capacity():
    world = World(pair(num_slots=1, reservations_ahead=0), costs=Costs(message_s=1e-3))
    run_all(world, [request(f"r{i}", arrival_s=i * 1e-4) for i in range(5)])
    assert len(sent(world, StartPrefill)) == 5
    assert len(sent(world, Refused)) <= 5


def test_the_definition_depends_on_every_token():
    plain = request("x", 12)
    changed = [(*plain.prompt[:i], plain.prompt[i] + 1, *plain.prompt[i + 1 :]) for i in range(12)]
    outputs = {tuple(definition(type(plain)(plain.request_id, prompt, plain.sampling))) for prompt in changed}
    assert len(outputs | {tuple(definition(plain))}) == 13
