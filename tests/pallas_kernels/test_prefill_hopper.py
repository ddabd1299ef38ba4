"""Prefill attention on Hopper: by the interpreter, which sees races and what is out of bounds, and compiled to SASS.

What is out of bounds raises in one warpgroup and leaves the others waiting: no test provokes it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jdisagg.kv.pools import POOL_SPEC
from jdisagg.parallel.submesh import AXIS, WHOLE, StageMesh
from pallas_kernels import prefill_attention
from pallas_kernels.mosaic import BOX
from pallas_kernels.platforms import takes_mosaic
from pallas_kernels.prefill_attention import hopper
from pallas_kernels.quantized import quantize_pages
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import Shape, by_arrays, rest_slow
from tests.pallas_kernels.test_hopper import INTERPRETED
from tests.pallas_kernels.test_pack_aot import array, make_pools
from tests.pallas_kernels.test_paged_attention import SINKS
from tests.pallas_kernels.test_prefill_attention import check, inputs
from tests.pallas_kernels.tpu_modes import RACE

SMALL = hopper.Blocks(tile=64, stages=2)
# Rows of two warpgroups and of one, tiles that come into a buffer anew, a chunk that begins within a page.
CASES = [
    (Shape(64, 1, 4, 16), [(17, 140)], {}),
    (Shape(64, 2, 3, 128), [(3, 200), (0, 5), (2, 2)], {"window": 20, "sinks": SINKS[:6]}),
    (Shape(128, 1, 8, 32), [(9, 70)], {"soft_cap": 3.0}),
]


def attend(q, kv_pages, page_table, kv_lens, cu_q_lens, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "blocks": SMALL} | options
    arrays = q, kv_pages, page_table, kv_lens, cu_q_lens, sinks
    return by_arrays(hopper.prefill_attention)(*arrays, interpret=INTERPRETED, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "packed", "options"), CASES, ids=str)
def test_it_meets_the_oracle_without_a_race(shape, packed, options, capfd):
    check(attend, inputs(shape, packed, "bfloat16", padding=1), "bfloat16", **options)
    assert RACE not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [(Shape(64, 1, 4, 32), "int8", {}), (Shape(64, 1, 8, 64), "float8_e4m3fn", {"window": 20, "soft_cap": 3.0})],
    ids=str,
)
def test_codes_with_scales_meet_the_oracle_without_a_race(shape, dtype, options, capfd):
    q, pool, *rest = inputs(shape, [(9, 200)], "float32", padding=1)
    check(attend, (q.astype("bfloat16"), quantize_pages(pool, jnp.dtype(dtype)), *rest), "bfloat16", **options)
    assert RACE not in capfd.readouterr().out


def compiled(submesh: StageMesh, shape: Shape, attend=prefill_attention, spec=WHOLE, dtype: str = "bfloat16") -> str:
    (pool,) = make_pools(submesh, shape, dtype, 1, 4096, POOL_SPEC if spec != WHOLE else WHOLE)
    q = array(submesh, (2048, shape.kv_heads * shape.groups, shape.head_dim), "bfloat16", spec)
    ints = [array(submesh, size, jnp.int32) for size in ((4, 256), (4,), (5,))]
    with jax.sharding.set_mesh(submesh.mesh):
        return jax.jit(attend).lower(q, pool, *ints).compile().as_text() or ""


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    rest_slow(
        [
            (Shape(128, 8, 4, 16), "bfloat16", {}),
            (Shape(128, 8, 4, 32), "float8_e4m3fn", {}),
            (Shape(128, 8, 4, 64), "int8", {"window": 4096}),
            (Shape(64, 8, 8, 64), "bfloat16", {"soft_cap": 30.0}),
            (Shape(128, 1, 7, 128), "bfloat16", {"window": 4096}),
        ]
    ),
    ids=str,
)
def test_an_h100_gets_it_with_no_register_spilled(shape, dtype, options, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    assert "mosaic_gpu" in compiled(
        StageMesh(gpu_devices(1)), shape, partial(prefill_attention, **options), dtype=dtype
    )
    told = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in told.out + told.err


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.slow
def test_shards_of_heads_compile_apart():
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    submesh, heads = StageMesh(gpu_devices(4)), PartitionSpec(None, AXIS)
    specs = heads, POOL_SPEC, WHOLE, WHOLE, WHOLE
    cut = jax.shard_map(prefill_attention, mesh=submesh.mesh, in_specs=specs, out_specs=heads, check_vma=True)
    program = compiled(submesh, Shape(128, 8, 4, 16), cut, heads)
    assert "mosaic_gpu" in program and "all-gather" not in program


@pytest.mark.parametrize(
    ("kind", "mosaic"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA B200", False)],
)
@pytest.mark.parametrize("operation", ["paged_attention", "prefill_attention"])
def test_hopper_s_code_is_hopper_s_alone(kind, mosaic, operation):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    axes = (jax.sharding.AxisType.Auto,)
    q, pool = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((9, 2, 2, BOX, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axes, abstract_device=device)):
        assert takes_mosaic(operation, q, pool) is mosaic  # type: ignore[arg-type]
