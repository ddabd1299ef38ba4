"""Packing on Hopper and the way back: by the interpreter, which sees races and what is out of bounds, and compiled to
SASS."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import mosaic
from pallas_kernels.pack_kv_pages import hopper as pack_hopper
from pallas_kernels.platforms import traced_for
from pallas_kernels.unpack_kv_pages import hopper as unpack_hopper
from pallas_kernels.wire_format import PackedPages
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.shapes import Shape, rest_slow
from tests.pallas_kernels.test_hopper import INTERPRETED
from tests.pallas_kernels.test_pack_aot import compile_both, make_pools
from tests.pallas_kernels.test_pack_kv_pages import check_pack, check_unpack
from tests.pallas_kernels.tpu_modes import RACE

PACK = partial(pack_hopper.pack_kv_pages, interpret=INTERPRETED, layers_of_call=1)
UNPACK = partial(unpack_hopper.unpack_kv_pages, interpret=INTERPRETED, layers_of_call=1)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    rest_slow([(Shape(64, 1, 1, 8), "bfloat16"), (Shape(32, 2, 1, 8), "float32"), (Shape(128, 1, 1, 64), "bfloat16")]),
    ids=str,
)
def test_pages_are_the_definition_to_the_bit_without_a_race(shape, dtype, capfd):
    check_pack(PACK, shape, dtype, "raw")
    check_unpack(partial(UNPACK, wire="raw"), shape, dtype, "raw", dtype)
    assert RACE not in capfd.readouterr().out


def test_padding_writes_nothing_to_the_null_page():
    pool = jnp.ones((3, 1, 2, 8, 64), jnp.float32)
    packed = PackedPages(jnp.full((1, 2, 1, 2, 8, 64), 7.0), None, None)
    (written,), _ = UNPACK([pool], packed, jnp.array([0, 2], jnp.int32), wire="raw", digests=False)
    assert (written[:2] == 1).all() and (written[2] == 7).all()


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float32", "float8_e4m3fn"]))
def test_an_h100_moves_pages_in_place_with_no_register_spilled(dtype, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    submesh = StageMesh(gpu_devices(1))
    pools = make_pools(submesh, Shape(128, 8, 1, 32), dtype, 2, 2048)
    with traced_for("gpu"):
        programs = compile_both(submesh, pools, pools, "raw")
    for program in programs:
        assert program.as_text().count('custom_call_target="mosaic_gpu') == 1
        assert program.memory_analysis().temp_size_in_bytes < 1 << 20
    told = capfd.readouterr()
    assert (told.out + told.err).count("0 bytes spill stores, 0 bytes spill loads") == 2


@pytest.mark.parametrize(
    ("shape", "packed", "carried"),
    [
        (Shape(128, 8, 1, 16), "bfloat16", True),
        (Shape(128, 8, 1, 16), "int8", False),
        (Shape(20, 8, 1, 16), "bfloat16", True),
        (Shape(20, 8, 1, 2), "bfloat16", False),  # 80 numbers of a head's page
        (Shape(256, 8, 1, 128), "bfloat16", False),  # 128 KiB of it
    ],
    ids=str,
)
def test_pages_that_are_converted_or_large_are_left_to_xla(shape, packed, carried):
    pool = jax.ShapeDtypeStruct((9, shape.kv_heads, 2, shape.page_size, shape.head_dim), jnp.bfloat16)
    rows: Any = jax.ShapeDtypeStruct((5, shape.kv_heads, shape.head_dim), jnp.dtype(packed))
    assert mosaic.carries(rows, pool) is carried  # type: ignore[arg-type]
