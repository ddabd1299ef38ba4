"""`python -m jdisagg profile` on real machines of a tiny model: a whole table, which simulations are priced by."""

from __future__ import annotations

import numpy as np
import pytest

from jdisagg.commands import profile
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Profile, read_profile
from jdisagg.sim.measured import cluster_spec_of
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace, poisson
from tests.fixtures import conformance

FAMILY = conformance.load("llama3")
SIZES = ["--max_model_len=128", "--max_num_batched_tokens=64", "--prefill_buckets=64", "--table_buckets=128"]
ASKED = [f"--model={FAMILY.folder}", "--platform=cpu", "--max_num_seqs=4", "--page_size=16", *SIZES]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two stages, so that all there is to time is timed."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    mesh = "--mesh=prefill:tp1,decode:pp2"
    assert profile.main(["jdisagg profile", *ASKED, mesh, f"--output={path}", "--rounds=1"]) == 0
    return path


@pytest.fixture(scope="module")
def table(written) -> Profile:
    return read_profile(written)


@pytest.mark.slow
def test_the_table_has_every_kind_of_program_and_names_the_machine(table):
    prefill, decode = sorted(table.pools, key=lambda each: each.config.role, reverse=True)
    assert {(each.tokens, each.context) for each in prefill.prefill} >= {(1, 0), (64, 0), (64, 64), (1, 127)}
    assert {each.batch for each in decode.decode} == {1, 2} and (prefill.decode, decode.prefill) == ((), ())
    assert all(len(each.stages) == 2 and min(each.stages) > 0 for each in decode.decode)
    assert {each.mode for each in table.transfers} == {"chunk", "layer"}
    assert set(table.slowdown["decode"]) == {"prefill", "decode"} and set(table.slowdown["prefill"]) == {"decode"}
    times = [each.seconds for pool in table.pools for kind in (pool.prefill, pool.decode) for each in kind]
    assert min(times + [each.seconds for each in table.transfers]) > 0
    programs = [{each.kind for each in pool.programs} for pool in (prefill, decode)]
    draws = {f"draw first{kind}" for kind in ("", " greedy", " logprobs", " mask")}
    assert programs[0] == {"prefill", "head", "score", *draws}
    assert programs[1] >= {"decode", "draw", "draw greedy", "draw steer"} and {
        each.stage for each in decode.programs
    } == {0, 1}
    assert min(each.seconds for pool in table.pools for each in pool.programs) > 0
    assert "cores" in table.machine and table.repeats == 1 and table.host.message_s > 0


@pytest.mark.slow
def test_a_rings_dispatches_are_timed_and_price_a_simulation(tmp_path):
    """Of one turn and of the most; it has no stages to be timed alone."""
    path, mesh = tmp_path / "ring.json", "prefill:tp1,decode:ring2"
    asked = [*ASKED, f"--mesh={mesh}", "--multi_step=4", f"--output={path}", "--rounds=1"]
    assert profile.main(["jdisagg profile", *asked]) == 0
    made = read_profile(path)
    (decode,) = (each for each in made.pools if each.config.decode.n == 2)
    assert {each.turns for each in decode.decode} == {1, 4} and {each.stages for each in decode.decode} == {()}
    assert {each.batch for each in decode.decode} == {1, 2, 4} and min(each.seconds for each in decode.decode) > 0
    assert {each.kind for each in decode.programs} >= {"ring plain", "ring drawn", "ring scored", "draw steer"}
    cluster = simulated(cluster_spec_of(made, MeshSpec.parse("prefill:tp1,decode:2xring2")))
    trace = poisson(Trace(np.zeros(8), np.full(8, 40), np.full(8, 21)), 20.0)
    assert [each.output_tokens for each in cluster.run(trace).served] == [21] * 8


@pytest.mark.slow
def test_part_sizes_are_bytes_as_they_travel(table):
    """Whole pages of all layers, and digests of 8 bytes or so a page beside them."""
    for each in table.transfers:
        if each.mode == "chunk":
            pages_bytes = each.pages * 16 * table.kv_bytes_per_token
            assert pages_bytes <= each.size_bytes < pages_bytes * 1.2


@pytest.mark.slow
def test_a_simulation_of_more_workers_is_priced_by_it(table):
    work = poisson(Trace(np.zeros(20), np.full(20, 40), np.full(20, 10)), 50.0)
    hosted = simulated(cluster_spec_of(table, MeshSpec.parse("prefill:2xtp1,decode:pp2")))
    outcome = hosted.run(work)
    hosted.check_all_ended()
    assert len(outcome.served) == 20 and outcome.values("TPOT").min() > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output=/nowhere/profile.json"], "--output=/nowhere/profile.json: No such file"),
        (["--model=/nowhere", "--output=/dev/null"], "there is no config.json"),
        (["--roundz=2"], "did you mean"),
        (["--rounds=0"], "rounds"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert profile.main(["jdisagg profile", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jdisagg profile: ") and said in line


def test_a_run_that_cannot_be_leaves_no_file(tmp_path):
    assert profile.main(["jdisagg profile", "--model=/nowhere", f"--output={tmp_path / 'profile.json'}"]) == 2
    assert not [*tmp_path.iterdir()]


def test_help_lists_its_own_flags_and_the_settings(capsys):
    assert profile.main(["jdisagg profile", "--help"]) == 0
    on_progress = capsys.readouterr().out
    assert "--rounds" in on_progress and "--max_num_batched_tokens" in on_progress
