"""One worker, event by event."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import DropKV, EngineFailed, InsertKV, KVArrived, Received, RunStep, Send, ShipKV
from jdisagg.core.messages import (
    Abort,
    AbortAck,
    Ack,
    Commit,
    Drawn,
    Ended,
    Preempted,
    Refused,
    Renew,
    Resend,
    Reserved,
    View,
)
from jdisagg.core.request import BROKEN, Attempt, FinishReason, RequestId, Sampled, WorkerId
from jdisagg.core.worker_config import Role, Stages, TransferMode
from jdisagg.policy.cache.page_pool import PageState
from jdisagg.policy.router.request_state import reserve_for
from tests.policy.bench import OTHER, Bench
from tests.sim.cases import definition, request, stopping, worker

A1 = Attempt(RequestId("a"), 1)


def decoding(**sizes) -> Bench:
    return Bench(worker("decode-0", Role.DECODE, **sizes))


def prefilling(**sizes) -> Bench:
    return Bench(worker("prefill-0", Role.PREFILL, **sizes))


def seated(bench: Bench, *requests) -> Bench:
    for each in requests:
        assert bench.reserve(each)
        bench.arrive(each)
        bench.commit(each)
    return bench


def tokens_of(bench: Bench, name: str) -> list[int]:
    draws = [draw for message in bench.said(Drawn) for draw in message.deltas if draw.attempt.request_id == name]
    return [sampled.token for draw in draws for sampled in draw.sampled]


# ------------------------------------------------------------------ reservations


def test_a_reservation_holds_pages_for_the_predicted_finish():
    bench = decoding()
    assert bench.reserve(request("a", 6, max_tokens=10))
    assert bench.free_pages == 64 - 4  # 15 tokens of KV, 4 a page


def test_a_reservation_is_refused_where_slots_or_pages_are_out_and_nothing_is_held():
    few_slots = decoding(num_slots=1, reservations_ahead=1)
    assert few_slots.reserve(request("a")) and few_slots.reserve(request("b"))
    assert not few_slots.reserve(request("c")) and few_slots.said(Refused)
    few_pages = decoding(num_pages=3)
    assert not few_pages.reserve(request("a", 6, max_tokens=10))
    assert few_pages.free_pages == 3


def test_a_refusal_is_followed_by_what_is_free():
    bench = decoding(num_pages=3)
    bench.reserve(request("a", 6, max_tokens=10))
    assert [type(message) for message in bench.heard[-2:]] == [Refused, View]


def test_a_reservation_said_twice_holds_one_reservation():
    bench = decoding()
    each = request("a")
    bench.reserve(each)
    free = bench.free_pages
    bench.says(reserve_for(Attempt(RequestId("a"), bench.epochs["a"]), each, 0, OTHER, 100.0))
    first, second = bench.said(Reserved)
    assert first == second and bench.free_pages == free


@pytest.mark.parametrize("commit_first", [True, False])
def test_a_sequence_decodes_only_when_its_kv_and_its_commit_are_there(commit_first):
    bench, each = decoding(), request("a")
    bench.reserve(each)
    first, second = (bench.commit, bench.arrive) if commit_first else (bench.arrive, bench.commit)
    first(each)
    assert not bench.decode_runs and not bench.said(Ack)
    second(each)
    assert bench.decode_runs and len(bench.said(Ack)) == 1


def test_the_kv_is_inserted_before_the_step_that_reads_it():
    bench, each = decoding(), request("a")
    bench.reserve(each)
    bench.commit(each)
    kinds = [type(effect) for effect in bench.arrive(each)]
    assert kinds.index(InsertKV) < kinds.index(RunStep)


@pytest.mark.parametrize("order", list(permutations([0, 1, 2, "commit"])))
def test_parts_and_their_commit_come_in_any_order_and_all_are_needed(order):
    bench, each = decoding(), request("a", 12)
    bench.reserve(each)
    for what in order:
        assert not bench.decode_runs and not bench.said(Ack)
        _ = bench.commit(each, 3) if what == "commit" else bench.arrive(each, what, 3)
    bench.read_all()
    assert len(bench.said(Ack)) == 1 and tokens_of(bench, "a") == definition(each)[1:]


def test_a_part_that_comes_twice_or_that_nobody_counted_is_dropped():
    bench, each = decoding(), request("a", 12)
    bench.reserve(each)
    bench.arrive(each, 0, 3)
    assert type(bench.arrive(each, 0, 3)[0]) is DropKV
    bench.commit(each, 2)
    assert type(bench.arrive(each, 2, 3)[0]) is DropKV
    assert not bench.said(Ack) and not bench.decode_runs


def test_steps_are_dispatched_ahead_and_never_more_than_allowed():
    bench = seated(decoding(steps_in_flight=3), request("a", max_tokens=20))
    assert len(bench.decode_runs) == 3
    bench.read()
    assert len(bench.decode_runs) == 4


def test_the_last_step_is_the_last_even_before_its_token_is_read():
    bench = seated(decoding(steps_in_flight=5), request("a", max_tokens=4))
    assert len(bench.decode_runs) == 3  # the first token came with the commit
    assert bench.free_pages == 64
    bench.read_all()
    assert tokens_of(bench, "a") == definition(request("a", max_tokens=4))[1:]
    assert [ended.reason for ended in bench.said(Ended)] == [FinishReason.LENGTH]


def test_a_stop_is_learnt_late_and_its_pages_come_back_then():
    each = stopping("a", after=3)
    bench = seated(decoding(steps_in_flight=4), each)
    bench.read()
    held = bench.free_pages
    bench.read()
    assert held < bench.free_pages == 64 and bench.said(Ended)[0].reason is FinishReason.STOP
    bench.read_all()
    assert tokens_of(bench, "a") == definition(each)[1:]


def test_a_slot_is_retired_before_it_is_given_away():
    bench = seated(decoding(num_slots=1, reservations_ahead=1), stopping("a", after=3), request("b"))
    bench.read_all()
    admitting = [run.plan.decode for run in bench.decode_runs if run.plan.decode.admit]
    assert [plan.retire for plan in admitting] == [(), (0,)]


def test_pages_are_granted_in_the_step_that_first_needs_them():
    bench = seated(decoding(reserve_tokens=1, steps_in_flight=1), request("a", 4, max_tokens=9))
    bench.read_all()
    granted = [
        (number, grant.index) for number, run in enumerate(bench.decode_runs) for grant in run.plan.decode.grants
    ]
    assert granted == [(4, 2)]  # positions 4 to 7 came with the admission, position 8 is the fifth step's


def test_the_table_is_as_wide_as_the_longest_active_sequence_needs():
    bench = seated(decoding(steps_in_flight=1), request("a", 14, max_tokens=40))
    widths = [run.plan.decode.table_pages for run in bench.decode_runs]
    while bench.pending:
        bench.read()
    widths = [run.plan.decode.table_pages for run in bench.decode_runs]
    assert widths == [4] * 2 + [8] * 16 + [32] * 21  # 15 and 16 tokens, 17 to 32, 33 to 53


def test_when_pages_run_out_the_youngest_of_the_lowest_priority_gives_way():
    old = request("old", 4, max_tokens=30, arrival_s=0.0)
    urgent = request("urgent", 4, max_tokens=30, arrival_s=1.5, priority=-1)
    young = request("young", 4, max_tokens=30, arrival_s=1.0)
    bench = seated(decoding(num_pages=12, reserve_tokens=1), young, old, urgent)
    bench.read_all()
    assert [message.attempt.request_id for message in bench.said(Preempted)] == ["young", "old"]
    for name in ("young", "old"):
        (preempted,) = [message for message in bench.said(Preempted) if message.attempt.request_id == name]
        assert preempted.output[1:] == tuple(tokens_of(bench, name)) and bench.free_pages == 12
    assert tokens_of(bench, "urgent") == definition(urgent)[1:]


def test_a_sequence_alone_among_empty_reservations_waits_instead_of_giving_way():
    first = request("first", 4, max_tokens=20)
    bench = seated(decoding(num_pages=8, reserve_tokens=1), first)
    assert bench.reserve(request("reservation", 18, max_tokens=2))
    bench.read_all()
    assert not bench.said(Preempted) and not bench.said(Ended)
    bench.abort("reservation")
    bench.read_all()
    assert tokens_of(bench, "first") == definition(first)[1:]


@pytest.mark.parametrize("step", ["reserved", "arrived", "committed", "decoding", "steps read"])
def test_an_abort_at_any_step_returns_every_page_and_is_acknowledged(step):
    bench, each = decoding(), request("a", max_tokens=30)
    bench.reserve(each)
    if step in ("arrived", "decoding", "steps read"):
        bench.arrive(each)
    if step in ("committed", "decoding", "steps read"):
        bench.commit(each)
    if step == "steps read":
        bench.read()
    bench.abort("a")
    assert bench.free_pages == 64 and bench.said(AbortAck) == [AbortAck(A1)]
    bench.read_all()
    assert bench.worker.idle


def test_an_abort_of_nothing_is_acknowledged_too():
    bench = decoding()
    bench.epochs["ghost"] = 3
    bench.abort("ghost")
    assert bench.said(AbortAck) == [AbortAck(Attempt(RequestId("ghost"), 3))]


def test_a_broken_part_enters_no_page_and_is_asked_for_again():
    bench, each = decoding(), request("a", 12)
    bench.reserve(each)
    bench.commit(each, 2)
    bench.arrive(each, 0, 2)
    assert type(bench.arrive(each, 1, 2, intact=False)[0]) is DropKV
    assert bench.said(Resend) == [Resend(A1, 1)] and not bench.said(Ack)
    bench.arrive(each, 1, 2)
    bench.read_all()
    assert tokens_of(bench, "a") == definition(each)[1:]


def test_a_part_that_is_always_broken_ends_the_handoff():
    bench, each = decoding(part_tries=2), request("a", 12)
    bench.reserve(each)
    for _ in range(3):
        bench.arrive(each, intact=False)
    (abort,) = bench.said(Abort)
    assert len(bench.said(Resend)) == 2 and "part 0 came broken 3 times" in abort.detail
    assert abort.reason is FinishReason.ERROR and bench.free_pages == 64


def test_parts_that_do_not_come_are_asked_for_again_and_not_for_ever():
    bench, each = decoding(part_tries=2, part_timeout_s=4.0), request("a", 12)
    bench.reserve(each)
    bench.commit(each, 3)
    bench.now_s = 3.0
    bench.arrive(each, 1, 3)
    bench.fire("parts/1/a")
    assert not bench.said(Resend), "a part came a moment ago"
    for _ in range(2):
        bench.fire("parts/1/a")
    assert bench.said(Resend) == [Resend(A1, 0), Resend(A1, 2)] * 2 and bench.now_s == 11.0
    bench.fire("parts/1/a")
    (abort,) = bench.said(Abort)
    assert abort.reason is FinishReason.TIMEOUT and "part 0 did not come 3 times" in abort.detail
    assert bench.free_pages == 64


def test_pages_of_another_layout_are_refused_with_both_names():
    bench, each = decoding(kv_layout="4 tokens bfloat16"), request("a")
    bench.reserve(each)
    bench.says(Commit(A1, Sampled(3), 6, 1, "4 tokens int8"), OTHER)
    (abort,) = bench.said(Abort)
    assert "4 tokens int8" in abort.detail and "4 tokens bfloat16" in abort.detail and bench.free_pages == 64


def test_a_lease_begins_anew_with_every_part_and_every_word_of_the_source():
    bench, each = decoding(), request("a", 12)
    bench.reserve(each, lease_s=5.0)
    bench.now_s = 4.0
    bench.says(Renew(A1), OTHER)
    bench.fire("destination/1/a")
    bench.now_s = 8.0
    bench.arrive(each, 0, 2)
    bench.fire("destination/1/a")
    assert not bench.said(Abort) and bench.timers["destination/1/a"] == 13.0
    bench.fire("destination/1/a")
    assert bench.said(Abort)[0].reason is FinishReason.TIMEOUT and bench.free_pages == 64


def test_a_source_that_missed_its_ack_gets_another_and_one_without_a_reservation_an_abort():
    bench = seated(decoding(), request("a", max_tokens=40))
    bench.says(Renew(A1), OTHER)
    assert len(bench.said(Ack)) == 2
    bench.says(Renew(Attempt(RequestId("a"), 7)), OTHER)
    assert bench.said(Abort) == [Abort(Attempt(RequestId("a"), 7), "no such reservation")]


def test_pages_that_are_held_already_are_nobodys_to_fill_and_are_read():
    first, again = request("a", 10, max_tokens=6), replace(request("a", 10, max_tokens=6), request_id="b")
    bench = decoding(prefix_caching=True)
    seated(bench, first)
    bench.read_all()
    kept = bench.worker.shared.cache.pages()
    assert len(kept) == 3 and bench.free_pages == 61, "of 10 tokens and 5 of the output: 3 full pages"
    assert bench.reserve(again)
    reserved = bench.said(Reserved)[-1]
    assert set(reserved.pages[:2]) <= kept and reserved.cached_pages == 2
    bench.take(KVArrived(replace(bench.transfer(again, 2, 3), part=0)))
    bench.commit(again)
    bench.read_all()
    assert tokens_of(bench, "b") == definition(again)[1:]
    assert bench.worker.shared.cache.pages() == kept and bench.free_pages == 61


def test_a_word_that_is_for_a_router_is_refused_by_name_and_changes_nothing():
    bench = seated(decoding(), request("a"))
    with pytest.raises(SenselessWord, match="other-end says View, which is not for a worker"):
        bench.take(Received(OTHER, View(1, 1, 0, 0)))
    bench.read_all()
    assert tokens_of(bench, "a") == definition(request("a"))[1:]


def test_kv_for_pages_of_another_reservation_or_from_another_source_is_dropped():
    bench = decoding()
    for each in (request("a", 6), request("b", 6)):
        assert bench.reserve(each)
    mine, others = (bench.transfer(request(name, 6), 0, 1) for name in ("a", "b"))
    for lie in (
        replace(mine, destination_pages=others.destination_pages),
        replace(mine, destination_pages=(-1,)),
        replace(mine, source=WorkerId("stranger")),
    ):
        assert [type(each) for each in bench.take(KVArrived(lie))] == [DropKV]
    assert InsertKV in [type(each) for each in bench.take(KVArrived(mine))]


def test_a_commit_of_another_source_or_of_another_length_does_not_admit():
    bench = decoding()
    for name in ("a", "b"):
        assert bench.reserve(request(name, 6))
        bench.arrive(request(name, 6))
    bench.take(Received(WorkerId("stranger"), Commit(A1, Sampled(3), 6, 1)))
    assert not bench.decode_runs and [each.detail for each in bench.said(Abort)] == ["no such reservation"]
    bench.says(Commit(Attempt(RequestId("b"), 2), Sampled(3), 10**6, 1), OTHER)
    assert not bench.decode_runs and "commits 1000000 tokens of 6" in bench.said(Abort)[-1].detail
    bench.commit(request("a", 6))
    assert len(bench.decode_runs) > 0


def test_kv_of_another_epoch_is_dropped():
    bench, each = decoding(), request("a")
    bench.reserve(each)
    stale = bench.transfer(each)
    bench.abort("a")
    bench.reserve(each)
    effects = bench.take(KVArrived(stale))
    assert next(type(effect) for effect in effects) is DropKV and not bench.made(InsertKV)


def test_a_commit_without_a_reservation_is_answered_with_an_abort():
    bench, each = decoding(), request("a")
    bench.epochs["a"] = 5
    bench.commit(each)
    assert bench.said(Abort) == [Abort(Attempt(RequestId("a"), 5), "no such reservation")]


def test_a_lease_that_runs_out_frees_the_reservation_and_tells_the_router():
    bench, each = decoding(), request("a")
    bench.reserve(each, lease_s=5.0)
    bench.fire("destination/1/a")
    assert bench.free_pages == 64 and bench.said(Abort)[0].reason is FinishReason.TIMEOUT


def test_a_lease_does_not_end_a_sequence_that_decodes():
    bench = seated(decoding(), request("a"))
    bench.fire("destination/1/a")
    assert not bench.said(Abort) and bench.free_pages < 64


def test_a_failed_step_ends_its_sequences_and_no_others():
    bench = seated(decoding(decode=Stages(2), steps_in_flight=1), request("a"), request("b"))
    broken, kept = bench.decode_runs
    bench.pending.popleft()
    bench.fail(broken.plan.step_id)
    assert [message.attempt.request_id for message in bench.said(Abort)] == ["a"]
    bench.read_all()
    assert tokens_of(bench, "b") == definition(request("b"))[1:] and bench.free_pages == 64
    assert kept.plan.decode.microbatch == 1


def test_logits_that_are_no_numbers_end_their_sequence_as_an_error_and_no_other():
    bench = seated(decoding(steps_in_flight=1), request("a"), request("b"))
    done = bench.pending.popleft()
    broken = replace(done, decode=((done.decode[0][0], (Sampled(BROKEN),)), *done.decode[1:]))
    bench.take(broken)
    (ended,) = bench.said(Ended)
    assert (ended.attempt.request_id, ended.reason, ended.num_output) == ("a", FinishReason.ERROR, 1)
    assert "no numbers" in ended.detail and tokens_of(bench, "a") == []
    bench.read_all()
    assert tokens_of(bench, "b") == definition(request("b"))[1:] and bench.free_pages == 64


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize("scored", [(), (Sampled(1, math.nan),)])
def test_a_prompt_whose_logits_are_no_numbers_ends_as_an_error_and_ships_nothing(scored):
    bench = prefilling()
    bench.start(request("a"))
    bench.start(request("b"))
    done = bench.pending.popleft()
    first = Sampled(3) if scored else Sampled(BROKEN)
    name, *others = [each for each, _ in done.first]
    bench.take(replace(done, first=((name, first), *done.first[1:]), prompt=((name, scored),)))
    bench.read_all()
    (ended,) = bench.said(Ended)
    assert (ended.attempt.request_id, ended.reason, ended.num_output) == ("a", FinishReason.ERROR, 0)
    assert tokens_of(bench, "a") == [] and len(tokens_of(bench, "b")) == 1 and not others[1:]
    assert {ship.transfer.attempt.request_id for ship in bench.made(ShipKV)} == {"b"}


def test_prompts_are_packed_and_long_ones_cut():
    bench = prefilling(chunks_in_flight=1)
    bench.start(request("first", 3))
    for name, tokens in (("b", 20), ("c", 4)):
        bench.start(request(name, tokens))
    bench.read_all()
    plans = [run.plan.prefill for run in bench.prefill_runs]
    assert [[(chunk.request_id, len(chunk.tokens)) for chunk in plan.chunks] for plan in plans] == [
        [("first", 3)],
        [("b", 16)],
        [("b", 4), ("c", 4)],
    ]
    assert [plan.bucket_tokens for plan in plans] == [8, 16, 8]


def test_the_next_chunk_is_planned_before_the_last_one_is_read():
    bench = prefilling(chunks_in_flight=2)
    bench.start(request("long", 40))
    assert len(bench.prefill_runs) == 2


def test_nothing_starts_that_cannot_finish():
    bench = prefilling(num_pages=8)
    bench.start(request("a", 28))
    bench.start(request("b", 8))
    assert {chunk.request_id for run in bench.prefill_runs for chunk in run.plan.prefill.chunks} == {"a"}
    bench.read_all()
    bench.ack("a")
    bench.read_all()
    assert {chunk.request_id for run in bench.prefill_runs for chunk in run.plan.prefill.chunks} == {"a", "b"}


def test_the_first_token_goes_out_before_the_kv():
    bench, each = prefilling(), request("a")
    bench.start(each)
    kinds = [type(effect.message) if isinstance(effect, Send) else type(effect) for effect in bench.read()]
    assert kinds.index(Drawn) < kinds.index(ShipKV) < kinds.index(Commit)
    assert tokens_of(bench, "a") == definition(each)[:1]


def test_pages_stay_until_the_destination_acknowledges():
    bench = prefilling()
    bench.start(request("a", 9))
    bench.read()
    assert bench.free_pages == 61
    bench.ack("a")
    assert bench.free_pages == 64 and bench.worker.idle


def test_pages_that_the_destination_holds_are_not_shipped():
    bench, each = prefilling(transfer=TransferMode.CHUNK, prefill_buckets=(8,)), request("a", 18)
    bench.start(each, cached_pages=3)
    bench.read_all()
    assert [(part.source_pages, part.destination_pages) for run in bench.prefill_runs for part in run.ships] == [
        ((bench.worker.prefill.sequences[A1].pages[3],), (4,)),
        ((bench.worker.prefill.sequences[A1].pages[4],), (5,)),
    ]
    assert [message.num_parts for message in bench.said(Commit)] == [2]


@pytest.mark.parametrize("mode", TransferMode)
def test_where_all_is_held_only_the_first_token_travels(mode):
    bench, each = prefilling(transfer=mode), request("a", 8)
    bench.start(each, cached_pages=2)
    bench.read_all()
    assert [message.num_parts for message in bench.said(Commit)] == [0] and not bench.shipped
    bench.ack("a")
    assert bench.free_pages == 64


def test_a_worker_that_learns_says_from_where_on_it_streams():
    bench = prefilling(transfer=TransferMode.AUTO, prefill_buckets=(8,))
    bench.start(request("a", 60))
    told = bench.said(View)[-1].stream_tokens
    while bench.pending:
        bench.now_s += 1e-3
        bench.read()
    bench.says(Ack(A1, wire_s=2.0), OTHER)
    learnt = bench.worker.prefill.sender.streaming
    assert 0 < bench.said(View)[-1].stream_tokens != told and learnt is not None and "ms" in learnt.describe()
    assert not prefilling(transfer=TransferMode.CHUNK).worker.prefill.sender.streaming


def test_a_part_asked_for_again_is_the_same_pages_again():
    bench, each = prefilling(transfer=TransferMode.CHUNK, prefill_buckets=(8,)), request("a", 14)
    bench.start(each)
    bench.read_all()
    bench.says(Resend(A1, 0), OTHER)
    (again,) = bench.made(ShipKV)
    first = bench.prefill_runs[0].ships[0]
    assert again.transfer == replace(first, resends=1)
    bench.ack("a")
    bench.says(Resend(A1, 0), OTHER)
    assert len(bench.made(ShipKV)) == 1 and bench.said(Abort) == [Abort(A1, "no such prompt")]


def test_a_transfer_that_failed_is_shipped_again_until_it_has_had_its_tries():
    bench = prefilling(part_tries=2)
    bench.start(request("a", 9))
    bench.read()
    for _ in range(3):
        bench.take(EngineFailed(None, "link down", A1, 0))
    assert [ship.transfer.resends for ship in bench.made(ShipKV)] == [0, 1, 2]
    assert "link down" in bench.said(Abort)[0].detail and bench.free_pages == 64


def test_a_source_renews_the_lease_from_its_start_to_its_ack():
    bench = prefilling(chunks_in_flight=1, prefill_buckets=(8,))
    bench.start(request("a", 20), lease_s=6.0)
    for beats in range(1, 4):
        bench.fire("renew/1/a")
        assert bench.said(Renew) == [Renew(A1)] * beats and bench.now_s == 2.0 * beats
    bench.read_all()
    bench.fire("renew/1/a")
    bench.ack("a")
    bench.fire("renew/1/a")
    assert len(bench.said(Renew)) == 4 and "renew/1/a" not in bench.timers


def test_an_abort_of_the_other_end_is_told_to_the_router():
    bench = prefilling()
    bench.start(request("a", 9))
    bench.says(Abort(A1, "no such reservation"), OTHER)
    assert bench.said(Abort) == [Abort(A1, f"{OTHER}: no such reservation")] and bench.free_pages == 64
    bench.says(Abort(A1, "no such reservation"), OTHER)
    assert len(bench.said(Abort)) == 1


def test_a_colocated_reservation_is_kept_while_its_prompt_lives():
    bench, each = Bench(worker("both", Role.COLOCATED)), request("a")
    bench.reserve(each, lease_s=5.0)
    bench.start(each, decode=bench.worker.config.worker, timeout_s=50.0)
    bench.fire("destination/1/a")
    assert not bench.said(Abort) and not bench.said(Renew)
    bench.read_all()
    assert tokens_of(bench, "a") == definition(each)


def test_an_acknowledgement_that_never_comes_has_a_deadline():
    bench = prefilling(ack_timeout_s=2.0)
    bench.start(request("a", 9))
    bench.read()
    bench.fire("source/1/a")
    assert bench.free_pages == 64 and bench.said(Abort)


def shipped_with(bench: Bench) -> list[list[tuple[int, tuple[int, int] | None, int]]]:
    """(part, layers, pages) of what each plan ships."""
    return [[(part.part, part.layers, len(part.source_pages)) for part in run.ships] for run in bench.prefill_runs]


def test_in_chunk_mode_each_chunk_takes_the_pages_it_completed_along():
    bench, each = prefilling(transfer=TransferMode.CHUNK, prefill_buckets=(8, 10)), request("a", 23)
    bench.start(each)
    bench.read_all()
    assert shipped_with(bench) == [[(0, None, 2)], [(1, None, 3)], [(2, None, 1)]]
    assert [message.num_parts for message in bench.said(Commit)] == [3] and not bench.made(ShipKV)
    assert bench.joined("a") == each.prompt


def test_in_layer_mode_each_group_of_each_chunk_leaves_by_itself():
    bench = prefilling(transfer=TransferMode.LAYER, prefill_buckets=(8,), layer_groups=((0, 1), (1, 3)))
    each = request("a", 9)
    bench.start(each)
    bench.read_all()
    assert shipped_with(bench) == [[(0, (0, 1), 2), (1, (1, 3), 2)], [(2, (0, 1), 1), (3, (1, 3), 1)]]
    assert [message.num_parts for message in bench.said(Commit)] == [4] and bench.joined("a") == each.prompt


def test_a_prompt_that_is_aborted_half_way_commits_nothing_of_what_has_left():
    bench = prefilling(transfer=TransferMode.CHUNK, prefill_buckets=(8,), chunks_in_flight=1)
    bench.start(request("a", 20))
    bench.read()
    bench.abort("a")
    bench.read_all()
    assert bench.shipped["a"] and not bench.said(Commit) and bench.free_pages == 64 and bench.worker.idle


@pytest.mark.parametrize("mode", [TransferMode.WHOLE, TransferMode.CHUNK, TransferMode.LAYER])
def test_pages_on_their_way_are_booked_as_such(mode):
    bench = prefilling(transfer=mode, prefill_buckets=(8,), chunks_in_flight=1, layer_groups=((0, 1), (1, 2)))
    bench.start(request("a", 20))
    whole = mode is TransferMode.WHOLE
    assert bench.worker.shared.pool.count(PageState.IN_FLIGHT) == (0 if whole else 2)
    bench.read_all()
    assert bench.worker.shared.pool.count(PageState.IN_FLIGHT) == 5


@pytest.mark.parametrize("mode", TransferMode)
def test_the_first_token_that_is_the_only_one_asked_for_ships_nothing_in_any_mode(mode):
    bench = prefilling(transfer=mode, prefill_buckets=(8,))
    bench.start(request("one", 20, max_tokens=1))
    bench.read_all()
    assert not bench.shipped and bench.said(Ended) and bench.free_pages == 64


@pytest.mark.parametrize("each", [stopping("s", after=1), request("one", max_tokens=1)], ids=["stop", "one token"])
def test_a_request_that_ends_with_its_first_token_ships_nothing(each):
    bench = prefilling()
    bench.start(each)
    bench.read()
    assert not bench.made(ShipKV) and len(bench.said(Ended)) == 1 and bench.free_pages == 64


@pytest.mark.parametrize("reads", [0, 1, 2, 3])
def test_a_cancelled_prompt_returns_every_page(reads):
    bench = prefilling()
    bench.start(request("long", 40))
    for _ in range(reads):
        bench.read()
    bench.abort("long")
    assert bench.free_pages == 64
    bench.read_all()
    assert bench.worker.idle and not bench.worker.prefill.waiting_tokens


def test_a_prompt_said_twice_is_computed_once():
    bench, each = prefilling(), request("a")
    bench.start(each)
    bench.start(each)
    bench.read_all()
    assert len(bench.prefill_runs) == 1


def test_a_failed_chunk_ends_its_prompts_and_no_others():
    bench = prefilling(chunks_in_flight=2)
    bench.start(request("a"))
    bench.start(request("b"))
    bench.pending.popleft()
    bench.fail(bench.prefill_runs[0].plan.step_id)
    assert [message.attempt.request_id for message in bench.said(Abort)] == ["a"]
    bench.read_all()
    assert [transfer.transfer.attempt.request_id for transfer in bench.made(ShipKV)] == ["b"]


def test_a_colocated_prompt_computes_in_the_pages_of_its_reservation():
    bench, each = Bench(worker("both", Role.COLOCATED)), request("a", 9, max_tokens=6)
    assert bench.reserve(each)
    (reserved,) = bench.said(Reserved)
    bench.start(each, decode=bench.worker.config.worker)
    (run,) = bench.prefill_runs
    assert run.plan.prefill.chunks[0].pages == reserved.pages[:3]
    bench.read_all()
    assert tokens_of(bench, "a") == definition(each) and bench.free_pages == 64 and not bench.made(ShipKV)


def test_a_colocated_prompt_without_its_reservation_does_not_start():
    bench, each = Bench(worker("both", Role.COLOCATED)), request("a")
    bench.reserve(each)
    bench.abort("a")
    bench.start(each, decode=bench.worker.config.worker)
    assert not bench.prefill_runs and bench.worker.idle


def test_when_every_sequence_waits_for_pages_prompts_go_on_without_steps_between():
    sizes = {"num_pages": 8, "reserve_tokens": 1, "prefill_buckets": (8,), "chunks_in_flight": 1}
    bench = Bench(worker("both", Role.COLOCATED, **sizes))
    first, second = request("first", 4, max_tokens=20), request("second", 18, max_tokens=2, arrival_s=1.0)
    assert bench.reserve(first)
    bench.start(first, decode=bench.worker.config.worker)
    bench.read()
    assert bench.reserve(second)
    bench.read_all()
    assert not bench.said(Ended), "the first was to wait for a page of the second's reservation"
    bench.start(second, decode=bench.worker.config.worker)
    bench.read_all()
    assert tokens_of(bench, "first") == definition(first) and tokens_of(bench, "second") == definition(second)[:1]
    assert [message.attempt.request_id for message in bench.said(Preempted)] == ["second"]
