"""The kernels' benchmark on tiny shapes: it runs here as it will on an accelerator, and peers do the same work."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import kernels, kernels_cases, kernels_ours, kernels_peers
from benchmarks.kernels_timing import Contestant, race

SIZES = kernels_ours.Sizes.of("cpu", tiny=True)
TINY = kernels_cases.tiny_cases()


def answer(contestant):
    return np.asarray(jax.tree.leaves(contestant.run())[0], np.float32)


@pytest.mark.parametrize("case", [c for c in TINY if c.held], ids=lambda c: f"{c.operation} {c.name}")
def test_peers_answer_what_we_answer(case):
    contest = kernels_ours.contest_of(case, SIZES, "cpu")
    ours, ran = answer(contest.ours), 0
    for maker in kernels_peers.peers_of(case).values():
        try:
            peer = maker(kernels_peers.Ground(case, contest.held, SIZES, "cpu"))
        except ImportError:
            continue  # no torch here
        if peer is not None:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # others' code
                np.testing.assert_allclose(answer(peer).reshape(ours.shape), ours, atol=2e-3)
            ran += 1
    assert ran >= 2 or case.name == "packed"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_tiny_case_gives_a_row(platform):
    """On "gpu" the floors are an accelerator's; the kernels are those of the device that is really there."""
    for case in (replace(case, with_peers=False) for case in TINY):
        row = kernels.measure(case, SIZES, platform, rounds=1)
        assert row.best_ms > 0 and row.floor_ms > 0 and row.share == pytest.approx(row.floor_ms / row.best_ms)
        assert row.verdict == ""


def test_a_floor_counts_each_byte_once():
    case = next(c for c in TINY if c.operation == "paged_attention")
    contest = kernels_ours.contest_of(case, SIZES, "gpu")
    kv, queries = 2 * 64 * 2 * 2 * 64 * 4, 2 * 2 * 4 * 64 * 4  # slots, tokens, Hkv, K and V, D, f32; q and result
    assert contest.floor_share * 2 * SIZES.copy_bytes == kv + queries
    raw, small = (c for c in TINY if c.operation == "pack_kv_pages")
    plain = 2 * 64 * 2 * 2 * 64 * 4
    assert kernels_ours.wire_bytes(raw, SIZES.dtype) == 2 * plain
    assert kernels_ours.wire_bytes(small, SIZES.dtype) == plain + plain // 4 + plain // 64
    whole = next(c for c in TINY if c.name == "1 prompt of 128")
    assert kernels_ours.prefill_flops(whole) == 4 * 64 * 4 * (128 * 129 / 2)


def test_targets_and_verdicts_are_those_of_the_promise():
    accelerator = kernels_cases.accelerator_cases()
    targets = {(len(c.held), c.held[0]): c.target for c in accelerator if c.operation == "paged_attention"}
    assert targets[64, 4096] == targets[256, 32768] == 0.85 and targets[1, 32768] == 0.6 and targets[8, 4096] is None
    assert all(c.target == 0.8 for c in accelerator if c.operation.endswith("pack_kv_pages"))
    assert all(c.target == 0.5 for c in kernels_cases.cpu_cases() if c.name == "8 slots x 512 tokens")
    row = kernels.Row("x", "y", 32, False, 2.0, 2.0, 1.7, 0.85, 0.85, 0.85)
    assert row.verdict == "met" and replace(row, share=0.849).verdict == "missed"


def test_contestants_take_turns_and_short_ones_run_in_bursts():
    order = []
    slow, quick = (Contestant(name, lambda name=name: order.append(name), 2) for name in ("slow", "quick"))
    times = race([slow, quick], rounds=3)
    assert len(times) == 2 and all(each.best_s <= each.median_s for each in times)
    turns = [name for name, last in zip(order, [None, *order], strict=False) if name != last]
    assert turns == ["slow", "quick"] * 4  # the warm-up is a turn


def test_the_command_writes_what_it_measured_and_on_what(tmp_path):
    output = tmp_path / "kernels_tiny.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels",
        "--suite=tiny",
        "--rounds=1",
        "--only=write",
        "--output",
        output,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert record["device"]["platform"] == "cpu" and record["device"]["name"]
    assert record["versions"]["jax"] == jax.__version__ and "--only=write" in record["command"]
    assert [row["operation"] for row in record["rows"]] == ["write_kv_pages"]


def test_a_pattern_that_fits_nothing_is_one_line(capsys):
    assert kernels.main(["--only=no such case"]) == 2
    assert "'no such case' fits none" in capsys.readouterr().err
