"""Programs are traced for the platform they run on, and for no other."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jdisagg.parallel.submesh import StageMesh
from pallas_kernels import pack_kv_pages
from pallas_kernels.pack_kv_pages import hopper, tpu
from pallas_kernels.platforms import on_platform, traced_for


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("traced")


def doubled_on_tpus(x: jax.Array) -> jax.Array:
    return on_platform(x, tpu=lambda x: 2 * x, cuda=lambda x: 3 * x, default=lambda x: x)


def test_the_platform_that_was_named_is_traced_and_others_are_not():
    with traced_for("cpu"):
        assert on_platform(jnp.ones(()), tpu=never, cuda=never, default=lambda x: x) == 1
    with pytest.raises(AssertionError, match="traced"):
        jax.jit(lambda x: on_platform(x, tpu=never, default=lambda x: x)).trace(jnp.ones(()))


def test_what_was_traced_for_one_platform_is_not_taken_for_another():
    """A function jitted inside a program is traced once for all programs of one platform, and anew for the next."""
    inner, found = jax.jit(doubled_on_tpus), {}
    for platform in ("tpu", "cpu", "gpu", None, "tpu"):
        with traced_for(platform):
            found[platform] = float(inner(jnp.ones(())))
    assert found == {"tpu": 2, "cpu": 1, "gpu": 3, None: 1}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_program_of_cpu_devices_traces_no_kernel_of_other_platforms(shards: int, monkeypatch: pytest.MonkeyPatch):
    for module in (tpu, hopper):
        monkeypatch.setattr(module, "pack_kv_pages", never)
    submesh = StageMesh(jax.devices()[:shards])
    specs = (P(None, "tp"), P()), P(None, None, "tp")
    program = submesh.program(lambda pool, ids: pack_kv_pages([pool], ids, digests=False).values, *specs)
    arguments = jnp.zeros((3, 2, 2, 8, 64)), jnp.zeros(2, jnp.int32)
    assert program.lower(*arguments).as_text()
    with pytest.raises(AssertionError, match="traced"):
        jax.jit(lambda pool, ids: pack_kv_pages([pool], ids)).trace(*arguments)
