"""Which platform's code of a kernel is traced: the one that the program is for, or every one where nobody said.

`jax.lax.platform_dependent` traces the code of all platforms and compiles one. Who knows what a program is compiled for
says so by `traced_for`, and the others' Pallas kernels, slow to trace, are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

_KNOWN: Any = jax.make_user_context(None)  # part of the key of jit's caches: what was traced for one is no other's
_AS_STORED: Any = jax.make_user_context(False)
_NAMES = {"gpu": "cuda"}  # of a device -> of a lowering rule


# Of NVIDIA's names, as "NVIDIA H100 80GB HBM3": the major compute capability.
_GENERATIONS = {
    r"\bA(10|16|2|30|40|100|800)\b": 8,
    r"\bL(4|20|40S?)\b": 8,
    r"\bG?H(20|100|200|800)\b": 9,
    r"\bG?B\d+\b": 10,
}


def gpu_generation() -> int | None:
    """Major compute capability of the GPU that is compiled for; None where there is none, or it is not known."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    return next((major for name, major in _GENERATIONS.items() if re.search(name, kind)), None)


def traced_for(platform: str | None) -> AbstractContextManager[None]:
    """What is traced inside is compiled for devices whose `platform` this is, "cpu", "gpu" or "tpu"; None: for any."""
    return _KNOWN(_NAMES.get(platform, platform) if platform else None)


def traced_platform() -> str | None:
    """As `traced_for` was told: "cpu", "gpu" or "tpu"; None where nobody said."""
    return next((name for name, rule in _NAMES.items() if rule == _KNOWN.value), _KNOWN.value)


def moved_as_stored(holds: bool) -> AbstractContextManager[None]:
    """What is traced inside is compiled so that bf16 and fp8 are moved as they are, on a CPU too: XLA's passes that
    widen them (`float-normalization-bf16`, `float-normalization-f8e4m3fn`) are left out."""
    return _AS_STORED(holds)


def widens() -> bool:
    """Whether XLA's CPU backend may convert all of a bf16 or fp8 array for a write of some of it."""
    return not _AS_STORED.value


def on_platform(*arguments: Any, default: Callable[..., Any], **platforms: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent`, of the one platform that `traced_for` named."""
    if _KNOWN.value is None:
        return jax.lax.platform_dependent(*arguments, default=default, **platforms)
    return platforms.get(_KNOWN.value, default)(*arguments)
