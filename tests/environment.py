"""What processes of the tests' own find in their environment.

XLA spends most of a test's time where it makes fast code of programs that run a few times: `QUICK_XLA` and
`JAX_DISABLE_MOST_OPTIMIZATIONS` make a program of the engine compile in a quarter of the time. Tests that hold what a
user's process does, or what is compiled for chips that are not here, go without (`as_users`, `no_kept_programs`).
"""

from __future__ import annotations

import os
from importlib.metadata import version

# Later compilers do not know the flag, and end a process that they are given it.
QUICK_XLA = "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""


def quick(**more: str) -> dict[str, str]:
    """For a process on as many CPU devices as it asks for, its programs compiled as the tests' own are."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA, **more}


def as_users(**more: str) -> dict[str, str]:
    """For a process on as many CPU devices as it asks for, its programs compiled as a user's are."""
    return quick(**{"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false", **more})
