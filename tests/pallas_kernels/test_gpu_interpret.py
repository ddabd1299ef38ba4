"""The Triton attention kernels, interpreted on the CPU: numbers for the shapes, and bits that no neighbour changes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import gpu as attention_gpu
from pallas_kernels.prefill_attention import gpu as prefill_gpu
from pallas_kernels.quantized import QuantizedPages, dequantize, quantize_pages
from tests.pallas_kernels import test_paged_attention as decode
from tests.pallas_kernels import test_prefill_attention as prefill
from tests.pallas_kernels.shapes import Shape, by_arrays, make_pool, make_queries, rest_slow
from tests.pallas_kernels.test_paged_attention import FAVOURITE, OPTIONS, SINKS

# Every head size, page size, group count and kind of pool, each once or twice: (shape, queries, pool).
CASES = [
    (Shape(128, 2, 4, 16), "float32", "float32"),
    (Shape(64, 4, 3, 32), "float32", "bfloat16"),
    (Shape(80, 2, 8, 16), "bfloat16", "int8"),
    (Shape(96, 1, 1, 128), "bfloat16", "float8_e4m3fn"),
    (Shape(256, 2, 2, 64), "bfloat16", "bfloat16"),
]
MANY_PARTS = attention_gpu.Blocks(parts=18, tiles=1, tile=16, warps=4, stages=2)  # more than one step joins
SMALL_BLOCKS = prefill_gpu.Blocks(rows=16, tile=16, warps=4, stages=2)
HELD = jnp.asarray([210, 0, 64, 333], jnp.int32)


def attend(q, kv_pages, page_table, lengths, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": True} | options
    return by_arrays(attention_gpu.paged_attention)(q, kv_pages, page_table, lengths, sinks, **options)


def attend_packed(q, kv_pages, page_table, kv_lens, cu_q_lens, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": True} | options
    return by_arrays(prefill_gpu.prefill_attention)(q, kv_pages, page_table, kv_lens, cu_q_lens, sinks, **options)


def check_pools(check, attend, arrays, queries: str, pool: str):
    """`check` with a pool of another dtype: the oracle is given the numbers that the kernel reads."""
    q, kv_pages, *rest = arrays
    if pool in ("float32", "bfloat16"):
        check(attend, (q.astype(queries), kv_pages.astype(pool), *rest), queries)
    else:
        small = quantize_pages(kv_pages, jnp.dtype(pool))
        arrays = q.astype(queries), dequantize(small), *rest
        check(lambda q, _, *rest: attend(q, small, *rest), arrays, queries)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "queries", "pool"), CASES, ids=str)
def test_attention_meets_the_oracle(shape, queries, pool):
    check_pools(decode.check, attend, decode.inputs(shape, decode.LENGTHS[::2]), queries, pool)


@pytest.mark.parametrize("options", rest_slow([OPTIONS[7], OPTIONS[1]]), ids="-".join)
def test_attention_over_many_parts_takes_every_option(options):
    decode.check(partial(attend, blocks=MANY_PARTS), decode.inputs(FAVOURITE), **options)


def test_more_query_heads_than_a_program_takes():
    decode.check(attend, decode.inputs(Shape(16, 1, 80, 16), (17, 0, 40)))


def test_no_tokens_anywhere_give_zeros():
    q, pool, table, _ = decode.inputs(FAVOURITE, (40, 40))
    assert not np.asarray(attend(q, pool, table, jnp.zeros(2, jnp.int32), sinks=jnp.asarray(SINKS))).any()


@pytest.mark.slow
def test_a_slot_gets_the_same_bits_in_any_company_and_under_any_table_width():
    pool, table = make_pool(Shape(32, 2, 2, 16), HELD)
    q = jnp.asarray(make_queries(Shape(32, 2, 2, 16), 4))
    program = jax.jit(partial(attend, window=300, blocks=MANY_PARTS))
    together = np.asarray(program(q, pool, table, HELD))
    for slot in (0, 3):
        alone = jnp.zeros_like(HELD).at[slot].set(HELD[slot])
        assert np.array_equal(program(q, pool, table, alone)[slot], together[slot])
        wide = jnp.pad(table, ((0, 0), (0, 40)))
        assert np.array_equal(program(q, pool, wide, HELD)[slot], together[slot])
        moved = (np.arange(4) + 1) % 4
        assert np.array_equal(program(q[moved], pool, table[moved], HELD[moved])[(slot - 1) % 4], together[slot])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "queries", "pool"), CASES[1:4], ids=str)
def test_packed_chunks_meet_the_oracle(shape, queries, pool):
    check_pools(prefill.check, attend_packed, prefill.inputs(shape), queries, pool)


@pytest.mark.parametrize("options", rest_slow([OPTIONS[7], OPTIONS[1]]), ids="-".join)
def test_packed_chunks_in_small_blocks_take_every_option(options):
    prefill.check(partial(attend_packed, blocks=SMALL_BLOCKS), prefill.inputs(FAVOURITE), **options)


def test_more_query_heads_than_a_block_has_rows():
    packed = [(5, 9), (0, 3), (20, 33)]
    prefill.check(partial(attend_packed, blocks=SMALL_BLOCKS), prefill.inputs(Shape(16, 1, 24, 16), packed))


@pytest.mark.parametrize(("pages", "kernels"), [(2**16, True), (2**16 + 1, False)])
def test_bytes_that_a_kernel_cannot_point_at_are_left_to_xla(pages, kernels):
    pool: Any = QuantizedPages(array((pages, 8, 2, 16, 128), jnp.int8), array((pages, 8, 32), jnp.float32))
    q, table, ints = array((4, 32, 128)), array((4, 9), jnp.int32), array((4,), jnp.int32)
    calls = [
        jax.make_jaxpr(attend)(q, pool, table, ints),
        jax.make_jaxpr(attend_packed)(q, pool, table, ints, array((5,), jnp.int32)),
    ]
    assert ["pallas_call" in str(call) for call in calls] == [kernels] * 2


def array(shape, dtype=jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
