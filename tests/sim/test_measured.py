"""Costs read off a profile, and devices that share a machine: cells as timed, lines between, sane beyond."""

from dataclasses import replace

import numpy as np
import pytest

from jdisagg.commands.sim import main
from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Checked, Host, TransferTime, read_profile
from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import TransferMode, bucket
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.measured import PiecewiseFit, ProfileCost, SurfaceFit, cluster_spec_of, transfer_line_of
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.shared import SharedCluster, simulated
from jdisagg.sim.traces import Trace, poisson
from tests.sim.profiles import BUCKETS, BYTES_PER_S, LATENCY_S, PAGE_BYTES, chunk_s, profile, step_s

MESHES = ["prefill:tp1,decode:tp1", "colocated:2xtp1", "prefill:2xtp1,decode:pp2tp1"]
SLOW = {"prefill": {"prefill": 1.0, "decode": 0.5}, "decode": {"prefill": 0.25, "decode": 1.0}}


def cost(mesh: str = MESHES[0], worker: str = "decode-0", **given) -> ProfileCost:
    found = cluster_spec_of(profile(mesh, **given), MeshSpec.parse(mesh)).costs[WorkerId(worker)]
    assert isinstance(found, ProfileCost)
    return found


def chunks(*spans: tuple[int, int]) -> PrefillChunks:
    made = [PrefillChunk(RequestId("r"), (0,) * (b - a), a, (), True, SamplingParams()) for a, b in spans]
    tokens = sum(b - a for a, b in spans)
    return PrefillChunks(tuple(made), bucket(min(tokens, BUCKETS[-1]), BUCKETS), 32)


def step(batch: int) -> DecodeRows:
    return DecodeRows(0, tuple(range(batch)), 32)


def run(mesh: str, work: Trace, **given) -> Outcome:
    hosted = simulated(cluster_spec_of(profile(mesh, **given), MeshSpec.parse(mesh)))
    outcome = hosted.run(work)
    hosted.check_all_ended()
    return outcome


def trace(requests: int = 40, rate_rps: float = 20.0) -> Trace:
    draw = np.random.default_rng(1)
    return poisson(Trace(np.zeros(requests), draw.integers(1, 60, requests), draw.integers(1, 30, requests)), rate_rps)


# ---------------------------------------------------------------------- costs


@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (8, 100), (5, 25), (9, 0), (12, 70), (16, 300)])
def test_a_chunk_takes_what_its_bucket_its_tokens_and_its_context_say(tokens, context):
    plan = chunks((context, context + tokens))
    expected = chunk_s(plan.bucket_tokens, tokens, context)
    assert cost(worker="prefill-0").prefill_s(plan) == pytest.approx(expected)


def test_prefill_stages_divide_the_chunks_that_were_timed_on_one_mesh():
    staged, one = (run(mesh, Trace(np.zeros(1), np.full(1, 64), np.full(1, 2))) for mesh in
                   ("prefill:pp2,decode:tp1", "prefill:tp1,decode:tp1"))  # fmt: skip
    assert float(staged.values("TTFT").mean()) < 0.75 * float(one.values("TTFT").mean())


def test_packed_prompts_count_as_one_with_as_many_pairs():
    """Two of 4 tokens, 100 tokens in: 2 x (104^2 - 100^2) / 2 pairs, as 8 tokens at a context of 98."""
    assert cost(worker="prefill-0").prefill_s(chunks((100, 104), (100, 104))) == pytest.approx(chunk_s(8, 8, 98))


@pytest.mark.parametrize(("batch", "context"), [(1, 4), (4, 64), (3, 20), (2, 100), (8, 300)])
def test_a_step_takes_what_its_batch_and_its_context_say_beyond_the_table_too(batch, context):
    assert cost().decode_s(step(batch), batch * context) == pytest.approx(step_s(batch, context))


def test_who_joins_a_step_and_the_host_are_paid_for():
    joined = replace(step(1), admit=("somebody",))
    with_host = cost(host=Host(1e-3, 2e-3, 0.0))
    assert with_host.decode_s(joined, 4) == pytest.approx(step_s(1, 4) + 2e-3 + 5e-4)


@pytest.mark.parametrize(("batch", "context"), [(1, 20), (4, 64), (8, 200)])
def test_a_mixed_step_pays_its_chunk_a_row_for_each_sequence_and_the_kv_that_these_read(batch, context):
    both = cost("colocated:2xtp1", "colocated-0")
    plan, rows = chunks((0, 8)), step(batch)
    read_s = both.decode_s(rows, batch * context) - both.decode_s(rows, 0)
    expected = both.prefill_s(plan) * (1 + batch / 8) + read_s
    assert both.mixed_s(plan, rows, batch * context) == pytest.approx(expected) and read_s > 0


def test_nothing_is_faster_than_the_least_that_was_timed_and_nothing_falls_beyond_the_table():
    noisy = SurfaceFit([(1, 10, 5.0), (1, 20, 4.0), (2, 10, 3.0), (2, 20, 6.0)])
    assert noisy.at(1, 1000) == 4.0
    assert noisy.at(9, 10) == 3.0
    assert PiecewiseFit([(1.0, 2.0), (3.0, 4.0), (3.0, 6.0)]).at(3.0) == 5.0


def test_parts_of_kv_are_whole_pages_of_their_own_layers():
    transfer = KVTransfer(
        Attempt(RequestId("r"), 1), WorkerId("p"), WorkerId("d"), (1, 2, 3), (4, 5, 6), 9, layers=(0, 2)
    )
    assert cost().transfer_bytes(transfer) == 3 * PAGE_BYTES / 2
    assert cost().transfer_bytes(replace(transfer, layers=None)) == 3 * PAGE_BYTES


def test_the_way_is_a_line_through_the_transfers():
    way = transfer_line_of(profile().transfers)
    assert way.latency_s == pytest.approx(LATENCY_S) and way.bytes_per_s == pytest.approx(BYTES_PER_S)
    assert transfer_line_of(()) == (transfer_line_of([], "int8"))
    falling = [TransferTime("chunk", "raw", 1, size, seconds, 0.0) for size, seconds in ((10, 3.0), (20, 2.0))]
    assert transfer_line_of(falling).bytes_per_s is None and transfer_line_of(falling).latency_s == 2.5


# ---------------------------------------------------------------------- fleets


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("slowdown", [{}, SLOW])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_request_ends_on_a_profiled_fleet(mesh, slowdown, mode):
    work = trace()
    hosted = simulated(cluster_spec_of(profile(mesh, slowdown=slowdown), MeshSpec.parse(mesh), mode))
    outcome = hosted.run(work)
    hosted.check_all_ended()
    assert isinstance(hosted, SharedCluster) == bool(slowdown)
    assert [record.emitted_tokens for record in outcome.records] == work.output_tokens.tolist()


def test_one_profile_answers_for_other_numbers_and_roles_of_workers_and_says_what_it_lacks():
    cluster_spec = cluster_spec_of(profile(), MeshSpec.parse("colocated:3xtp1"))
    assert [config.worker for config in cluster_spec.workers] == ["colocated-0", "colocated-1", "colocated-2"]
    assert {config.role for config in cluster_spec.workers} == {"colocated"}
    with pytest.raises(ConfigError, match=r"decode-0 is decode:pp2tp1; the profile is of decode:pp1tp1"):
        cluster_spec_of(profile(), MeshSpec.parse("prefill:tp1,decode:pp2"))


def test_a_profile_is_read_as_it_was_written_and_other_files_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    made = profile(slowdown=SLOW).with_check(Checked("today", "few requests", {"ttft_s": -0.1}, 0.1))
    made.save(path)
    assert read_profile(path) == made
    for text in ("hello", "[]", '{"version": 1}', '{"version": 99}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            read_profile(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "none.json")


# ---------------------------------------------------------------------- devices that share a machine


@pytest.mark.parametrize("mesh", [*MESHES, "colocated:pp2tp1"])
def test_devices_that_do_not_hold_each_other_up_are_the_clusters_own(mesh):
    """The same times, up to the last bits of sums."""
    found = cluster_spec_of(profile(mesh), MeshSpec.parse(mesh), TransferMode.LAYER)
    given = found.workers, found.costs
    ends = [
        [(each.first_s, each.end_s) for each in hosted.run(trace()).records]
        for hosted in (Cluster(*given), SharedCluster(*given, slowdown={}))
    ]
    assert np.array(ends[1]) == pytest.approx(np.array(ends[0]), rel=1e-9)


def test_two_prompts_on_two_workers_take_as_much_longer_as_was_measured():
    pair, one = Trace(np.zeros(2), np.full(2, 8), np.ones(2, int)), Trace(np.zeros(1), np.full(1, 8), np.ones(1, int))
    together, alone = (run(MESHES[1], work, slowdown=SLOW).records[0].ttft_s for work in (pair, one))
    host_s = 3 * 1e-5  # words that neither waits for longer
    assert together - host_s == pytest.approx(2 * (alone - host_s), rel=0.02)


def test_a_step_beside_a_prompt_is_held_up_only_as_long_as_the_prompt_is_there():
    """A long answer, and a prompt that arrives while it is made."""
    lone = Trace(np.zeros(1), np.array([8]), np.array([60]))
    both = Trace(np.array([0.0, 0.08]), np.array([8, 16]), np.array([60, 1]))
    before, after = (run(MESHES[0], work, slowdown=SLOW).records[0].end_s for work in (lone, both))
    assert after - before == pytest.approx(chunk_s(16, 16, 0) * 1.5 * (1 - 1 / 1.25), rel=0.05)


def test_two_stages_of_one_core_gain_nothing():
    work = Trace(np.zeros(2), np.array([4, 4]), np.array([60, 60]))
    mesh = "prefill:tp1,decode:pp2"
    shared, apart = (run(mesh, work, slowdown=slow).span_s for slow in ({"decode": {"decode": 1.0}}, {}))
    assert shared == pytest.approx(2 * apart, rel=0.1)


# ---------------------------------------------------------------------- the command


def test_the_command_is_priced_by_a_profile_and_says_how_far_it_was_off(tmp_path, capsys):
    made, lengths = tmp_path / "profile.json", tmp_path / "lengths.csv"
    profile(slowdown=SLOW).with_check(Checked("2026-01-02", "80 requests", {"ttft_s": -0.1}, 0.1)).save(made)
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "20,10\n40,20\n" * 10)
    asked = ["", f"--trace=lengths:{lengths}", "--rate=10", "--mesh=prefill:tp1,decode:2xtp1", f"--cost=profile:{made}"]
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "20 of 20 requests served" in said and "last checked 2026-01-02 (80 requests): MAPE 10.0%" in said
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n200,10\n")
    assert main(asked) == 2
    assert "--max_model_len=128 leaves the longer ones out" in capsys.readouterr().err
    assert main([*asked[:-1], "--cost=guess"]) == 2
    assert "or profile:FILE" in capsys.readouterr().err
