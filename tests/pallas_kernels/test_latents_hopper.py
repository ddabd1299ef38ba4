"""Decode attention to latents on Hopper: by the interpreter, which sees races, and compiled to SASS."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import paged_attention
from pallas_kernels.mosaic import BOX
from pallas_kernels.paged_attention import hopper
from pallas_kernels.platforms import takes_mosaic
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.latents import LatentShape, pool_of_one_part, queries
from tests.pallas_kernels.shapes import assert_close, by_arrays, decode_oracle, rest_slow
from tests.pallas_kernels.test_hopper import INTERPRETED
from tests.pallas_kernels.test_pack_aot import array
from tests.pallas_kernels.tpu_modes import RACE

FEW_PARTS = hopper.Blocks(parts=2, tiles=1, tile=64, warps=4, stages=2)
CASES = [
    (LatentShape(128, 192, 6, 16), (3, 70, 0), {}),
    # Two blocks of rows, tiles that come into a buffer anew, parts that are joined.
    (LatentShape(128, 192, 70, 32), (200, 1), {"window": 150, "soft_cap": 3.0, "sinks": True}),
    (LatentShape(128, 128, 8, 64, kv_heads=2), (130,), {"scale": 0.2}),
]


@pytest.mark.parametrize(("shape", "lengths", "options"), rest_slow(CASES), ids=str)
def test_it_meets_the_oracle_without_a_race(shape, lengths, options, capfd):
    pool, table, plain = pool_of_one_part(shape, lengths, "bfloat16")
    q, lengths = jnp.asarray(queries(shape, len(lengths)), jnp.bfloat16), np.asarray(lengths, np.int32)
    if options.get("sinks"):
        options = options | {"sinks": np.linspace(-2, 3, shape.heads).astype(np.float32)}
    named = {"scale": shape.size**-0.5, "window": None, "soft_cap": None} | options
    sinks = named.pop("sinks", None)
    attend = partial(by_arrays(hopper.paged_attention), value_size=shape.value_size, blocks=FEW_PARTS, **named)
    got = jax.jit(partial(attend, interpret=INTERPRETED))(q, pool, table, lengths, sinks)
    want = decode_oracle(np.asarray(q, np.float32), plain, np.asarray(table), lengths, **options)
    assert_close(got, want[..., : shape.value_size], "bfloat16")
    assert RACE not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("heads", [5, 30])  # three rows of a slot in one block, and each by itself
def test_rows_of_a_draft_see_as_far_as_each_is_told(heads, capfd):
    shape = LatentShape(128, 128, heads, 32)
    pool, table, plain = pool_of_one_part(shape, (130,), "bfloat16")
    q, lengths = jnp.asarray(queries(shape, 3), jnp.bfloat16), np.asarray((128, 129, 0), np.int32)
    options = {"scale": 0.1, "window": None, "soft_cap": None, "value_size": shape.value_size, "blocks": FEW_PARTS}
    got = by_arrays(hopper.paged_attention)(q, pool, table, lengths, None, interpret=INTERPRETED, **options)
    seen = np.repeat(np.asarray(table), 3, axis=0)
    want = decode_oracle(np.asarray(q, np.float32), plain, seen, lengths, scale=0.1)
    assert_close(got, want[..., : shape.value_size], "bfloat16")
    assert RACE not in capfd.readouterr().out


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(
    ("shape", "times", "options"),
    rest_slow([
        (LatentShape(512, 576, 128, 64), 1, {"scale": 0.1352}),
        (LatentShape(512, 576, 16, 16), 4, {"window": 4096, "soft_cap": 30.0}),
    ]),
    ids=str,
)  # fmt: skip
def test_an_h100_gets_it_with_no_register_spilled(shape, times, options, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    submesh = StageMesh(gpu_devices(1))
    arrays = [
        array(submesh, size, kind)
        for size, kind in [
            ((64 * times, shape.heads, shape.size), "bfloat16"),
            ((4096, 1, 1, shape.page_size, shape.size), "bfloat16"),
            ((64, 256), jnp.int32),
            ((64 * times,), jnp.int32),
        ]
    ]
    attend = partial(paged_attention, value_size=shape.value_size, **options)
    with jax.sharding.set_mesh(submesh.mesh):
        assert "mosaic_gpu" in (jax.jit(attend).lower(*arrays).compile().as_text() or "")
    told = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in told.out + told.err


@pytest.mark.parametrize(
    ("shape", "dtype", "mine"),
    [
        (LatentShape(512, 576, 128, 64), "bfloat16", True),
        (LatentShape(512, 576, 20, 64), "bfloat16", True),
        (LatentShape(512, 576, 128, 64), "float32", False),
        (LatentShape(448, 512, 128, 64), "bfloat16", False),  # no two halves of whole swizzles
        (LatentShape(512, 576, 128, 24), "bfloat16", False),
        (LatentShape(512, 640, 128, 64), "bfloat16", False),  # more than a block's shared memory
    ],
    ids=str,
)
@pytest.mark.parametrize("operation", ["paged_attention", "prefill_attention"])
def test_rows_that_do_not_fit_and_chunks_of_heads_that_fill_no_box_are_triton_s(shape, dtype, mine, operation):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")
    axes = (jax.sharding.AxisType.Auto,)
    q = jax.ShapeDtypeStruct((4, shape.heads, shape.size), jnp.dtype(dtype))
    pool = jax.ShapeDtypeStruct((9, 1, 1, shape.page_size, shape.size), jnp.dtype(dtype))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axes, abstract_device=device)):
        found = takes_mosaic(operation, q, pool, shape.value_size)  # type: ignore[arg-type]
    assert found is (mine and (operation == "paged_attention" or shape.heads % BOX == 0))
