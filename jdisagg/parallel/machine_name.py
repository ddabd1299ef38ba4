"""What a machine and its compiler are called where something is kept that is for no other."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax


def machine_name() -> str:
    """Programs are for one kind of processor and one compiler: a home folder that machines share has one for each."""
    words = [platform.machine(), _processor(), jax.__version__, version("jaxlib")]
    return f"jax-{jax.__version__}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}"


@cache
def has_feature(name: str) -> bool:
    """Whether this machine's processor says that it has it, in the words of Linux ("avx512f")."""
    return name in _processor().split()


def _processor() -> str:
    """What the processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
