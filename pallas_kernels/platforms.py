"""Which platform's code of a kernel is traced: the one that the program is for, or every one where nobody said.

`jax.lax.platform_dependent` traces the code of all platforms and compiles one. Who knows what a program is compiled for
says so by `traced_for`, and the others' Pallas kernels, slow to trace, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

_KNOWN: Any = jax.make_user_context(None)  # part of the key of jit's caches: what was traced for one is no other's
_NAMES = {"gpu": "cuda"}  # of a device -> of a lowering rule


def traced_for(platform: str | None) -> AbstractContextManager[None]:
    """What is traced inside is compiled for devices whose `platform` this is, "cpu", "gpu" or "tpu"; None: for any."""
    return _KNOWN(_NAMES.get(platform, platform) if platform else None)


def on_platform(*arguments: Any, default: Callable[..., Any], **platforms: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent`, of the one platform that `traced_for` named."""
    if _KNOWN.value is None:
        return jax.lax.platform_dependent(*arguments, default=default, **platforms)
    return platforms.get(_KNOWN.value, default)(*arguments)
