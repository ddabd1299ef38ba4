"""Prefill attention to latents on Hopper: by the interpreter, which sees races, and compiled to SASS."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import prefill_attention
from pallas_kernels.prefill_attention import hopper
from tests.pallas_kernels.gpu_target import gpu_devices
from tests.pallas_kernels.latents import LatentShape, pool_of_one_part, queries
from tests.pallas_kernels.shapes import assert_close, by_arrays, prefill_oracle, rest_slow
from tests.pallas_kernels.test_hopper import INTERPRETED
from tests.pallas_kernels.test_pack_aot import array
from tests.pallas_kernels.tpu_modes import RACE

# One token's heads in two blocks, of which the last ends with the chunk, and tiles that come into a buffer anew; blocks
# of several tokens that end with their sequence, and padding; fewer rows than 64.
CASES = [
    (LatentShape(128, 128, 72, 64), [(1, 200)], {"window": 150, "soft_cap": 3.0, "sinks": True}),
    (LatentShape(128, 192, 16, 16), [(5, 70), (1, 3)], {}),
    (LatentShape(256, 256, 8, 128), [(3, 130)], {"scale": 0.2}),
]


@pytest.mark.parametrize(("shape", "packed", "options"), rest_slow(CASES), ids=str)
def test_it_meets_the_oracle_without_a_race(shape, packed, options, capfd):
    rows, held = zip(*packed, strict=True)
    kv_lens, spans = np.asarray(held, np.int32), np.cumsum([0, *rows]).astype(np.int32)
    pool, table, plain = pool_of_one_part(shape, held, "bfloat16")
    q = jnp.asarray(queries(shape, int(spans[-1]) + (len(packed) > 1)), jnp.bfloat16)
    if options.get("sinks"):
        options = options | {"sinks": np.linspace(-2, 3, shape.heads).astype(np.float32)}
    named = {"scale": shape.size**-0.5, "window": None, "soft_cap": None} | options
    sinks = named.pop("sinks", None)
    attend = partial(by_arrays(hopper.prefill_attention), value_size=shape.value_size, interpret=INTERPRETED, **named)
    got = jax.jit(attend)(q, pool, table, kv_lens, spans, sinks)
    want = prefill_oracle(np.asarray(q, np.float32), plain, np.asarray(table), kv_lens, spans, **options)
    assert_close(got, want[..., : shape.value_size], "bfloat16")
    assert RACE not in capfd.readouterr().out


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(
    ("shape", "options"),
    rest_slow([
        (LatentShape(512, 576, 128, 64), {"scale": 0.1352}),
        (LatentShape(512, 576, 16, 16), {"window": 4096, "soft_cap": 30.0}),
    ]),
    ids=str,
)  # fmt: skip
def test_an_h100_gets_it_with_no_register_spilled_and_no_temporary(shape, options, monkeypatch, capfd):
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin is not installed: jdisagg[aot-gpu]")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    submesh = StageMesh(gpu_devices(1))
    arrays = [
        array(submesh, size, kind)
        for size, kind in [
            ((2048, shape.heads, shape.size), "bfloat16"),
            ((4096, 1, 1, shape.page_size, shape.size), "bfloat16"),
            *(((each), jnp.int32) for each in ((4, 256), (4,), (5,))),
        ]
    ]
    attend = partial(prefill_attention, value_size=shape.value_size, **options)
    with jax.sharding.set_mesh(submesh.mesh):
        program = jax.jit(attend).lower(*arrays).compile()
    assert "mosaic_gpu" in (program.as_text() or "")
    assert program.memory_analysis().temp_size_in_bytes < 1 << 20  # type: ignore[union-attr]
    told = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in told.out + told.err
