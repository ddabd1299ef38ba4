"""Eight virtual CPU devices for every test, a thread pool wide enough for collectives, compiled programs kept from run
to run (they make the engine's tests twice as fast), and the folder of traces."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("PJRT_NPROC", "32")
COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))  # for the processes that tests start as well
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data_dir", default="", help="folder of the public traces that tests/published reads")
