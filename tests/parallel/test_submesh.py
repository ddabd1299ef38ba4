"""Programs over numbers that are stored in few bits: on a CPU a write of some rows leaves the pool where it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import QuantizedPages, paged_attention, quantize_pages, write_kv_pages

PAGES, SHAPE = 512, (2, 2, 16, 64)


def step(pools, k, q, ids, table):
    """A layer's part of a decode step, as the model has it."""
    pool = write_kv_pages(pools, k, k, ids, ids)
    return pool, paged_attention(q, pool, table, jnp.full(4, 30, jnp.int32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_step_over_narrow_pages_converts_no_pool_and_keeps_its_bits(dtype):
    numbers = jnp.asarray(np.random.default_rng(0).standard_normal((PAGES, *SHAPE)), jnp.float32)
    k, q = jnp.ones((4, 2, 64)), jnp.linspace(-1, 1, 4 * 4 * 64).reshape(4, 4, 64)
    ids, table = jnp.arange(1, 5, dtype=jnp.int32), jnp.arange(8, dtype=jnp.int32).reshape(4, 2)

    def found(as_stored: bool):
        pool = numbers.astype(dtype) if dtype == "bfloat16" else quantize_pages(numbers, jnp.dtype(dtype))
        program = StageMesh(jax.devices()[:1]).program(step, donate=(0,), as_stored=as_stored)
        arguments = pool, k, q, ids, table
        memory: Any = program.lower(*arguments).compile().memory_analysis()
        held = (pool.values if isinstance(pool, QuantizedPages) else pool).nbytes
        pool, out = program(*arguments)
        return memory.temp_size_in_bytes / held, [np.asarray(each) for each in (*jax.tree.leaves(pool), out)]

    (copied, usual), (kept, ours) = found(as_stored=False), found(as_stored=True)
    assert kept < 0.25
    assert copied >= 1
    for one, other in zip(usual, ours, strict=True):
        assert one.tobytes() == other.tobytes()
