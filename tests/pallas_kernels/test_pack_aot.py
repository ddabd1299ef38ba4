"""Packing and unpacking compiled to the end for chips that are not there: one kernel each, and no copy of a pool."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.kv.pools import POOL_SPEC
from jdisagg.parallel.submesh import AXIS, WHOLE, StageMesh
from pallas_kernels import QuantizedPages, digest_pages, pack_kv_pages, unpack_kv_pages
from pallas_kernels.platforms import traced_for
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import Shape, rest_slow
from tests.pallas_kernels.tpu_modes import tpu_devices

pytestmark = pytest.mark.usefixtures("no_kept_programs")
MIB = 2**20
LLAMA_3_8B, LLAMA_3_70B_TP8 = Shape(128, 8, 4, 16), Shape(128, 1, 8, 64)
# (chip, shape, dtype of the source, wire, dtype of the destination, layers)
PROGRAMS = [
    ("v5e", LLAMA_3_8B, "bfloat16", "raw", "bfloat16", 4),
    ("v5p", LLAMA_3_8B, "bfloat16", "int8", "bfloat16", 10),
    ("v6e", LLAMA_3_8B, "bfloat16", "int4", "float32", 2),
    ("v5e", LLAMA_3_70B_TP8, "bfloat16", "fp8", "bfloat16", 2),
    ("v5p", LLAMA_3_70B_TP8, "float32", "int4", "bfloat16", 2),
    ("v6e", Shape(256, 8, 1, 128), "float32", "fp8", "float32", 2),
    ("v5e", LLAMA_3_8B, "int8", "raw", "int8", 2),
    ("v6e", LLAMA_3_8B, "float8_e4m3fn", "raw", "float8_e4m3fn", 2),
    ("h100", LLAMA_3_8B, "bfloat16", "raw", "bfloat16", 4),
    ("h100", LLAMA_3_8B, "bfloat16", "int8", "bfloat16", 10),
    ("h100", LLAMA_3_70B_TP8, "float32", "fp8", "bfloat16", 2),
    ("h100", Shape(80, 2, 1, 16), "bfloat16", "int4", "float32", 2),
    ("h100", Shape(256, 8, 1, 128), "float32", "int4", "float32", 2),
    ("h100", LLAMA_3_8B, "int8", "raw", "int8", 2),
    ("h100", LLAMA_3_8B, "float8_e4m3fn", "raw", "float8_e4m3fn", 2),
]
# What else compiles on TPUs; with a head size that is no multiple of 128 XLA pads whole pools for any kernel.
ODD = [
    (Shape(64, 4, 3, 32), "float32", "int8", "bfloat16"),
    (Shape(80, 2, 4, 16), "bfloat16", "int4", "float32"),
    (Shape(96, 8, 1, 32), "float32", "fp8", "float32"),
    (Shape(16, 2, 2, 4), "float32", "raw", "float32"),
]


def submesh_of(chip: str, count: int = 1) -> StageMesh:
    if chip == "h100":
        pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
        return StageMesh(gpu_devices(count))
    pytest.importorskip("libtpu", reason="libtpu is not installed: jdisagg[aot-tpu]")
    return StageMesh(tpu_devices(chip, count))


def array(submesh: StageMesh, shape, dtype, spec=WHOLE) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(submesh.mesh, spec))


def make_pools(submesh: StageMesh, shape: Shape, dtype: str, layers: int, pages: int, spec=WHOLE) -> list[Any]:
    numbers = array(submesh, (pages, shape.kv_heads, 2, shape.page_size, shape.head_dim), dtype, spec)
    if dtype in ("float32", "bfloat16"):
        return [numbers] * layers
    return [
        QuantizedPages(numbers, array(submesh, (*numbers.shape[:2], 2 * shape.page_size), "float32", spec))
    ] * layers


def compile_both(submesh: StageMesh, source: list, pools: list, wire: str, count: int = 64) -> tuple[Any, Any]:
    pack, ids = partial(pack_kv_pages, wire=wire), array(submesh, (count,), jnp.int32)
    with jax.sharding.set_mesh(submesh.mesh):
        packing = jax.jit(pack).lower(source, ids).compile()
        packed = jax.tree.map(lambda part: array(submesh, part.shape, part.dtype), jax.eval_shape(pack, source, ids))
        packed = packed._replace(digests=None)
        unpacking = jax.jit(unpack_kv_pages, donate_argnums=0).lower(pools, packed, ids).compile()
    return packing, unpacking


def bytes_of(pools: list) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))


@pytest.mark.parametrize(
    ("chip", "shape", "source", "wire", "dtype", "layers"),
    [*rest_slow(PROGRAMS[:8]), *rest_slow(PROGRAMS[8:])],
    ids=str,
)
def test_no_pool_is_copied_and_unpacking_writes_in_place(chip, shape, source, wire, dtype, layers):
    submesh, pages = submesh_of(chip), (256 << 20) // (layers * shape.kv_heads * 2 * shape.page_size * shape.head_dim)
    packing, unpacking = compile_both(
        submesh,
        make_pools(submesh, shape, source, layers, pages),
        make_pools(submesh, shape, dtype, layers, pages),
        wire,
    )
    for program in (packing, unpacking):
        assert program.memory_analysis().temp_size_in_bytes < 16 * MIB, "a pool is copied"
    assert unpacking.memory_analysis().alias_size_in_bytes >= bytes_of(make_pools(submesh, shape, dtype, layers, pages))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "source", "wire", "dtype"), ODD, ids=str)
def test_other_head_sizes_compile_for_tpus(shape, source, wire, dtype):
    submesh = submesh_of("v5e")
    programs = compile_both(
        submesh, make_pools(submesh, shape, source, 2, 32), make_pools(submesh, shape, dtype, 2, 32), wire
    )
    assert all("tpu_custom_call" in program.as_text() for program in programs)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p", "h100"])
def test_shards_of_heads_pack_and_unpack_without_a_word_to_each_other(chip):
    submesh, later = submesh_of(chip, 4), PartitionSpec(None, None, AXIS)
    cut = partial(jax.shard_map, mesh=submesh.mesh, check_vma=False)
    pools, ids = make_pools(submesh, LLAMA_3_8B, "bfloat16", 2, 512, POOL_SPEC), array(submesh, (64,), jnp.int32)

    def relocate(pools, ids):
        packed = pack_kv_pages(pools, ids, wire="int8")
        written, digests = unpack_kv_pages(pools, packed, ids[::-1])
        return written, packed.digests, digests

    sharded = cut(relocate, in_specs=(POOL_SPEC, WHOLE), out_specs=(POOL_SPEC, later, later))
    with jax.sharding.set_mesh(submesh.mesh):
        program: Any = jax.jit(sharded, donate_argnums=0).lower(pools, ids).compile()
    assert not [word for word in ("all-reduce", "all-gather", "collective-permute") if word in program.as_text()]
    assert program.memory_analysis().temp_size_in_bytes < 16 * MIB


@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_digests_of_what_landed_cost_one_reading_of_it(chip):
    submesh, layers, count = submesh_of(chip), 4, 64
    values = array(submesh, (layers, count, 8, 2, 16, 128), "bfloat16")
    with jax.sharding.set_mesh(submesh.mesh), traced_for("tpu" if chip == "v5e" else "gpu"):
        program: Any = jax.jit(partial(digest_pages, scales=None)).lower(values).compile()
    landed = values.size * values.dtype.itemsize
    assert program.memory_analysis().temp_size_in_bytes < landed / 16, "words are kept"
    entry = program.as_text().split("ENTRY", 1)[1].splitlines()
    (name,) = [line.split()[0] for line in entry if "parameter(0)" in line]
    readers = [line for line in entry if f"{name}," in line or f"{name})" in line]
    assert len(readers) == 1, readers
    if chip == "v5e":  # GPUs' programs say nothing of their bytes
        assert program.cost_analysis()["bytes accessed"] < 1.4 * landed
