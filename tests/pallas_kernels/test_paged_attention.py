"""Decode attention through the dispatch: options, sharing, sharding, order, and refusals. Shapes: test_conformance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import KernelError, paged_attention
from pallas_kernels.paged_attention import reference
from tests.pallas_kernels.shapes import (
    LENGTHS,
    Shape,
    assert_close,
    by_arrays,
    decode_oracle,
    make_pool,
    make_queries,
    plain_pool,
    rest_slow,
)

SINKS = np.linspace(-2, 3, 8).astype(np.float32)
OPTIONS = [
    {"window": 1},
    {"window": 20},
    {"window": 64},
    {"window": 1000},
    {"soft_cap": 2.0},
    {"sinks": SINKS},
    {"scale": 0.3},
    {"window": 50, "soft_cap": 3.0, "sinks": SINKS, "scale": 0.2},
]
FAVOURITE = Shape(64, 4, 2, 16)


def plain_reference(q, kv_pages, page_table, lengths, *, scale=None, sinks=None, **options):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return by_arrays(reference.paged_attention)(q, kv_pages, page_table, lengths, sinks, scale=scale, **options)


def inputs(shape: Shape, lengths=LENGTHS, dtype: str = "float32"):
    pool, table = make_pool(shape, lengths)
    q = make_queries(shape, len(lengths))
    return jnp.asarray(q, dtype), jnp.asarray(pool, dtype), jnp.asarray(table), jnp.asarray(lengths, jnp.int32)


def check(attend, arrays, dtype="float32", **options):
    q, pool, table, lengths = arrays
    got = jax.jit(partial(attend, **options))(*arrays)
    assert got.dtype == q.dtype
    want = decode_oracle(np.asarray(q, np.float32), plain_pool(pool), np.asarray(table), np.asarray(lengths), **options)
    assert_close(got, want, dtype)


@pytest.mark.parametrize("attend", rest_slow([paged_attention, plain_reference]), ids=["dispatched", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_every_option_meets_the_oracle(attend, options):
    check(attend, inputs(FAVOURITE), **options)


def test_f32_queries_read_a_bf16_pool():
    q, pool, table, lengths = inputs(FAVOURITE, dtype="bfloat16")
    check(paged_attention, (q.astype(jnp.float32), pool, table, lengths))


@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": SINKS}], ids="-".join)
def test_rows_of_a_slot_see_as_far_as_each_is_told(options):
    check_drafts(paged_attention, **options)


def check_drafts(attend, dtype="float32", **options):
    """Three rows a slot, one behind the other; some see nothing."""
    _, pool, table, lengths = inputs(FAVOURITE, (3, 40, 1, 100, 17), dtype)
    rows = jnp.asarray(make_queries(FAVOURITE, 15), dtype)
    seen = jnp.maximum(lengths[:, None] - 2 + jnp.arange(3)[None, :], 0).at[1, 2].set(0).at[2].set(0).reshape(-1)
    got = jax.jit(partial(attend, **options))(rows, pool, table, seen)
    want = decode_oracle(
        np.asarray(rows, np.float32), plain_pool(pool), np.repeat(table, 3, axis=0), np.asarray(seen), **options
    )
    assert_close(got, want, dtype)
    return got, jax.jit(partial(attend, **options))(rows, pool, jnp.repeat(table, 3, axis=0), seen)


def test_rows_that_are_not_as_many_for_each_slot_are_refused():
    q, pool, table, lengths = inputs(FAVOURITE, (3, 40))
    with pytest.raises(KernelError, match="as many rows for each of 2 slots, got 3"):
        paged_attention(jnp.concatenate([q, q[:1]]), pool, table, jnp.concatenate([lengths, lengths[:1]]))


def test_no_tokens_anywhere_give_zeros():
    q, pool, table, _ = inputs(FAVOURITE, (40, 40))
    assert not np.asarray(paged_attention(q, pool, table, jnp.zeros(2, jnp.int32), sinks=jnp.asarray(SINKS))).any()


def test_slots_that_share_prefix_pages_read_the_same_tokens():
    pool, table = make_pool(FAVOURITE, (100, 100, 100))
    table[1:, :4] = table[0, :4]
    lengths = np.asarray((100, 70, 64), np.int32)
    q = make_queries(FAVOURITE, 3)
    got = paged_attention(jnp.asarray(q), jnp.asarray(pool), jnp.asarray(table), jnp.asarray(lengths))
    assert_close(got, decode_oracle(q, pool, table, lengths), "float32")


def test_more_slots_than_a_step_takes_and_one_long_among_short():
    lengths = np.asarray([3, 700, 0, 5] * 5 + [64], np.int32)
    check(paged_attention, inputs(Shape(64, 2, 2, 32), lengths))


@pytest.mark.parametrize("check_vma", [True, False])
def test_heads_may_be_sharded(check_vma):
    heads, whole = PartitionSpec(None, "tp"), PartitionSpec()
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.shard_map(
        lambda q, pool, table, lengths, sinks: paged_attention(q, pool, table, lengths, sinks=sinks, window=50),
        mesh=mesh,
        in_specs=(heads, heads, whole, whole, PartitionSpec("tp")),
        out_specs=heads,
        check_vma=check_vma,
    )
    arrays = inputs(FAVOURITE)
    check(lambda *a, **_: jax.jit(sharded)(*a, SINKS), arrays, window=50, sinks=SINKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 6, 64))}, "6 query heads are not a multiple of 4 KV heads"),
        ({"q": jnp.zeros((2, 8, 80))}, "head size 80, kv_pages 64"),
        ({"q": jnp.zeros((2, 8, 64), jnp.float16)}, "float16"),
        ({"kv_pages": jnp.zeros((3, 4, 16, 64))}, "kv_pages must be"),
        ({"kv_pages": jnp.zeros((3, 4, 2, 16, 64), jnp.int8)}, "int8"),
        ({"page_table": jnp.zeros((3, 2), jnp.int32)}, "rows for each of 3 slots, got 2"),
        ({"page_table": jnp.zeros((2, 0), jnp.int32)}, r"\[rows, W\], got \(2, 0\)"),
        ({"lengths": jnp.zeros(2)}, "lengths must be int32, got float32"),
        ({"window": 0}, "got 0"),
        ({"soft_cap": -1.0}, "got -1.0"),
        ({"sinks": jnp.zeros(4)}, r"\[8\], one a query head, got \(4,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_argument_is_named_with_both_values(change, message):
    q, pool, table, lengths = inputs(FAVOURITE, (20, 30))
    arguments = {"q": q, "kv_pages": pool, "page_table": table[:, :2], "lengths": lengths} | change
    with pytest.raises(KernelError, match=message):
        paged_attention(**arguments)


@pytest.mark.parametrize("window", [None, 100])
def test_a_slot_gets_the_same_bits_in_any_company_and_under_any_table_width(window):
    generator = np.random.default_rng(5)
    pool = jnp.asarray(generator.standard_normal((200, 2, 2, 16, 32)), jnp.float32)
    table = jnp.asarray(1 + generator.permutation(192).reshape(8, 24), jnp.int32)
    q = jnp.asarray(generator.standard_normal((8, 4, 32)), jnp.float32)
    lengths = np.array([210, 1, 64, 65, 333, 128, 17, 250], np.int32)
    program = jax.jit(lambda *arrays: paged_attention(*arrays, window=window))
    together = np.asarray(program(q, pool, table, lengths))
    for slot in range(8):
        alone = np.zeros(8, np.int32)
        alone[slot] = lengths[slot]
        assert np.array_equal(np.asarray(program(q, pool, table, alone))[slot], together[slot])
        wide = jnp.pad(table, ((0, 0), (0, 40)))
        assert np.array_equal(np.asarray(program(q, pool, wide, alone))[slot], together[slot])
        moved = np.roll(np.arange(8), 3)
        again = np.asarray(program(q[moved], pool, table[moved], lengths[moved]))
        assert np.array_equal(again[np.argmax(moved == slot)], together[slot])
