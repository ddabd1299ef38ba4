"""What one shard runs: pages cut anew, narrowed, compressed and checked, by the programs alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.worker_config import Digests
from jdisagg.kv.shipping import are_intact, fold_shard, insert_shard, pack_shard, recut
from pallas_kernels import PackedPages, QuantizedPages, dequantize, quantize_pages

LAYERS, PAGES, HEADS, SIZE, D = 2, 12, 4, 16, 8
WIRES = ("raw", "int8", "fp8", "int4")


def make_pools(page_size: int = SIZE, seed: int = 0, dtype: str = "float32") -> list[jax.Array]:
    numbers = np.random.default_rng(seed).standard_normal((LAYERS, PAGES + 1, HEADS, 2, page_size, D), np.float32)
    return [jnp.asarray(pool).astype(dtype) for pool in numbers]


def tokens_of(pool, pages: list[int]) -> np.ndarray:
    """[heads, 2, tokens, D] of consecutive pages."""
    return np.concatenate([np.asarray(pool[page], np.float32) for page in pages], axis=2)


def packed_slices(pools, pages, wire="raw", dtype="float32", digests=Digests.FULL, slice_heads=2):
    def pack(pools, pages):
        return pack_shard(pools, pages, slice_heads=slice_heads, wire=wire, dtype=dtype, digests=digests)

    return jax.jit(pack)(pools, jnp.asarray(pages, jnp.int32))


def inserted(pools, slices, pages) -> list[Any]:
    return jax.jit(insert_shard)(pools, jnp.asarray(pages, jnp.int32), slices.numbers)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 32), (32, 16), (64, 16), (24, 16), (16, 24)])
def test_tokens_keep_their_order_in_pages_of_another_size(ours: int, theirs: int):
    source, destination = make_pools(ours), make_pools(theirs, seed=1)
    tokens = 192  # whole pages of every size
    from_, to = list(range(1, 1 + tokens // ours)), list(range(PAGES, PAGES - tokens // theirs, -1))
    written = inserted(destination, packed_slices(source, from_), to)
    for sent, got in zip(source, written, strict=True):
        np.testing.assert_array_equal(tokens_of(got, to), tokens_of(sent, from_))


@pytest.mark.parametrize("wire", WIRES)
def test_compressed_pages_cut_anew_are_the_same_numbers(wire: str):
    source, pages = make_pools(), [3, 1, 4, 2]
    slices = packed_slices(source, pages, wire)
    same = inserted(make_pools(seed=1), slices, [5, 6, 7, 8])
    larger = inserted(make_pools(2 * SIZE, seed=1), slices, [9, 2])
    smaller = inserted(make_pools(SIZE // 2, seed=1), slices, list(range(1, 9)))
    for one, two, three in zip(same, larger, smaller, strict=True):
        wanted = tokens_of(one, [5, 6, 7, 8])
        np.testing.assert_array_equal(tokens_of(two, [9, 2]), wanted)
        np.testing.assert_array_equal(tokens_of(three, list(range(1, 9))), wanted)


@pytest.mark.parametrize("digests", [Digests.FULL, Digests.SAMPLED])
@pytest.mark.parametrize("wire", ["raw", "int4"])
def test_digests_folded_after_packing_are_those_that_packing_folds(wire: str, digests: Digests):
    pools, pages = make_pools(), [3, 1, 4, 2, 9, 10, 11, 12, 5, 6]
    bare, full = (packed_slices(pools, pages, wire, digests=each) for each in (Digests.OFF, digests))
    folded = jax.jit(partial(fold_shard, digests=digests))(bare.numbers)
    for one, other in zip(folded, full.digests, strict=True):
        np.testing.assert_array_equal(one, other)


def quantised(pools: list[jax.Array], dtype: str) -> list[QuantizedPages]:
    return [quantize_pages(pool, jnp.dtype(dtype)) for pool in pools]


PAGES_OF = ("int8", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", PAGES_OF)
@pytest.mark.parametrize("theirs", [SIZE, 2 * SIZE])
def test_quantised_pages_travel_with_their_scales_bit_for_bit(dtype: str, theirs: int):
    source, destination = quantised(make_pools(), dtype), quantised(make_pools(theirs, seed=1), dtype)
    slices = packed_slices(source, [1, 2, 3, 4], dtype=dtype)
    assert not slices.errors and np.asarray(are_intact(slices, error_bound=0.0)).all()
    to = list(range(5, 5 + 4 * SIZE // theirs))
    for sent, got in zip(source, inserted(destination, slices, to), strict=True):
        assert got.values.dtype == dtype
        wanted = tokens_of(dequantize(sent), [1, 2, 3, 4])
        np.testing.assert_array_equal(tokens_of(dequantize(got), to), wanted)


@pytest.mark.parametrize("dtype", PAGES_OF)
def test_floats_leave_as_what_quantised_pages_hold_and_the_other_way_about(dtype: str):
    floats, small = make_pools(), quantised(make_pools(seed=1), dtype)
    slices = packed_slices(floats, [1, 2, 3], dtype=dtype)
    assert not slices.errors, "nobody refuses what was asked for"
    there = inserted(small, slices, [7, 8, 9])
    back = inserted(make_pools(seed=2), packed_slices(there, [7, 8, 9], dtype=dtype), [1, 2, 3])
    for sent, got, again in zip(floats, there, back, strict=True):
        held, wanted = tokens_of(dequantize(got), [7, 8, 9]), tokens_of(sent, [1, 2, 3])
        assert np.abs(held - wanted).max() < np.abs(wanted).max() * {"int8": 1 / 200, "float8_e4m3fn": 1 / 14}[dtype]
        np.testing.assert_allclose(tokens_of(again, [1, 2, 3]), held, rtol=1e-6)


@pytest.mark.parametrize("dtype", PAGES_OF)
def test_a_flipped_bit_of_a_number_or_a_scale_of_quantised_pages_is_caught(dtype: str):
    slices = packed_slices(quantised(make_pools(), dtype), [1, 2, 3], dtype=dtype)
    for kind in ("values", "scales"):
        arrays = [np.array(each) for each in getattr(slices, kind)]
        arrays[0].view(np.uint8).reshape(-1)[5] ^= 4
        assert not np.asarray(
            are_intact(slices._replace(**{kind: list(map(jnp.asarray, arrays))}), error_bound=1.0)
        ).all()


@pytest.mark.parametrize(("ours", "theirs"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_numbers_travel_in_the_narrower_dtype(ours: str, theirs: str):
    source, destination = make_pools(dtype=ours), make_pools(seed=1, dtype=theirs)
    slices = packed_slices(source, [1, 2, 3], dtype="bfloat16")
    assert {each.dtype for each in slices.values} == {jnp.dtype("bfloat16")}
    assert np.asarray(are_intact(slices, error_bound=0.0)).all()
    for sent, got in zip(source, inserted(destination, slices, [7, 8, 9]), strict=True):
        assert got.dtype == theirs
        wanted = np.asarray(sent[1:4].astype("bfloat16").astype(theirs))
        assert np.asarray(got[7:10]).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("digests", Digests)
@pytest.mark.parametrize("wire", WIRES)
def test_a_flipped_bit_is_caught_in_every_kind_of_slice(wire: str, digests: Digests):
    arrays, tree = jax.tree.flatten(slices := packed_slices(make_pools(), [1, 2, 3], wire, digests=digests))
    check = jax.jit(partial(are_intact, error_bound=1.0))
    assert np.asarray(check(slices)).all()
    caught = []
    for index, array in enumerate(arrays):
        raw = np.array(array)
        raw.reshape(-1).view(np.uint8)[0] ^= 1  # of the first page, which has a digest wherever any has
        broken = [*arrays[:index], jnp.asarray(raw), *arrays[index + 1 :]]
        caught.append(not np.asarray(check(jax.tree.unflatten(tree, broken))).all())
    errors = len(slices.errors)  # those say too much or too little; nothing is lost by it
    assert all(each == (digests is not Digests.OFF) for each in caught[: len(caught) - errors])


def test_a_layer_that_lost_more_than_the_bound_is_not_taken():
    pools = make_pools()
    pools[1] = pools[1].at[2].set(jnp.where(jnp.arange(D) == 0, 1000.0, 1.0))  # one large number a row drowns the rest
    slices = packed_slices(pools, [2], "int4")
    lost = np.asarray(slices.errors[0])
    assert lost.shape == (LAYERS, 1, 2)
    assert not np.asarray(are_intact(slices, error_bound=lost.max() * 0.99)).all()
    assert np.asarray(are_intact(slices, error_bound=lost.max() * 1.01)).all()


def test_scales_are_cut_with_their_rows():
    values = jnp.arange(2 * 4 * 1 * 2 * 3 * 1, dtype=jnp.int8).reshape(2, 4, 1, 2, 3, 1)
    scales = values.astype(jnp.float32).reshape(2, 4, 1, 6)
    got = recut(PackedPages(values, scales, None), 6)
    assert got.scales is not None and got.values.shape == (2, 2, 1, 2, 6, 1)
    np.testing.assert_array_equal(got.scales.reshape(got.values.shape), got.values)
