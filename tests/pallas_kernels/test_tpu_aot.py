"""The TPU kernels, and the engine's programs with them, compiled to the end for real chips that are not there."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.engine.layer_group import LayerGroupPrograms
from jdisagg.kv.pools import abstract_pool
from jdisagg.model.names import stage_leaves
from jdisagg.model.params import StageParams, abstract_stage
from jdisagg.parallel.submesh import WHOLE, Program, StageMesh
from pallas_kernels import paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.quantized import LARGEST, QuantizedPages
from pallas_kernels.tpu_blocks import num_cores
from tests.pallas_kernels.shapes import Shape, rest_slow
from tests.pallas_kernels.tpu_modes import tpu_devices

pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jdisagg[aot-tpu]'")

pytestmark = pytest.mark.usefixtures("no_kept_programs")
MIB = 2**20
CHIPS = ["v5e", "v5p", "v6e"]
LLAMA_3_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, rope_theta=500_000.0)
HEADS_OF_64 = ModelConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 8192, rope_theta=500_000.0)
HEADS_OF_80 = ModelConfig("llama", 32000, 2560, 6912, 24, 32, 32, 80, 8192)
# (shape, dtype of the queries, dtype of the pool, chips): every shape once, and every kind of pool on every chip.
KERNELS = [
    (Shape(128, 8, 4, 16), "bfloat16", "bfloat16", CHIPS[:1]),  # Llama 3 8B
    (Shape(128, 8, 4, 16), "bfloat16", "int8", CHIPS[1:]),
    (Shape(128, 8, 4, 16), "bfloat16", "float8_e4m3fn", CHIPS[2:]),
    (Shape(128, 8, 8, 32), "bfloat16", "bfloat16", CHIPS[1:2]),  # Llama 3 70B, whole
    (Shape(128, 1, 8, 64), "bfloat16", "bfloat16", CHIPS[2:]),  # and one shard of eight
    (Shape(128, 1, 8, 64), "bfloat16", "float8_e4m3fn", CHIPS[:2]),
    (Shape(128, 2, 4, 128), "float32", "float32", CHIPS[:1]),
    (Shape(64, 4, 3, 32), "float32", "bfloat16", CHIPS[:1]),
    (Shape(64, 8, 4, 16), "bfloat16", "int8", CHIPS[:1]),
    (Shape(80, 2, 4, 16), "bfloat16", "bfloat16", CHIPS[:1]),
    (Shape(96, 8, 1, 32), "bfloat16", "float32", CHIPS[1:2]),
    (Shape(256, 2, 8, 64), "bfloat16", "bfloat16", CHIPS[1:2]),
    (Shape(16, 2, 2, 4), "float32", "float32", CHIPS[2:]),
]
POOL_BYTES = 256 * MIB  # of an abstract pool: a copy of it would be seen


def whole(submesh: StageMesh, shape, dtype, spec=WHOLE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(submesh.mesh, spec))


def large_pool(submesh: StageMesh, shape: Shape, dtype: str) -> Any:
    """POOL_BYTES of pages laid out as the engine lays them."""
    page = shape.kv_heads, 2, shape.page_size, shape.head_dim
    pages = POOL_BYTES // (math.prod(page) * jnp.dtype(dtype).itemsize)
    numbers: Any = jax.ShapeDtypeStruct((pages, *page), dtype, sharding=submesh.row_major(WHOLE, 5))
    if dtype not in LARGEST:
        return numbers
    scales = pages, shape.kv_heads, 2 * shape.page_size
    return QuantizedPages(
        numbers, cast(Any, jax.ShapeDtypeStruct(scales, jnp.float32, sharding=submesh.row_major(WHOLE, 3)))
    )


@pytest.mark.parametrize(
    ("shape", "q_dtype", "dtype", "chip"),
    rest_slow([(shape, q_dtype, dtype, chip) for shape, q_dtype, dtype, chips in KERNELS for chip in chips], 2),
    ids=str,
)
def test_a_step_of_every_shape_compiles_with_every_kernel_and_copies_no_kv(shape, q_dtype, dtype, chip):
    submesh, slots, width = StageMesh(tpu_devices(chip, 1)), 8, 5

    def step(pool, q, k, table, lengths):
        pool = write_kv_pages(pool, k, k, table[:, 0], lengths)
        options = {"window": 50, "soft_cap": 30.0, "sinks": jnp.ones(q.shape[1])}
        q = paged_attention(q, pool, table, lengths, **options)
        spans = jnp.arange(slots + 1, dtype=jnp.int32)
        return pool, prefill_attention(q, pool, table, lengths, spans, **options)

    pool = large_pool(submesh, shape, dtype)
    arguments = [
        pool,
        whole(submesh, (slots, shape.kv_heads * shape.groups, shape.head_dim), q_dtype),
        whole(submesh, (slots, shape.kv_heads, shape.head_dim), q_dtype),
        whole(submesh, (slots, width), jnp.int32),
        whole(submesh, (slots,), jnp.int32),
    ]
    formats = jax.tree.map(lambda leaf: submesh.row_major(WHOLE, leaf.ndim), pool), None
    with jax.sharding.set_mesh(submesh.mesh):
        compiled = jax.jit(step, donate_argnums=0, out_shardings=formats).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert num_kernels(compiled) == 3
    assert memory.alias_size_in_bytes >= POOL_BYTES * 0.99, "donation took no effect"
    assert memory.temp_size_in_bytes < 64 * MIB, "the pool is copied"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rows_of_drafts_compile_into_one_kernel(dtype):
    submesh, shape, slots, rows = StageMesh(tpu_devices("v5e", 1)), Shape(128, 8, 4, 16), 64, 5
    arguments = [
        whole(submesh, (slots * rows, shape.kv_heads * shape.groups, shape.head_dim), "bfloat16"),
        large_pool(submesh, shape, dtype),
        whole(submesh, (slots, 128), jnp.int32),
        whole(submesh, (slots * rows,), jnp.int32),
    ]
    with jax.sharding.set_mesh(submesh.mesh):
        compiled: Any = jax.jit(paged_attention).lower(*arguments).compile()
    assert num_kernels(compiled) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * MIB


def test_a_chip_of_two_cores_is_given_work_for_both():
    with jax.sharding.set_mesh(StageMesh(tpu_devices("v5p", 1)).mesh):
        assert num_cores() == 2
    with jax.sharding.set_mesh(StageMesh(tpu_devices("v6e", 1)).mesh):
        assert num_cores() == 1


def num_kernels(compiled: Any) -> int:
    return compiled.as_text().count("tpu_custom_call")


def layer_group_without_memory(
    config: ModelConfig, layers: range, submesh: StageMesh, dtype: str
) -> LayerGroupPrograms:
    """A layer group's programs over weights that are shapes."""
    abstract = abstract_stage(config, layers, submesh.tp, submesh.axis, dtype)
    rules = [stage_leaves(config, layers, submesh.tp)[path] for path in abstract.paths]
    axes = [rule.axis if submesh.tp > 1 else None for rule in rules]
    specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "tp") for axis in axes]
    leaves: Any = [  # shapes, where a layer group that runs has arrays
        whole(submesh, [n * submesh.tp if d == axis else n for d, n in enumerate(leaf.shape)], leaf.dtype, spec)
        for leaf, axis, spec in zip(abstract.leaves, axes, specs, strict=True)
    ]
    return LayerGroupPrograms(config, layers, submesh, StageParams(abstract.graphdef, abstract.treedef, leaves, specs))


def check_program(group: LayerGroupPrograms, program: Program, batch: list, *, pages: int) -> None:
    """`program` of the layer group compiles, its donated pools stay in place, and nothing large is copied."""
    config, submesh = group.config, group.submesh
    layout = KVLayout(len(group.layers), config.num_kv_heads, config.head_dim, 16, "bfloat16")
    pools = [abstract_pool(layout, pages - 1, submesh)] * len(group.layers)
    with jax.sharding.set_mesh(submesh.mesh):
        compiled: Any = program.lower(group.params.leaves, pools, *batch).compile()
    memory, reductions = compiled.memory_analysis(), compiled.as_text().count(" all-reduce(")
    assert num_kernels(compiled) == 2 * len(group.layers)
    assert memory.alias_size_in_bytes >= pages * layout.bytes_per_page // submesh.tp, "donation took no effect"
    assert memory.temp_size_in_bytes < 64 * MIB, "the pool, or a matrix, is copied"
    assert (reductions > 0) == (submesh.tp > 1)


STAGES = [
    (LLAMA_3_8B, "v5e", 1, range(1)),
    (LLAMA_3_8B, "v6e", 4, range(20, 21)),
    (HEADS_OF_64, "v5e", 1, range(2, 3)),
    (HEADS_OF_80, "v5e", 1, range(2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "chip", "tp", "layers"), STAGES, ids=["8b", "8b-tp4", "heads-of-64", "heads-of-80"])
def test_the_decode_program_of_a_stage_copies_no_kv(config, chip, tp, layers):
    submesh, slots = StageMesh(tpu_devices(chip, tp)), 64
    group = layer_group_without_memory(config, layers, submesh, "bfloat16")
    x = None if group.is_first else whole(submesh, (slots, config.hidden_size), jnp.bfloat16)
    batch = [whole(submesh, (slots, 256), jnp.int32), whole(submesh, (4, slots), jnp.int32), x]
    check_program(group, group.decode_program, batch, pages=4096)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "tp", "layers"), [("v5p", 4, range(2, 3))])
def test_the_prefill_program_of_a_layer_group_of_llama_3_8b_copies_no_kv(chip, tp, layers):
    submesh, tokens, sequences = StageMesh(tpu_devices(chip, tp)), 256, 4
    group = layer_group_without_memory(LLAMA_3_8B, layers, submesh, "bfloat16")
    x = None if group.is_first else whole(submesh, (tokens, 4096), jnp.bfloat16)
    ints = [(3, tokens), (2, sequences + 1), (sequences, 256)]
    check_program(group, group.prefill_program, [*(whole(submesh, i, jnp.int32) for i in ints), x], pages=4096)
