"""Decode attention on Hopper: by the interpreter, which sees races and what is out of bounds, and compiled to SASS."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import PartitionSpec

from jdisagg.kv.pools import POOL_SPEC
from jdisagg.parallel.submesh import AXIS, WHOLE, StageMesh
from pallas_kernels import mosaic, paged_attention
from pallas_kernels.paged_attention import hopper
from pallas_kernels.platforms import gpu_generation, traced_for
from pallas_kernels.quantized import QuantizedPages, quantize_pages
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import (
    Shape,
    assert_close,
    by_arrays,
    decode_oracle,
    make_queries,
    plain_pool,
    rest_slow,
)
from tests.pallas_kernels.test_pack_aot import array, make_pools
from tests.pallas_kernels.test_paged_attention import SINKS, check, inputs
from tests.pallas_kernels.tpu_modes import RACE

INTERPRETED = InterpretGPUParams(detect_races=True)
CASES = [
    (Shape(64, 1, 4, 16), (3, 70, 0), {}),
    (Shape(64, 2, 4, 16), (3, 100, 0, 65), {"window": 20, "sinks": SINKS}),
    (Shape(128, 1, 8, 64), (3, 150), {"soft_cap": 3.0}),
    (Shape(128, 2, 4, 128), (130, 1), {}),
]


def attend(q, kv_pages, page_table, lengths, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": INTERPRETED} | options
    return by_arrays(hopper.paged_attention)(q, kv_pages, page_table, lengths, sinks, **options)


@pytest.mark.parametrize(("shape", "lengths", "options"), [pytest.param(*CASES[0]), *rest_slow(CASES[1:], 0)], ids=str)
def test_it_meets_the_oracle_without_a_race(shape, lengths, options, capfd):
    check(attend, inputs(shape, lengths, "bfloat16"), "bfloat16", **options)
    assert RACE not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    rest_slow(
        [(Shape(64, 1, 4, 32), "int8", {}), (Shape(128, 1, 4, 64), "float8_e4m3fn", {"window": 20, "soft_cap": 3.0})], 2
    ),
    ids=str,
)
def test_codes_with_scales_meet_the_oracle_without_a_race(shape, dtype, options, capfd):
    q, pool, *rest = inputs(shape, (3, 70, 0), "float32")
    check(attend, (q.astype("bfloat16"), quantize_pages(pool, jnp.dtype(dtype)), *rest), "bfloat16", **options)
    assert RACE not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_rows_of_a_draft_share_a_reading_and_have_the_bits_that_each_has_alone(window, capfd):
    """Cut alike; about a bound where one more tile or another cut begins; with nothing to see."""
    shape = Shape(64, 1, 2, 16)
    _, pool, table, _ = inputs(shape, (257, 130, 40), "bfloat16")
    lengths = jnp.asarray([255, 256, 257, 128, 129, 0, 1, 2, 40], jnp.int32)
    rows = jnp.asarray(make_queries(shape, 9), jnp.bfloat16)
    blocks = hopper.Blocks(parts=2, tiles=1, tile=64, warps=4, stages=2)
    together = attend(rows, pool, table, lengths, window=window, blocks=blocks)
    repeated = np.repeat(table, 3, axis=0)
    want = decode_oracle(np.asarray(rows, np.float32), plain_pool(pool), repeated, np.asarray(lengths), window=window)
    assert_close(together, want, "bfloat16")
    alone = attend(rows, pool, jnp.asarray(repeated), lengths, window=window, blocks=blocks)
    assert np.array_equal(np.asarray(alone, np.float32), np.asarray(together, np.float32))
    assert RACE not in capfd.readouterr().out


@pytest.mark.slow
def test_a_page_that_the_pool_has_not_raises():
    q, pool, table, lengths = inputs(CASES[0][0], (3, 70), "bfloat16")
    with pytest.raises(Exception, match=r"[Oo]ut-of-bounds|out of bounds"):
        jax.block_until_ready(attend(q, pool, table.at[1, 0].set(pool.shape[0] + 3), lengths))
    reset_gpu_interpret_mode_state()  # what an interpretation that raised leaves behind fails those after it


def compiled(
    submesh: StageMesh, shape: Shape, slots: int, attend=paged_attention, spec=WHOLE, dtype: str = "bfloat16", times=1
) -> Any:
    (pool,) = make_pools(submesh, shape, dtype, 1, 4096, POOL_SPEC if spec != WHOLE else WHOLE)
    q = array(submesh, (times * slots, shape.kv_heads * shape.groups, shape.head_dim), "bfloat16", spec)
    table, lengths = array(submesh, (slots, 256), jnp.int32), array(submesh, (times * slots,), jnp.int32)
    with jax.sharding.set_mesh(submesh.mesh), traced_for("gpu"):
        return jax.jit(attend).lower(q, pool, table, lengths).compile()


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(
    ("shape", "dtype", "times"),
    rest_slow(
        [
            (Shape(128, 8, 4, 16), "bfloat16", 1),
            (Shape(128, 8, 4, 32), "float8_e4m3fn", 5),
            (Shape(128, 8, 4, 32), "int8", 1),
            (Shape(64, 8, 8, 64), "bfloat16", 8),
            (Shape(64, 8, 8, 64), "float8_e4m3fn", 1),
            (Shape(128, 1, 64, 128), "bfloat16", 1),
        ],
        2,
    ),
    ids=str,
)
def test_an_h100_gets_it_with_no_register_spilled(shape, dtype, times, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    assert "mosaic_gpu" in compiled(StageMesh(gpu_devices(1)), shape, 64, dtype=dtype, times=times).as_text()
    told = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in told.out + told.err


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.slow
def test_shards_of_heads_compile_apart():
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    submesh, heads = StageMesh(gpu_devices(4)), PartitionSpec(None, AXIS)
    cut = jax.shard_map(
        paged_attention, mesh=submesh.mesh, in_specs=(heads, POOL_SPEC, WHOLE, WHOLE), out_specs=heads, check_vma=False
    )
    program = compiled(submesh, Shape(128, 8, 4, 16), 16, cut, heads)
    assert "mosaic_gpu" in program.as_text() and "all-gather" not in program.as_text()


@pytest.mark.parametrize(
    ("kind", "generation"),
    [("NVIDIA H100 80GB HBM3", 9), ("NVIDIA H200", 9), ("NVIDIA GH200 480GB", 9), ("NVIDIA A100-SXM4-80GB", 8),
     ("NVIDIA B200", 10), ("NVIDIA L40S", 8), ("cpu", None)],
)  # fmt: skip
def test_a_gpu_s_generation_is_read_from_its_name(kind, generation):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    axes = (jax.sharding.AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axes, abstract_device=device)):
        assert gpu_generation() == generation


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        (Shape(128, 8, 4, 16), "bfloat16", True),
        (Shape(128, 8, 4, 16), "float32", False),
        *[
            (each, "bfloat16", False)
            for each in (Shape(80, 8, 4, 16), Shape(256, 8, 4, 16), Shape(128, 8, 4, 4), Shape(128, 8, 4, 24))
        ],
    ],
    ids=str,
)
def test_what_does_not_fit_its_tiles_is_triton_s(shape, dtype, fits):
    q = jax.ShapeDtypeStruct((4, shape.kv_heads * shape.groups, shape.head_dim), jnp.dtype(dtype))
    pool = jax.ShapeDtypeStruct((9, shape.kv_heads, 2, shape.page_size, shape.head_dim), jnp.dtype(dtype))
    assert mosaic.fits(q, pool) is fits  # type: ignore[arg-type]


def test_a_pool_of_one_part_is_triton_s():
    q, pool = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((9, 2, 1, 16, 128), jnp.bfloat16)
    assert not mosaic.fits(q, pool)  # type: ignore[arg-type]


@pytest.mark.parametrize(("page_size", "fits"), [(32, True), (16, False)])  # 64 bytes of scales are no copy
def test_codes_fit_where_the_scales_of_a_page_fill_a_copy(page_size, fits):
    codes: Any = jax.ShapeDtypeStruct((9, 8, 2, page_size, 128), jnp.int8)
    q: Any = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    pool = QuantizedPages(codes, jax.ShapeDtypeStruct((9, 8, 2 * page_size), jnp.float32))  # type: ignore[arg-type]
    assert mosaic.fits_widened(q, pool) is fits and not mosaic.fits(q, pool)
