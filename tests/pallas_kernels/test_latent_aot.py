"""Pages of one part compiled to the end for TPUs and an H100: DeepSeek's latents, whole and one shard of eight."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdisagg.parallel.submesh import WHOLE, StageMesh
from pallas_kernels import (
    QuantizedPages,
    pack_kv_pages,
    paged_attention,
    prefill_attention,
    unpack_kv_pages,
    write_kv_pages,
)
from pallas_kernels.quantized import LARGEST
from tests.pallas_kernels.latents import DEEPSEEK_V3, DEEPSEEK_V3_TP8, ODD, LatentShape
from tests.pallas_kernels.shapes import rest_slow
from tests.pallas_kernels.test_pack_aot import submesh_of
from tests.pallas_kernels.test_tpu_aot import whole

pytestmark = pytest.mark.usefixtures("no_kept_programs")
MIB = 2**20
POOL_BYTES = 256 * MIB
STEPS = [
    ("v5e", DEEPSEEK_V3_TP8, "bfloat16", "bfloat16"),
    ("v6e", DEEPSEEK_V3, "bfloat16", "bfloat16"),
    ("v5p", DEEPSEEK_V3_TP8, "bfloat16", "int8"),
    ("v6e", DEEPSEEK_V3_TP8, "bfloat16", "float8_e4m3fn"),
    ("v5e", DEEPSEEK_V3, "float32", "float32"),
    ("v5e", ODD, "float32", "bfloat16"),
    ("h100", DEEPSEEK_V3_TP8, "bfloat16", "bfloat16"),
    ("h100", DEEPSEEK_V3, "bfloat16", "bfloat16"),
    ("h100", DEEPSEEK_V3_TP8, "bfloat16", "float8_e4m3fn"),
    ("h100", ODD, "float32", "bfloat16"),
]


def pool_of(submesh: StageMesh, shape: LatentShape, dtype: str) -> Any:
    """POOL_BYTES of pages, laid out as the engine lays them."""
    page = shape.kv_heads, 1, shape.page_size, shape.size
    pages = POOL_BYTES // (math.prod(page) * jnp.dtype(dtype).itemsize)
    numbers: Any = jax.ShapeDtypeStruct((pages, *page), dtype, sharding=submesh.row_major(WHOLE, 5))
    if dtype not in LARGEST:
        return numbers
    scales: Any = jax.ShapeDtypeStruct(
        (pages, shape.kv_heads, shape.page_size), "float32", sharding=submesh.row_major(WHOLE, 3)
    )
    return QuantizedPages(numbers, scales)


@pytest.mark.parametrize(("chip", "shape", "q_dtype", "dtype"), [*rest_slow(STEPS[:6]), *rest_slow(STEPS[6:])], ids=str)
def test_a_step_over_latents_compiles_with_every_kernel_and_copies_no_pages(chip, shape, q_dtype, dtype):
    submesh, slots, width = submesh_of(chip), 8, 64

    def step(pool, q, row, table, lengths):
        pool = write_kv_pages(pool, row, None, table[:, 0], lengths)
        options = {"scale": 0.1352, "value_size": shape.value_size}
        mixed = paged_attention(q, pool, table, lengths, **options)
        spans = jnp.arange(slots + 1, dtype=jnp.int32)
        return pool, mixed, prefill_attention(q, pool, table, lengths, spans, **options)

    pool = pool_of(submesh, shape, dtype)
    arguments = [
        pool,
        whole(submesh, (slots, shape.heads, shape.size), q_dtype),
        whole(submesh, (slots, shape.kv_heads, shape.size), q_dtype),
        whole(submesh, (slots, width), jnp.int32),
        whole(submesh, (slots,), jnp.int32),
    ]
    formats = jax.tree.map(lambda leaf: submesh.row_major(WHOLE, leaf.ndim), pool), None, None
    with jax.sharding.set_mesh(submesh.mesh):
        compiled: Any = jax.jit(step, donate_argnums=0, out_shardings=formats).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kernels = sum(
        text.count(name) for name in ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu_v2")
    )
    assert kernels == 3  # a GPU joins the parts of a slot by a kernel of its own, and XLA writes its latents
    assert memory.alias_size_in_bytes >= POOL_BYTES * 0.99, "donation took no effect"
    assert memory.temp_size_in_bytes < POOL_BYTES // 2, "the pool is copied"


WIRES = [
    ("v5e", DEEPSEEK_V3, "bfloat16", "int8", "bfloat16"),
    ("v6e", DEEPSEEK_V3, "bfloat16", "raw", "bfloat16"),
    ("h100", DEEPSEEK_V3, "bfloat16", "fp8", "bfloat16"),
    ("h100", DEEPSEEK_V3, "bfloat16", "raw", "bfloat16"),
]


@pytest.mark.parametrize(("chip", "shape", "source", "wire", "dtype"), rest_slow(WIRES), ids=str)
def test_latents_are_packed_and_unpacked_without_a_copy_of_a_pool(chip, shape, source, wire, dtype):
    submesh = submesh_of(chip)
    source, pools = [pool_of(submesh, shape, source)] * 2, [pool_of(submesh, shape, dtype)] * 2
    pack, ids = partial(pack_kv_pages, wire=wire), whole(submesh, (64,), jnp.int32)
    formats = [submesh.row_major(WHOLE, 5)] * 2, None
    with jax.sharding.set_mesh(submesh.mesh):
        packing: Any = jax.jit(pack).lower(source, ids).compile()
        packed = jax.tree.map(lambda part: whole(submesh, part.shape, part.dtype), jax.eval_shape(pack, source, ids))
        unpack = jax.jit(unpack_kv_pages, donate_argnums=0, out_shardings=formats)
        unpacking: Any = unpack.lower(pools, packed._replace(digests=None), ids).compile()
    for program in (packing, unpacking):
        assert program.memory_analysis().temp_size_in_bytes < 16 * MIB, "a pool is copied"
