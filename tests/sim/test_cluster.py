"""The actors that serve, under a virtual clock: requests end once, pages come back, and times are the costs' own."""

import csv
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from jdisagg.core.ledger import Mark
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import TransferMode
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.cluster_spec import FREE_LINK, cluster_spec, longest, plain_settings, published
from jdisagg.sim.fast_forward import SimulatedSequence
from jdisagg.sim.outcome import Outcome, write_csv
from jdisagg.sim.simulation import SpanLog, WorkKind
from jdisagg.sim.traces import Trace, closed_loop, poisson

MESHES = ["prefill:tp2,decode:tp1", "prefill:2xtp1,decode:2xpp2tp1", "colocated:2xtp1", "colocated:pp2tp1"]


def trace(requests: int = 60, rate_rps: float = 4.0, seed: int = 0) -> Trace:
    draw = np.random.default_rng(seed)
    inputs, outputs = draw.integers(1, 1200, requests), draw.integers(1, 80, requests)
    return poisson(Trace(np.zeros(requests), inputs, outputs), rate_rps, seed)


def one(inputs: int, outputs: int) -> Trace:
    return Trace(np.zeros(1), np.array([inputs]), np.array([outputs]))


def cluster(mesh: str, work: Trace, port_bytes_per_s: float = FREE_LINK, message_s: float = 0.0, **sizes) -> Cluster:
    fields = {name: sizes.pop(name) for name in ("chunks_in_flight", "decode_steps_per_chunk") if name in sizes}
    settings = plain_settings(longest(work), **sizes)
    given = cluster_spec(MeshSpec.parse(mesh), settings, published("opt-13b"), port_bytes_per_s, **fields)
    return Cluster(given.workers, given.costs, given.links, message_s=message_s)


def run(mesh: str, work: Trace, *args, **sizes) -> Outcome:
    hosted = cluster(mesh, work, *args, **sizes)
    outcome = hosted.run(work)
    hosted.check_all_ended()
    return outcome


def signature(outcome: Outcome) -> list:
    return [(r.request_id, r.first_s, r.last_s, r.end_s, r.prefill_worker, r.decode_worker) for r in outcome.records]


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("mesh", MESHES)
def test_every_request_ends_once_with_the_tokens_it_asked_for_and_all_pages_come_back(mesh, mode):
    work = trace()
    outcome = run(mesh, work, 5e9, transfer=mode, max_num_batched_tokens=256)
    assert [r.emitted_tokens for r in outcome.records] == work.output_tokens.tolist()
    assert [r.input_tokens for r in outcome.records] == work.input_tokens.tolist()
    assert {r.reason for r in outcome.records} == {"length"}


@pytest.mark.parametrize("mesh", MESHES)
def test_pages_that_run_out_preempt_and_nothing_is_lost(mesh):
    """Pages for a few sequences, of which only the first tokens are reserved."""
    work = poisson(Trace(np.zeros(30), np.full(30, 50), np.full(30, 150)), 50.0)
    settings = plain_settings(longest(work), reserve_tokens=1)
    given = cluster_spec(MeshSpec.parse(mesh), settings, published("opt-13b"), FREE_LINK)
    workers = [replace(config, num_pages=40) for config in given.workers]
    hosted = Cluster(workers, given.costs, given.links)
    outcome = hosted.run(work)
    hosted.check_all_ended()
    assert [r.emitted_tokens for r in outcome.records] == work.output_tokens.tolist()
    parts = [r.ledger.marks for r in outcome.records if r.ledger is not None]
    assert any(mark == "requeued" for marks in parts for mark, _ in marks), (
        "nobody was preempted: the pool is too large"
    )


def test_equal_inputs_give_equal_outcomes_and_other_seeds_do_not():
    runs = [run(MESHES[1], trace(seed=seed), 5e9) for seed in (3, 3, 4)]
    assert signature(runs[0]) == signature(runs[1]) != signature(runs[2])
    assert runs[0].events == runs[1].events


def test_a_lone_requests_times_are_its_costs():
    """OPT-13B at TP 1: a prefill of 1000 tokens, then 9 steps whose context grows by one."""
    record = run(MESHES[2].replace("2x", ""), one(1000, 10)).records[0]
    steps = [(19.934702624895458 + 0.0006269356524350583 * (1001 + i) + 0.03850697740828398) / 1e3 for i in range(9)]
    assert record.ttft_s == pytest.approx((18.10254647486372 + 101.9122572698738 + 7.122264314252114) / 1e3)
    assert record.latency_s - record.ttft_s == pytest.approx(sum(steps))
    assert record.tpot_s == pytest.approx(sum(steps) / 9)


def test_the_ledgers_parts_sum_to_the_latency_and_the_transfer_is_bytes_over_bandwidth():
    outcome = run(MESHES[0], one(1000, 10), 1e9, transfer=TransferMode.WHOLE)
    record = outcome.records[0]
    parts = outcome.parts_s()
    assert sum(parts.values()) == pytest.approx(record.latency_s)
    assert parts["transfer"] == pytest.approx(1000 * 2 * 40 * 5120 * 2 / 1e9)


def test_prompts_that_leave_together_share_the_way_out():
    """The second is computed well before the first has left."""
    work = Trace(np.zeros(2), np.array([900, 900]), np.array([2, 2]))
    alone_s = run(MESHES[0], one(900, 2), 1e9, transfer=TransferMode.WHOLE).parts_s()["transfer"]
    outcome = run(MESHES[0], work, 1e9, transfer=TransferMode.WHOLE, chunks_in_flight=1)
    marks = [dict(record.ledger.marks) for record in outcome.records if record.ledger is not None]
    began_ns, ended_ns = min(each[Mark.FIRST_TOKEN] for each in marks), max(each[Mark.COMMITTED] for each in marks)
    assert (ended_ns - began_ns) / 1e9 == pytest.approx(2 * alone_s)


def test_streamed_chunks_hide_most_of_the_transfer():
    whole, chunk = (
        run(MESHES[0], one(1800, 2), 5e9, transfer=mode, max_num_batched_tokens=256).parts_s()["transfer"]
        for mode in (TransferMode.WHOLE, TransferMode.CHUNK)
    )
    assert chunk < whole / 3


def test_two_stages_step_two_microbatches_in_the_time_of_one():
    work = Trace(np.zeros(2), np.array([4, 4]), np.array([60, 60]))
    alone, both = (run("colocated:pp2tp1", each, steps_in_flight=1).span_s for each in (one(4, 60), work))
    assert both < 1.1 * alone


def test_steps_dispatched_ahead_still_wait_for_the_token_that_they_feed():
    ends = [run("colocated:pp2tp1", one(4, 60), steps_in_flight=ahead).span_s for ahead in (1, 2)]
    assert ends[0] == pytest.approx(ends[1])


def test_attainment_counts_whoever_met_both_objectives():
    outcome = run(MESHES[0], trace())
    ttft, tpot = outcome.values("TTFT"), outcome.values("TPOT")
    assert outcome.attainment(1e9, 1e9) == 1.0 and outcome.attainment(0.0, 0.0) == 0.0
    assert outcome.attainment(float(np.median(ttft)), 1e9) == pytest.approx(0.5, abs=0.02)
    assert 0 < tpot.min() < tpot.max() < 1


def test_the_csv_has_a_row_a_request(tmp_path):
    outcome = run(MESHES[0], trace(5))
    write_csv(outcome, tmp_path / "requests.csv")
    rows = list(csv.DictReader((tmp_path / "requests.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["ttft_s"]) for row in rows] == [record.ttft_s for record in outcome.records]
    parts = [sum(float(value) for key, value in row.items() if key in PART_COLUMNS) for row in rows]
    assert parts == pytest.approx([record.latency_s for record in outcome.records])


PART_COLUMNS = ("queue_s", "reserve_wait_s", "prefill_s", "transfer_s", "first_step_s", "decode_s")


def test_a_sequence_knows_its_length_and_nothing_else():
    whole = SimulatedSequence(10)
    assert len(whole[3:7]) == 4 and len(whole[8:99]) == 2 and len(whole[:0]) == 0
    assert len(whole + whole[:2]) == 12


@pytest.mark.parametrize("mesh", MESHES[:3])
def test_clients_of_a_closed_loop_ask_again_when_they_have_their_answer(mesh):
    work = closed_loop(trace(20), 3)
    hosted = cluster(mesh, work)
    records = sorted(hosted.run(work, clients=3).records, key=lambda record: record.arrival_s)
    hosted.check_all_ended()
    assert [record.arrival_s for record in records[:3]] == [0, 0, 0]
    ends = sorted(record.end_s for record in records)
    assert [record.arrival_s for record in records[3:]] == ends[:17], "each asks at the instant that another ended"


def test_clients_think_before_they_ask_again():
    work = closed_loop(trace(4), 1)
    records = cluster(MESHES[0], work).run(work, clients=1, think_s=2.5).records
    ends = [record.end_s + 2.5 for record in records]
    assert [record.arrival_s for record in records[1:]] == pytest.approx(ends[:-1])


def test_a_log_has_all_work_and_every_change_of_the_pages():
    work, log = trace(20), SpanLog()
    given = cluster_spec(MeshSpec.parse(MESHES[0]), plain_settings(longest(work)), published("opt-13b"), 5e9)
    outcome = Cluster(given.workers, given.costs, given.links, log=log).run(work)
    for name, share in outcome.busy.items():
        worker = WorkerId(name)
        did_s = sum(span.done_s - span.start_s for span in log.of(worker) if span.work is not WorkKind.TRANSFER)
        assert did_s == pytest.approx(share * outcome.span_s)
        curve = log.pages[worker]
        assert curve[-1][1] == 0 and max(pages for _, pages in curve) > 0
        assert all(before[0] < after[0] and before[1] != after[1] for before, after in pairwise(curve))
    assert sum(span.amount for span in log.spans if span.work is WorkKind.PREFILL) == work.input_tokens.sum()
    assert len([span for span in log.spans if span.work is WorkKind.TRANSFER]) >= sum(work.output_tokens > 1)
