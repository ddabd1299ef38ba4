"""Writing KV: every row lands where it should, and a donated pool stays where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import KernelError, paged_attention, write_kv_pages
from pallas_kernels.write_kv_pages import reference
from tests.pallas_kernels.shapes import SHAPES, Shape, make_queries


def rows(shape: Shape, tokens: int):
    heads = Shape(shape.head_dim, shape.kv_heads, 1, shape.page_size)
    k, v = make_queries(heads, tokens, seed=1), make_queries(heads, tokens, seed=2)
    place = np.random.default_rng(3).permutation(np.arange(shape.page_size, 9 * shape.page_size))[:tokens]
    return k, v, (place // shape.page_size).astype(np.int32), (place % shape.page_size).astype(np.int32)


@pytest.mark.parametrize("write", [write_kv_pages, reference.write_kv_pages], ids=["dispatched", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_lands_in_its_place_and_nothing_else_changes(shape, dtype, write):
    k, v, pages, offsets = rows(shape, 40)
    pages[::7] = 0
    pool = np.zeros((10, shape.kv_heads, 2, shape.page_size, shape.head_dim), np.float32)
    got = jax.jit(write)(jnp.asarray(pool, dtype), k, v, pages, offsets)
    assert got.dtype == dtype
    for row, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        pool[page, :, 0, offset], pool[page, :, 1, offset] = k[row], v[row]
    assert np.array_equal(np.asarray(got[1:]), np.asarray(jnp.asarray(pool[1:], dtype)))


def test_donated_pools_of_many_layers_stay_in_place_while_attention_reads_them():
    shape, layers, megabytes = Shape(64, 4, 2, 16), 3, 16
    pages = megabytes * 2**20 // (shape.kv_heads * 2 * shape.page_size * shape.head_dim * 4)
    pools = [jnp.zeros((pages, shape.kv_heads, 2, shape.page_size, shape.head_dim)) for _ in range(layers)]
    q, lengths = jnp.asarray(make_queries(shape, 8)), jnp.full(8, 17, jnp.int32)
    table = jnp.arange(1, 33, dtype=jnp.int32).reshape(8, 4)

    def step(pools, q):
        written = []
        for pool in pools:
            k = q[:, ::2]
            written.append(write_kv_pages(pool, k, k, table[:, 1], lengths - 17))
            q = q + paged_attention(q, written[-1], table, lengths)
        return written, q

    compiled = jax.jit(step, donate_argnums=0).lower(pools, q).compile()
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    after, out = compiled(pools, q)
    assert [pool.unsafe_buffer_pointer() for pool in after] == addresses
    assert all(pool.is_deleted() for pool in pools)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= layers * megabytes * 2**20
    assert memory.temp_size_in_bytes < 4 * 2**20, "a pool, or its context, is copied"
    assert np.isfinite(np.asarray(out)).all()


def test_heads_may_be_sharded():
    shape = Shape(64, 4, 1, 16)
    k, v, pages, offsets = (jnp.asarray(part) for part in rows(shape, 20))
    pool = jnp.zeros((10, 4, 2, 16, 64))
    heads, whole = PartitionSpec(None, "tp"), PartitionSpec()
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.shard_map(write_kv_pages, mesh=mesh, in_specs=(heads, heads, heads, whole, whole), out_specs=heads)
    got, want = jax.jit(sharded)(pool, k, v, pages, offsets), write_kv_pages(pool, k, v, pages, offsets)
    assert np.array_equal(np.asarray(got), np.asarray(want))


def test_a_bad_argument_is_named_with_both_values():
    pool, rows4, ints = jnp.zeros((3, 4, 2, 16, 64)), jnp.zeros((5, 4, 64)), jnp.zeros(5, jnp.int32)
    with pytest.raises(KernelError, match=r"k must be \[T, 4, 64\] for this pool, got \(5, 2, 64\)"):
        write_kv_pages(pool, rows4[:, :2], rows4, ints, ints)
    with pytest.raises(KernelError, match=r"v must have k's shape \(5, 4, 64\), got \(4, 4, 64\)"):
        write_kv_pages(pool, rows4, rows4[:4], ints, ints)
    with pytest.raises(KernelError, match=r"offsets must have shape \(5,\), got \(4,\)"):
        write_kv_pages(pool, rows4, rows4, ints, ints[:4])
