"""The GPU kernels compiled to the end, PTX and machine code, for an H100 that is not there."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.parallel.submesh import WHOLE, StageMesh
from pallas_kernels import mosaic, paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.quantized import QuantizedPages
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import Shape, rest_slow

pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: pip install 'jdisagg[aot-gpu]'")

pytestmark = pytest.mark.usefixtures("no_kept_programs")
MIB = 2**20
HEADS = PartitionSpec(None, "tp")
LLAMA_3_8B, LLAMA_3_70B_TP8 = Shape(128, 8, 4, 16), Shape(128, 1, 8, 16)
# (shape, dtype of the queries, dtype of the pool)
MODELS = [
    (LLAMA_3_8B, "bfloat16", "bfloat16"),
    (LLAMA_3_8B, "bfloat16", "int8"),
    (LLAMA_3_70B_TP8, "bfloat16", "bfloat16"),
    (LLAMA_3_70B_TP8, "bfloat16", "float8_e4m3fn"),
]
OTHERS = [
    (Shape(64, 4, 3, 32), "float32", "bfloat16"),
    (Shape(80, 2, 4, 16), "bfloat16", "bfloat16"),
    (Shape(96, 8, 1, 128), "float32", "int8"),
    (Shape(256, 2, 8, 64), "bfloat16", "bfloat16"),
]
PAGES, WIDTH = 8192, 2048  # a table of 32k tokens in pages of 16


def array(submesh: StageMesh, shape, dtype, spec=WHOLE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(submesh.mesh, spec))


def make_pool(submesh: StageMesh, shape: Shape, dtype: str, spec=WHOLE) -> Any:
    numbers: Any = array(submesh, (PAGES, shape.kv_heads, 2, shape.page_size, shape.head_dim), dtype, spec)
    if dtype in ("float32", "bfloat16"):
        return numbers
    scales: Any = array(submesh, (PAGES, shape.kv_heads, 2 * shape.page_size), jnp.float32, spec)
    return QuantizedPages(numbers, scales)


def compiled(submesh: StageMesh, function, *arguments, donate=()) -> Any:
    with jax.sharding.set_mesh(submesh.mesh):
        return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def kernels_of(program: Any) -> int:
    """Triton's and Mosaic's."""
    targets = "__gpu$xla.gpu.triton", "triton_kernel_call", 'custom_call_target="mosaic_gpu'
    return sum(program.as_text().count(target) for target in targets)


def bytes_of(pool: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))


@pytest.fixture(scope="module")
def submesh() -> StageMesh:
    return StageMesh(gpu_devices(1))


@pytest.mark.parametrize(
    ("shape", "q_dtype", "dtype", "slots"),
    rest_slow([*((*kernel, 64) for kernel in MODELS + OTHERS), *((*kernel, 1) for kernel in MODELS[::2])]),
    ids=str,
)
def test_decode_attention_compiles_and_copies_no_kv(submesh, shape, q_dtype, dtype, slots):
    q = array(submesh, (slots, shape.kv_heads * shape.groups, shape.head_dim), q_dtype)
    ints = array(submesh, (slots, WIDTH), jnp.int32), array(submesh, (slots,), jnp.int32)
    program = compiled(submesh, paged_attention, q, make_pool(submesh, shape, dtype), *ints)
    assert kernels_of(program) == 2
    assert program.memory_analysis().temp_size_in_bytes < 64 * MIB


@pytest.mark.parametrize(
    ("shape", "q_dtype", "dtype", "tokens"),
    rest_slow([*((*kernel, 4096) for kernel in MODELS + OTHERS), *((*kernel, 256) for kernel in MODELS[::2])]),
    ids=str,
)
def test_prefill_attention_compiles_and_copies_no_kv(submesh, shape, q_dtype, dtype, tokens):
    q = array(submesh, (tokens, shape.kv_heads * shape.groups, shape.head_dim), q_dtype)
    ints = [array(submesh, size, jnp.int32) for size in ((4, WIDTH), (4,), (5,))]
    program = compiled(submesh, prefill_attention, q, make_pool(submesh, shape, dtype), *ints)
    assert kernels_of(program) == 1
    assert program.memory_analysis().temp_size_in_bytes < 64 * MIB


@pytest.mark.parametrize(
    ("shape", "q_dtype", "dtype", "tokens"),
    rest_slow([*((*kernel, 4096) for kernel in MODELS + OTHERS), *((*kernel, 64) for kernel in MODELS[::2])]),
    ids=str,
)
def test_writing_a_donated_pool_leaves_it_where_it_is(submesh, shape, q_dtype, dtype, tokens):
    pool = make_pool(submesh, shape, dtype)
    new: Any = array(submesh, (tokens, shape.kv_heads, shape.head_dim), q_dtype)
    ints = array(submesh, (tokens,), jnp.int32)
    program = compiled(submesh, write_kv_pages, pool, new, new, ints, ints, donate=0)
    memory = program.memory_analysis()
    assert kernels_of(program) == int(mosaic.copies(new, pool))  # XLA writes what a TMA does not take
    assert memory.alias_size_in_bytes == bytes_of(pool), "donation took no effect"
    assert memory.temp_size_in_bytes < 64 * MIB


OPTIONS = {"window": 4096, "soft_cap": 30.0}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "check_vma"), [("bfloat16", True), ("int8", False)])
def test_a_layer_with_every_option_compiles_with_its_heads_over_eight_gpus(dtype, check_vma):
    submesh, shape, slots = StageMesh(gpu_devices(8)), Shape(128, 8, 8, 16), 64

    def layer(pool, q, k, table, lengths, sinks):
        pool = write_kv_pages(pool, k, k, table[:, 0], lengths)
        q = paged_attention(q, pool, table, lengths, sinks=sinks, **OPTIONS)
        spans = jnp.arange(slots + 1, dtype=jnp.int32)
        return pool, prefill_attention(q, pool, table, lengths, spans, sinks=sinks, **OPTIONS)

    pool = make_pool(submesh, shape, dtype, HEADS)
    sharded = jax.shard_map(
        layer,
        mesh=submesh.mesh,
        in_specs=(HEADS, HEADS, HEADS, WHOLE, WHOLE, PartitionSpec("tp")),
        out_specs=(HEADS, HEADS),
        check_vma=check_vma,
    )
    program = compiled(
        submesh,
        sharded,
        pool,
        array(submesh, (slots, 64, 128), jnp.bfloat16, HEADS),
        array(submesh, (slots, 8, 128), jnp.bfloat16, HEADS),
        array(submesh, (slots, WIDTH), jnp.int32),
        array(submesh, (slots,), jnp.int32),
        array(submesh, (64,), jnp.float32, PartitionSpec("tp")),
        donate=0,
    )
    memory = program.memory_analysis()
    assert kernels_of(program) == 4
    assert memory.alias_size_in_bytes == bytes_of(pool) // 8
    assert memory.temp_size_in_bytes < 64 * MIB
    between = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-")
    assert not any(word in program.as_text() for word in between)
