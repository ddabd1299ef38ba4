"""Eight virtual CPU devices for every test, a thread pool wide enough for collectives, and the folder of traces."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("PJRT_NPROC", "32")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data_dir", default="", help="folder of the public traces that tests/published reads")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked hostile runs only where -m names it."""
    if "hostile" in config.option.markexpr:
        return
    left = [item for item in items if item.get_closest_marker("hostile")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
