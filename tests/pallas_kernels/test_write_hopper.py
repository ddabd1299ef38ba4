"""Page writes on Hopper: by the interpreter, which sees races and what is out of bounds, and compiled to SASS."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import mosaic, write_kv_pages
from pallas_kernels.platforms import traced_for
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.write_kv_pages import hopper, reference
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import Shape
from tests.pallas_kernels.test_hopper import INTERPRETED
from tests.pallas_kernels.test_pack_aot import array, make_pools
from tests.pallas_kernels.test_write_kv_pages import rows
from tests.pallas_kernels.tpu_modes import RACE

SMALL = Shape(32, 2, 1, 8)


def pool_of(shape: Shape, dtype: str, parts: int = 2) -> Any:
    numbers = jnp.zeros((10, shape.kv_heads, parts, shape.page_size, shape.head_dim), dtype)
    if dtype in ("float32", "bfloat16"):
        return numbers
    return QuantizedPages(numbers, jnp.zeros((10, shape.kv_heads, parts * shape.page_size), jnp.float32))


@pytest.mark.parametrize(
    ("dtype", "parts"), [("float32", 2), ("bfloat16", 1), ("int8", 2), ("float8_e4m3fn", 2)], ids=str
)
def test_every_row_lands_in_its_page_without_a_race(dtype, parts, capfd):
    k, v, pages, offsets = map(jnp.asarray, rows(SMALL, 12))
    pool, v, pages = pool_of(SMALL, dtype, parts), v if parts == 2 else None, pages.at[::5].set(0)
    got = hopper.write_kv_pages(pool, k, v, pages, offsets, interpret=INTERPRETED)
    want = reference.write_kv_pages(pool, k, v, pages, offsets)
    for part, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        found = np.asarray(part.astype(jnp.float32))
        assert np.array_equal(found[1:], np.asarray(wanted.astype(jnp.float32))[1:]) and not found[0].any()
    assert RACE not in capfd.readouterr().out


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_h100_writes_in_place_with_no_register_spilled(dtype, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    submesh, shape = StageMesh(gpu_devices(1)), Shape(128, 8, 1, 16)
    (pool,) = make_pools(submesh, shape, dtype, 1, 4096)
    new, ints = array(submesh, (64, 8, 128), "bfloat16"), array(submesh, (64,), jnp.int32)
    with jax.sharding.set_mesh(submesh.mesh), traced_for("gpu"):
        lowered = jax.jit(write_kv_pages, donate_argnums=0).lower(pool, new, new, ints, ints)
    program: Any = lowered.compile()
    memory, held = program.memory_analysis(), sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(pool))
    assert "mosaic_gpu" in program.as_text()
    assert memory.alias_size_in_bytes == held and memory.temp_size_in_bytes < 1 << 20
    told = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in told.out + told.err


@pytest.mark.parametrize(
    ("shape", "dtype", "copied"),
    [
        (Shape(128, 8, 1, 16), "bfloat16", True),
        (Shape(64, 2, 1, 4), "int8", True),
        (Shape(20, 2, 1, 16), "bfloat16", False),  # 40 bytes of a row
        (Shape(16, 1, 1, 16), "bfloat16", False),  # 64 bytes of a token
        (Shape(128, 8, 1, 512), "bfloat16", False),
    ],
    ids=str,
)
def test_rows_that_a_tma_does_not_take_are_left_to_xla(shape, dtype, copied):
    pool, new = jax.eval_shape(lambda: (pool_of(shape, dtype), jnp.zeros((3, shape.kv_heads, shape.head_dim))))
    assert mosaic.copies(new, pool) is copied
