"""Eight virtual CPU devices for every test, a thread pool wide enough for collectives, programs compiled quickly and
kept from run to run (they make the engine's tests twice as fast), and the folder of traces."""

import ctypes
import gc
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.environment import QUICK_XLA

MOST_MAPPINGS = 30_000  # of memory; Linux gives a process 65,530, and a compiled program takes several
MOST_BYTES, MORE_BYTES = 5 << 30, 1 << 30  # in use: once beyond the first, again for each of the second

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {QUICK_XLA}")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # see tests/environment.py
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")  # what is promoted is promoted on purpose, and so is
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")  # what is broadcast; in processes that tests start as well
# Examples are drawn and tried as fast as a shared machine lets them: its hiccups are nobody's fault.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Compiled programs lie beside the user's own: another clone finds them too. Imported here: jax comes with it.
    compile_cache = importlib.import_module("jdisagg.devices")
    folder = compile_cache.use(str(compile_cache.user_folder(os.environ) / "tests"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)  # for pytest-xdist and the processes that tests start
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first: of several processes none is left with a long one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Compiled programs go, between two files, before the kernel refuses their memory: XLA would crash there, and two
    processes that keep all of theirs fill a machine of 24 GiB."""
    if (nextitem is None or nextitem.path != item.path) and (mappings() > MOST_MAPPINGS or KEPT.is_too_much()):
        forget_programs()


def mappings() -> int:
    """Of memory, of this process; 0 where nobody says."""
    path = Path("/proc/self/maps")
    if not path.exists():
        return 0
    with path.open(encoding="utf-8") as lines:
        return sum(1 for _ in lines)


class Kept:
    """How much memory was in use when programs were forgotten last: what stays is not programs'."""

    def __init__(self) -> None:
        self.bytes = 0

    def is_too_much(self) -> bool:
        return resident_bytes() > max(MOST_BYTES, self.bytes + MORE_BYTES)


KEPT = Kept()


def resident_bytes() -> int:
    """Of this process; 0 where nobody says."""
    path = Path("/proc/self/statm")
    return int(path.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def forget_programs() -> None:
    """Of this process."""
    if "jax" not in sys.modules:
        return
    forget_what_tests_share()
    sys.modules["jax"].clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    KEPT.bytes = resident_bytes()


def forget_what_tests_share() -> None:
    """Machines are warm for all files, by `functools.cache`: without its programs one is warm no longer."""
    shared = [module for name, module in [*sys.modules.items()] if name.startswith("tests.")]
    for each in [each for module in shared for each in vars(module).values()]:
        if callable(clear := getattr(each, "cache_clear", None)):
            clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data_dir", default="", help="folder of the public traces that tests/published reads")
    parser.addoption("--screenshots", default="", help="folder for the pictures that tests of the page make")


@pytest.fixture(scope="module")
def no_kept_programs() -> Iterator[None]:
    """For programs of chips that are not here: jax keeps them and cannot read them back, which it warns of. They are
    compiled as for a user."""
    jax = importlib.import_module("jax")  # not at the top: the environment above comes first
    kept = importlib.import_module("jax.experimental.compilation_cache.compilation_cache")
    names = ("jax_enable_compilation_cache", "jax_disable_most_optimizations")
    before = {name: jax.config.values[name] for name in names}
    for name in names:
        jax.config.update(name, False)
    kept.reset_cache()  # else what was found out at the first program of the process stays
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    kept.reset_cache()
