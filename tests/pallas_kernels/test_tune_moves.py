"""What moves pages is tuned by whose code runs."""

import runpy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platforms, tune, tuning
from pallas_kernels.arguments import PagedAttentionArgs, PrefillAttentionArgs
from pallas_kernels.tune_moves import MOVES, PACK, UNPACK, WRITE, arrays_of, choices, mover
from pallas_kernels.tuning import MOSAIC


@pytest.mark.parametrize("operation", MOVES)
def test_a_move_is_run_over_and_over_on_its_own_result(operation):
    arrays = arrays_of(operation, 4, 2, 8, 16, "float32")
    rows, pool = arrays[0] + 1, arrays[1] + jnp.arange(arrays[1].shape[0], dtype=jnp.float32).reshape(-1, 1, 1, 1, 1)
    move = mover(operation, {MOSAIC: 0}, interpret=True)
    first, again = (jax.tree.map(np.asarray, move(rows, pool, *arrays[2:])) for _ in range(2))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, other)
    found = {WRITE: lambda: first, PACK: lambda: first.values[0], UNPACK: lambda: first[0][0][arrays[2]]}[operation]()
    wanted = np.asarray(pool)[arrays[2]]
    if operation == WRITE:
        found, wanted = found[arrays[2], :, 0, arrays[3]], np.asarray(rows)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("operation", "dtype"), [(WRITE, "int8"), (PACK, "bfloat16"), (UNPACK, "float8_e4m3fn")])
def test_both_codes_are_tried_where_mosaic_s_can(operation, dtype):
    assert list(choices(operation, *arrays_of(operation, 4, 8, 16, 128, dtype)[:2])) == [{}, {MOSAIC: 1}, {MOSAIC: 0}]
    assert list(choices(operation, *arrays_of(operation, 4, 1, 1, 20, dtype)[:2])) == [{}]


def test_gpus_have_moves_to_tune_and_tpus_none():
    named = {moves: {work.operation for work in tune.works_of(["small"], [8], 64, ["bfloat16/int8"], moves=moves)}
             for moves in (False, True)}  # fmt: skip
    assert named[True] - named[False] == set(MOVES)


def test_a_measured_choice_says_whose_code_runs(monkeypatch):
    rows, pool = arrays_of(WRITE, 4, 8, 16, 128, "bfloat16")[:2]
    monkeypatch.setattr(platforms, "gpu_generation", lambda: platforms.HOPPER)
    assert platforms.takes_mosaic(WRITE, rows, pool)
    found: dict[str, Any] = {MOSAIC: 0}
    monkeypatch.setattr(platforms, "tuned", lambda *_: found)
    assert not platforms.takes_mosaic(WRITE, rows, pool)


def test_latents_are_tuned_by_both_codes():
    decode, prefill = tune.works_of(["deepseek_v3_tp8"], [2], 70, ["bfloat16/bfloat16"], moves=True)
    whose = [{bool(each.get("mosaic")) for each in tune.candidates("gpu", work)} for work in (decode, prefill)]
    assert whose == [{True, False}] * 2
    assert tune.arguments_of(decode)[1].shape[2:] == (1, 64, 576)


def test_a_choice_is_looked_up_by_slots_whatever_rows_each_has(monkeypatch):
    q, pool = jnp.zeros((8, 8, 128), "bfloat16"), jnp.zeros((9, 2, 2, 16, 128), "bfloat16")
    monkeypatch.setattr(platforms, "gpu_generation", lambda: platforms.HOPPER)
    of_two_slots = tuple(tuning.key_of("paged_attention", q[:2], pool))
    monkeypatch.setattr(tuning, "TUNED", {of_two_slots: {MOSAIC: 0}})
    attend = platforms.by_generation("paged_attention", lambda *_: "mosaic", lambda *_: "triton")  # type: ignore
    lengths = jnp.zeros(8, jnp.int32)
    two, eight = (PagedAttentionArgs(q, pool, jnp.zeros((slots, 4), jnp.int32), lengths, scale=1.0) for slots in (2, 8))
    assert attend(two) == "triton"  # four rows of each
    assert attend(eight) == "mosaic"
    chunk = platforms.by_generation("prefill_attention", lambda *_: "mosaic", lambda *_: "triton")  # type: ignore
    monkeypatch.setattr(tuning, "TUNED", {("prefill_attention", *of_two_slots[1:]): {MOSAIC: 0}})
    assert chunk(PrefillAttentionArgs(*two.arrays[:4], jnp.zeros(3, jnp.int32), scale=1.0)) == "mosaic"  # by its tokens


def test_a_choice_is_kept_for_what_was_measured():
    works = tune.works_of(["16x2x2x16", "80x1x4x16x64"], [2], 20, ["bfloat16/bfloat16", "bfloat16/int8"], moves=True)
    assert not any(work.value_size and work.pool_dtype == "int8" for work in works)
    for work in works:
        arrays = tune.arguments_of(work)[:2]
        assert tuning.key_of(work.operation, *tune.shapes_of(work)) == tuning.key_of(work.operation, *arrays), work


def test_what_no_time_was_left_for_is_named_and_measured_by_the_next_call(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tuned.py"
    monkeypatch.setattr(tune, "seconds", lambda *_: 1.0)
    table: dict[Any, Any] = {}
    monkeypatch.setattr(tune, "TUNED", table)
    with pytest.raises(SystemExit, match="2 of 2 not measured, --missing goes on"):
        tune.main(["--platform=cpu", f"--out={path}", "--limit_s=-1"])
    tune.main(["--platform=cpu", f"--out={path}"])
    found = runpy.run_path(str(path))["TUNED"]
    assert len(found) == 2 and not any(found.values())  # the rule was as fast, and is not measured again
    table.update(found)
    capsys.readouterr()
    tune.main(["--platform=cpu", f"--out={path}", "--missing"])
    assert "the rule" not in capsys.readouterr().out
