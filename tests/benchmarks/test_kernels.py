"""The kernels' benchmark on tiny shapes: it runs here as it will on an accelerator, and peers do the same work."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import kernels, kernels_cases, kernels_contests, kernels_ours, kernels_peers, kernels_products
from benchmarks.kernels_contests import contest_of
from benchmarks.kernels_floors import Sizes
from benchmarks.kernels_timing import Contestant, race

SIZES = Sizes.of("cpu", tiny=True)
TINY = kernels_cases.tiny_cases()


def answer(contestant):
    return np.asarray(jax.tree.leaves(contestant.run())[0], np.float32)


@pytest.mark.parametrize("case", [c for c in TINY if c.held and c.with_peers], ids=lambda c: f"{c.operation} {c.name}")
def test_peers_answer_what_we_answer(case):
    contest = contest_of(case, SIZES, "cpu")
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
    """On "gpu" the floors are an accelerator's, other than a CPU's of decode alone; the kernels are those of the device
    that is really there."""
    cases = [case for case in TINY if platform == "cpu" or (case.operation == "paged_attention" and case.with_peers)]
    for case in (replace(case, with_peers=False) for case in cases):
        row = kernels.measure(case, SIZES, platform, rounds=1)
        assert row.best_ms > 0 and row.floor_ms > 0 and row.share == pytest.approx(row.floor_ms / row.best_ms)
        assert row.verdict == ""


def test_a_floor_counts_each_byte_once():
    case = next(c for c in TINY if c.operation == "paged_attention")
    contest = contest_of(case, SIZES, "gpu")
    kv, queries = 2 * 64 * 2 * 2 * 64 * 4, 2 * 2 * 4 * 64 * 4  # slots, tokens, Hkv, K and V, D, f32; q and result
    assert contest.floor_share * 2 * SIZES.copy_bytes == kv + queries
    latents, quantised, drafted = (
        contest_of(next(c for c in TINY if c.operation == "paged_attention" and c.label.endswith(end)), SIZES, "gpu")
        for end in (
            "slots x 64 tokens, 4 heads over latents of 80, pages of 16",
            "int8 pages, 4/2 heads x 64, pages of 32",
            "slots x 64 tokens, 2 rows each, 4/2 heads x 64, pages of 32",
        )
    )
    assert latents.floor_share * 2 * SIZES.copy_bytes == 2 * 64 * 80 * 4 + 2 * 2 * 4 * 80 * 4
    assert quantised.floor_share * 2 * SIZES.copy_bytes == 2 * 64 * 2 * 2 * (64 + 4) + queries
    assert drafted.floor_share * 2 * SIZES.copy_bytes == kv + 2 * queries  # pages once, whatever rows a slot has
    raw, small = (c for c in TINY if c.operation == "pack_kv_pages")
    plain = 2 * 64 * 2 * 2 * 64 * 4
    assert kernels_ours.wire_bytes(raw, SIZES.dtype) == 2 * plain
    assert kernels_ours.wire_bytes(small, SIZES.dtype) == plain + plain // 4 + plain // 64
    whole = next(c for c in TINY if c.name == "1 prompt of 128")
    assert kernels_ours.prefill_flops(whole) == 4 * 64 * 4 * (128 * 129 / 2)


def test_rows_of_a_draft_see_as_many_tokens_as_lie_before_them():
    case = kernels_cases.decode(2, 64, kernels_cases.LAPTOP, drafted=3)
    assert kernels_ours.seen_tokens(case) == [62, 63, 64, 62, 63, 64]


def test_products_are_held_to_their_matrices_where_rows_are_few():
    int8 = next(c for c in TINY if c.operation == "product" and c.weights == "int8")
    few = contest_of(int8, SIZES, "cpu")
    assert few.floor.name == "copy" and few.floor_share * 2 * SIZES.copy_bytes == 64 * 64 + 2 * 4 * 64 * 4
    many = contest_of(replace(int8, tokens=300), SIZES, "cpu")
    assert many.floor.name == "matmul" and many.floor_share == 2 * 300 * 64 * 64 / (2 * SIZES.matmul**3)


def test_rows_are_dealt_to_experts_with_none_left_over():
    case = kernels_cases.grouped("", 1024, (128, 8, 8))
    dealt = kernels_products.dealt_rows(case)
    assert dealt.sum() == 1024 and len(dealt) == 128 and dealt.max() > dealt.min()


def test_the_suites_of_an_accelerator_hold_what_the_first_lacks():
    cases = {name: suite() for name, suite in kernels_cases.SUITES.items() if name != "tiny"}
    assert {c.operation for c in cases["latents"]} == {"paged_attention", "prefill_attention"}
    assert all(c.value_size for c in cases["latents"]) and {c.pool for c in cases["quantised"]} == {"int8", "fp8"}
    assert {c.drafted for c in cases["drafts"]} == {2, 4, 8} and any(c.pool for c in cases["drafts"])
    assert {c.weights for c in cases["products"]} == {"bfloat16", "int8", "fp8"}
    assert all(any(c.target for c in suite) and any(c.headline for c in suite) for suite in cases.values())


def test_a_case_that_fails_is_named_and_ends_no_other(monkeypatch, tmp_path, capsys):
    def broken(case, sizes, platform):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(kernels_contests, "MAKERS", {**kernels_contests.MAKERS, "write_kv_pages": broken})
    output = tmp_path / "kernels.json"
    asked = ["--suite=tiny", "--rounds=1", "--only=write|64 tokens x 2 layers, raw", f"--output={output}"]
    assert kernels.main(asked) == 1
    told = capsys.readouterr()
    assert "failed: write_kv_pages 8 tokens" in told.err and "RuntimeError: out of memory" in told.err
    record = json.loads(output.read_text())
    assert [row["operation"] for row in record["rows"]] == ["pack_kv_pages", "unpack_kv_pages"]
    assert len(record["failed"]) == 1


def test_cases_that_no_time_is_left_for_are_named(capsys):
    assert kernels.main(["--suite=tiny", "--only=write", "--limit_s=-1"]) == 1
    assert "no time left of -1 s" in capsys.readouterr().err


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
