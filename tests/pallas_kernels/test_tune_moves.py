"""What moves pages is tuned by whose code runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import generations, tune
from pallas_kernels.paged_attention.gpu import MOSAIC
from pallas_kernels.tune_moves import MOVES, PACK, UNPACK, WRITE, arrays_of, choices, mover


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
    monkeypatch.setattr(generations, "gpu_generation", lambda: generations.HOPPER)
    assert generations.takes_mosaic(WRITE, rows, pool)
    found: dict[str, Any] = {MOSAIC: 0}
    monkeypatch.setattr(generations, "tuned", lambda *_: found)
    assert not generations.takes_mosaic(WRITE, rows, pool)


def test_latents_are_tuned_by_both_codes_in_decode_and_by_triton_s_in_prefill():
    decode, prefill = tune.works_of(["deepseek_v3_tp8"], [2], 70, ["bfloat16/bfloat16"], moves=True)
    whose = [{bool(each.get("mosaic")) for each in tune.candidates("gpu", work)} for work in (decode, prefill)]
    assert whose == [{True, False}, {False}]
    assert tune.arguments_of(decode)[1].shape[2:] == (1, 64, 576)
