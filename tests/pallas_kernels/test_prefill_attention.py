"""Prefill attention through the dispatch: options, any packing, sharding, and refusals. Shapes: test_conformance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import KernelError, prefill_attention
from pallas_kernels.prefill_attention import reference
from tests.pallas_kernels.shapes import (
    Shape,
    assert_close,
    by_arrays,
    make_pool,
    make_queries,
    plain_pool,
    prefill_oracle,
    rest_slow,
)
from tests.pallas_kernels.test_paged_attention import FAVOURITE, OPTIONS, SINKS

# (rows of the chunk, tokens held) of each sequence: empty, fresh, with a cached prefix, around page and block bounds
PACKED = [(0, 0), (1, 1), (17, 17), (0, 40), (1, 129), (65, 65), (64, 128), (16, 300), (0, 0)]
PADDING = 11


def plain_reference(q, kv_pages, page_table, kv_lens, cu_q_lens, *, scale=None, sinks=None, **options):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return by_arrays(reference.prefill_attention)(
        q, kv_pages, page_table, kv_lens, cu_q_lens, sinks, scale=scale, **options
    )


def inputs(shape: Shape, packed=PACKED, dtype: str = "float32", padding: int = PADDING):
    kv_lens = np.asarray([held for _, held in packed], np.int32)
    cu_q_lens = np.cumsum([0] + [rows for rows, _ in packed]).astype(np.int32)
    pool, table = make_pool(shape, kv_lens)
    q = make_queries(shape, int(cu_q_lens[-1]) + padding)
    arrays = jnp.asarray(q, dtype), jnp.asarray(pool, dtype), jnp.asarray(table)
    return *arrays, jnp.asarray(kv_lens), jnp.asarray(cu_q_lens)


def check(attend, arrays, dtype="float32", **options):
    got = jax.jit(partial(attend, **options))(*arrays)
    assert got.dtype == arrays[0].dtype
    wide = [np.asarray(arrays[0], np.float32), plain_pool(arrays[1]), *(np.asarray(a) for a in arrays[2:])]
    assert_close(got, prefill_oracle(*wide, **options), dtype)


@pytest.mark.parametrize("attend", rest_slow([prefill_attention, plain_reference]), ids=["dispatched", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_every_option_meets_the_oracle(attend, options):
    check(attend, inputs(FAVOURITE), **options)


def test_a_chunk_of_padding_alone_gives_zeros():
    q, pool, table, _, _ = inputs(FAVOURITE, [(3, 3), (4, 9)])
    none = jnp.zeros(3, jnp.int32)
    assert not np.asarray(prefill_attention(q, pool, table, none[:2], none, sinks=jnp.asarray(SINKS))).any()


ATTEND = {window: jax.jit(partial(prefill_attention, window=window)) for window in (None, 33)}


@settings(max_examples=15, deadline=None)
@given(
    cut=st.lists(st.integers(0, 160), min_size=6, max_size=6),
    prefixes=st.lists(st.integers(0, 90), min_size=6, max_size=6),
    window=st.sampled_from([None, 33]),
)
def test_any_ragged_packing_meets_the_oracle(cut, prefixes, window):
    shape, tokens = Shape(64, 1, 2, 16), 160
    cu_q_lens = np.asarray([0, *sorted(cut)], np.int32)
    kv_lens = np.diff(cu_q_lens) + np.asarray(prefixes, np.int32)
    pool, table = make_pool(shape, kv_lens)
    whole = np.zeros((120, *pool.shape[1:]), np.float32)  # one shape, so one program for all examples
    whole[: pool.shape[0]] = pool
    wide = np.zeros((6, 17), np.int32)
    wide[:, : table.shape[1]] = table[:, :17]
    q = make_queries(shape, tokens)
    got = ATTEND[window](*(jnp.asarray(a) for a in (q, whole, wide, kv_lens.astype(np.int32), cu_q_lens)))
    assert_close(got, prefill_oracle(q, whole, wide, kv_lens, cu_q_lens, window=window), "float32")


@pytest.mark.parametrize("check_vma", [True, False])
def test_heads_may_be_sharded(check_vma):
    heads, whole = PartitionSpec(None, "tp"), PartitionSpec()
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.shard_map(
        lambda *a: prefill_attention(*a[:5], sinks=a[5]),
        mesh=mesh,
        in_specs=(heads, heads, whole, whole, whole, PartitionSpec("tp")),
        out_specs=heads,
        check_vma=check_vma,
    )
    check(lambda *a, **_: jax.jit(sharded)(*a, SINKS), inputs(FAVOURITE), sinks=SINKS)


def test_a_bad_argument_is_named_with_both_values():
    q, pool, table, kv_lens, cu_q_lens = inputs(FAVOURITE)
    with pytest.raises(KernelError, match=r"cu_q_lens must have shape \(10,\), got \(9,\)"):
        prefill_attention(q, pool, table, kv_lens, cu_q_lens[1:])
    with pytest.raises(KernelError, match=r"kv_lens must be int32, got float32"):
        prefill_attention(q, pool, table, kv_lens.astype(jnp.float32), cu_q_lens)
