"""Clusters of processes, one a test file, and the compiled programs that all of them share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.cluster.processes import Cluster


@pytest.fixture(scope="session")
def compiled() -> Path:
    """That of all tests, kept from run to run."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[Cluster]:
    """Nothing is started yet."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), compiled)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a key and a certificate for this host that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=jdisagg", "-addext"]
    subprocess.run([*command, "subjectAltName=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True)
    return key, cert


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool
