"""Pools of single bytes that Triton's offsets do not reach are left to XLA, and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels.paged_attention import gpu
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.triton_attention import offsets_reach
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import by_arrays
from tests.pallas_kernels.test_pack_aot import array

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gib", "dtype", "reached"),
    [(2, "int8", True), (3, "int8", False), (3, "float8_e4m3fn", False), (4, "int8", False), (5, "int8", True),
     (3, "bfloat16", True), (40, "float32", True)],
)  # fmt: skip
def test_offsets_end_between_2_and_4_gib_of_bytes_alone(gib, dtype, reached):
    assert offsets_reach(gib * GIB // jnp.dtype(dtype).itemsize, dtype) is reached
    assert offsets_reach(2 * GIB + 1, "int8") is False and offsets_reach(4 * GIB + 1, "int8") is True


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(("gib", "kernels"), [(2, True), (3, False), (5, True)])
def test_a_pool_of_bytes_is_read_by_the_kernel_unless_it_is_of_2_to_4_gib(gib, kernels):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    submesh, pages = StageMesh(gpu_devices(1)), gib * GIB // (8 * 2 * 32 * 128)
    codes: Any = array(submesh, (pages, 8, 2, 32, 128), jnp.int8)
    scales: Any = array(submesh, (pages, 8, 64), jnp.float32)
    ints = array(submesh, (4, 8), jnp.int32), array(submesh, (4,), jnp.int32)
    attend = by_arrays(gpu.paged_attention)
    with jax.sharding.set_mesh(submesh.mesh):
        lowered = jax.jit(attend).lower(array(submesh, (4, 32, 128), "bfloat16"), QuantizedPages(codes, scales), *ints)
    assert ("triton" in lowered.as_text()) is kernels
