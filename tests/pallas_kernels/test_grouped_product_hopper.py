"""The grouped product on Hopper: by the interpreter, which sees races and bounds, and compiled to SASS."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import grouped_product, tuning
from pallas_kernels.grouped_product import hopper, reference
from pallas_kernels.platforms import multiplies_by_mosaic
from pallas_kernels.tuning import MOSAIC
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import rest_slow
from tests.pallas_kernels.test_hopper import INTERPRETED
from tests.pallas_kernels.test_pack_aot import array
from tests.pallas_kernels.tpu_modes import RACE

ONE, TWO = hopper.Blocks(warpgroups=1, outputs=64, stages=2), hopper.Blocks(warpgroups=2, outputs=64, stages=2)
SHARED_BYTES = 227 << 10  # that a block may have


def drawn(sizes: list[int], beyond: int, *, out_first: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(7)
    matrices = random.normal(0, 1, (len(sizes), *((128, 192) if out_first else (192, 128))))
    x = random.normal(0, 1, (sum(sizes) + beyond, 192))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(matrices, jnp.bfloat16), jnp.asarray(sizes)


def multiplied(*arrays: jax.Array, blocks: hopper.Blocks = ONE, out_first: bool = False) -> np.ndarray:
    options: dict[str, Any] = {"blocks": blocks, "out_first": out_first, "interpret": INTERPRETED, "cores": 2}
    return np.asarray(hopper.grouped_product(*arrays, **options), np.float32)


# Empty groups, a group of several blocks, buffers that are filled anew, more blocks than programs and fewer.
@pytest.mark.parametrize(
    ("sizes", "blocks", "out_first"),
    rest_slow([([3, 0, 70, 1], ONE, False), ([130, 5], TWO, True), ([0, 0, 9], TWO, False), ([0], ONE, True)]),
    ids=str,
)
def test_it_meets_the_definition_without_a_race(sizes, blocks, out_first, capfd):
    arrays = drawn(sizes, 6, out_first=out_first)
    found = multiplied(*arrays, blocks=blocks, out_first=out_first)
    wanted = reference.grouped_product(*arrays, out_first=out_first)
    np.testing.assert_allclose(found, np.asarray(wanted, np.float32), atol=0.1, rtol=0.01)
    assert not found[sum(sizes) :].any()
    assert RACE not in capfd.readouterr().out


@pytest.mark.slow
def test_a_row_s_bits_depend_on_no_company_however_blocks_are_cut_and_whatever_is_no_number():
    x, matrices, _ = drawn([70, 9], 0)
    packed = multiplied(x, matrices, jnp.asarray([70, 9]), blocks=TWO)
    alone = multiplied(jnp.concatenate([x[66:70], x[:3] * jnp.nan]), matrices, jnp.asarray([4, 3]))
    assert np.array_equal(alone[:4], packed[66:70])
    assert np.isnan(alone[4:]).all()


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(
    ("matrices", "rows", "out_first"),
    rest_slow(
        [
            ((128, 2048, 1536), 512, False),
            ((128, 768, 2048), 32_768, False),
            ((32, 2880, 2880), 4096, True),  # blocks of 192 columns
            ((32, 2880, 5760), 128, False),
        ]
    ),
    ids=str,
)
def test_an_h100_gets_it_with_no_register_spilled(matrices, rows, out_first, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    submesh, inputs = StageMesh(gpu_devices(1)), matrices[2 if out_first else 1]
    shapes = ((rows, inputs), "bfloat16"), (matrices, "bfloat16"), (matrices[:1], jnp.int32)
    with jax.sharding.set_mesh(submesh.mesh):
        product = jax.jit(partial(grouped_product, out_first=out_first))
        assert "mosaic_gpu" in (product.lower(*(array(submesh, *each) for each in shapes)).compile().as_text() or "")
    captured = capfd.readouterr()
    told = captured.out + captured.err
    assert "0 bytes spill stores, 0 bytes spill loads" in told
    registers = re.search(r"Used (\d+) registers", told)
    assert registers and 90 <= int(registers[1]) <= 122, told  # as the kernel says of itself


@pytest.mark.parametrize("outputs", [64, 128, 192, 2880])
@pytest.mark.parametrize("rows", [1, 10_000])
def test_its_tiles_fit_shared_memory(rows, outputs):
    blocks = hopper.choose_blocks(rows, shape((8, 64, outputs)), out_first=False)
    tile = 2 * hopper.STEP * (blocks.rows + blocks.outputs)
    assert outputs % blocks.outputs == 0 and blocks.warpgroups == (1 if rows == 1 else 2)
    taken = blocks.stages * tile + 2 * blocks.rows * blocks.outputs
    assert taken <= 216 << 10 < SHARED_BYTES  # as the kernel says of itself
    assert blocks.stages == hopper.MOST_STAGES or taken + tile > hopper.mosaic.BLOCK_BYTES


def shape(dims: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def on_a(kind: str) -> Any:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    axes = (jax.sharding.AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axes, abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "matrices", "dtype", "mosaic"),
    [
        ("NVIDIA H200", (8, 64, 192), "bfloat16", True),
        ("NVIDIA A100-SXM4-80GB", (8, 64, 192), "bfloat16", False),
        ("NVIDIA B200", (8, 64, 192), "bfloat16", False),
        ("NVIDIA H200", (8, 64, 192), "float32", False),
        ("NVIDIA H200", (8, 720, 192), "bfloat16", False),
        ("NVIDIA H200", (8, 64, 1440), "bfloat16", False),
    ],
)
def test_bf16_and_whole_tiles_are_mosaic_s_on_hopper_however_many_rows_there_are(kind, matrices, dtype, mosaic):
    with on_a(kind):
        for rows in (1, 4096):
            assert multiplies_by_mosaic(shape((rows, matrices[1]), dtype), shape(matrices, dtype), False) is mosaic


def test_a_measured_choice_is_of_the_matrices_alone_and_says_whose_code_runs(monkeypatch):
    x, matrices = shape((4, 64)), shape((8, 64, 384))
    key = tuple(tuning.product_key(matrices, False))
    with on_a("NVIDIA H200"):
        monkeypatch.setattr(tuning, "TUNED", {key: {MOSAIC: 0}})
        assert not multiplies_by_mosaic(x, matrices, False) and multiplies_by_mosaic(x, shape((8, 384, 64)), False)
        monkeypatch.setattr(tuning, "TUNED", {key: {MOSAIC: 1, "outputs": 192}})
        assert multiplies_by_mosaic(x, matrices, False)
        assert [hopper.choose_blocks(rows, matrices, False).outputs for rows in (4, 4096)] == [192, 192]
