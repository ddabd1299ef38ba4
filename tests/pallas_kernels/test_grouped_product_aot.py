"""The grouped product compiled to the end for an H100 and TPUs that are not there: no matrix is copied."""

import math
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jdisagg.parallel.submesh import WHOLE, StageMesh
from pallas_kernels import grouped_product
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import rest_slow
from tests.pallas_kernels.tpu_modes import tpu_devices

pytestmark = pytest.mark.usefixtures("no_kept_programs")
needs_cuda = pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="pip install 'jdisagg[aot-gpu]'")
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="pip install 'jdisagg[aot-tpu]'")
MIB = 2**20
QWEN3, QWEN3_DOWN = (128, 2048, 1536), (128, 768, 2048)  # experts, inputs, outputs
GPT_OSS, GPT_OSS_DOWN, MIXTRAL_DOWN = (32, 2880, 5760), (32, 2880, 2880), (8, 14_336, 4096)


def compiled(
    submesh: StageMesh, experts: int, inputs: int, outputs: int, rows: int, dtype: str = "bfloat16", out_first=False
) -> Any:
    def array(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(submesh.mesh, WHOLE))

    matrix = (outputs, inputs) if out_first else (inputs, outputs)
    arrays = array((rows, inputs), dtype), array((experts, *matrix), dtype), array((experts,), jnp.int32)
    with jax.sharding.set_mesh(submesh.mesh):
        return jax.jit(partial(grouped_product, out_first=out_first)).lower(*arrays).compile()


@needs_cuda
@pytest.mark.parametrize(
    ("shape", "rows", "more"),
    rest_slow(
        [
            (QWEN3, 1024, {}),
            (GPT_OSS, 64, {}),
            (QWEN3_DOWN, 16_384, {}),
            (GPT_OSS_DOWN, 8, {}),
            (MIXTRAL_DOWN, 4096, {}),
            (QWEN3, 128, {"out_first": True}),
            (QWEN3_DOWN, 1024, {"dtype": "float32"}),
        ]
    ),
    ids=str,
)
def test_a_gpu_copies_no_matrix(shape: tuple[int, int, int], rows: int, more: dict[str, Any]):
    """Mosaic GPU multiplies in bf16; in f32 XLA does, block by block: its own grouped product takes 400 MiB there."""
    program = compiled(StageMesh(gpu_devices(1)), *shape, rows, **more)
    text, mosaic = program.as_text(), more.get("dtype") != "float32"
    assert "__gpu$xla.gpu.triton" not in text and "triton_kernel_call" not in text
    assert ("mosaic_gpu" in text) is mosaic
    activations = 3 * rows * max(shape[1:]) * (4 if more.get("dtype") == "float32" else 2)
    one_matrix = 0 if mosaic else 4 * math.prod(shape[1:])
    assert program.memory_analysis().temp_size_in_bytes < 2 * MIB + activations + one_matrix


@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "shape", "rows"),
    rest_slow([("v6e", GPT_OSS, 64), ("v6e", QWEN3, 1024), ("v6e", GPT_OSS_DOWN, 4096), ("v5e", GPT_OSS, 4096)]),
    ids=str,
)
def test_a_tpu_copies_no_matrix_whatever_its_sides(chip: str, shape: tuple[int, int, int], rows: int):
    """By XLA's own product: gpt-oss' 2,880 channels are no whole number of lanes."""
    program = compiled(StageMesh(tpu_devices(chip, 1)), *shape, rows)
    assert program.memory_analysis().temp_size_in_bytes < 2 * MIB + 3 * rows * max(shape[1:]) * 4
