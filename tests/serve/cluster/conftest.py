"""Clusters of processes, one a test file, and the compiled programs that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.cluster.processes import Cluster


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[Cluster]:
    """Nothing is started yet."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), compiled)
    yield cluster
    cluster.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool
