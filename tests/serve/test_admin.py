"""The routes of whoever operates the server: JAX's profiler on demand, behind a key of its own."""

from __future__ import annotations

import io
import re
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.deploy.servers import front_settings
from jdisagg.serve.frontends.clients import read_keys
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability import tracing
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import toy_stack
from tests.serve.scripted import ScriptedService

KEY = "an admin key of some length"
ADMIN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = FrontSettings(api_key="client", admin_key=KEY)
    with serving(create_app(ScriptedService(), settings)) as url:
        yield url


def test_a_profile_shows_the_programs_that_ran_meanwhile(url: str) -> None:
    ended, program = threading.Event(), jax.jit(lambda x: jnp.sin(x @ x).sum())

    def work() -> None:
        while not ended.is_set():
            program(jnp.ones((64, 64))).block_until_ready()
            time.sleep(0.01)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        answer = httpx.post(f"{url}/admin/profile?seconds=1", headers=ADMIN, timeout=120)
    finally:
        ended.set()
        worker.join()
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        traces = [name for name in archive.namelist() if name.endswith(".xplane.pb")]
        assert len(traces) == 1 and b"jit_" in archive.read(traces[0])
        assert re.fullmatch(r"plugins/profile/jdisagg-profile-[\d-]+/router\.xplane\.pb", traces[0])


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer client"}, {"authorization": KEY}])
def test_a_clients_key_is_no_admin_key(url: str, headers: dict[str, str]) -> None:
    refused = httpx.post(f"{url}/admin/profile", headers=headers)
    assert refused.status_code == 401 and "admin key" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models", headers=ADMIN).status_code == 401, "nor the other way round"


@pytest.mark.parametrize("seconds", ["0", "61", "-1", "x", "1e3", "9" * 99])
def test_seconds_that_cannot_be_are_refused_with_the_bounds(url: str, seconds: str) -> None:
    refused = httpx.post(f"{url}/admin/profile", params={"seconds": seconds}, headers=ADMIN)
    assert refused.status_code == 400 and "from 1 to 60" in refused.json()["error"]["message"]


def test_there_is_one_profile_at_a_time(url: str) -> None:
    first = threading.Thread(target=tracing.device_trace, args=(1.0,))
    first.start()
    eventually(tracing._ONE.locked)
    refused = httpx.post(f"{url}/admin/profile?seconds=1", headers=ADMIN)
    first.join()
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "busy"


def test_without_an_admin_key_there_is_no_admin() -> None:
    with serving(create_app(ScriptedService(), FrontSettings())) as url:
        assert httpx.post(f"{url}/admin/profile", headers=ADMIN).status_code == 404


def test_the_key_named_admin_is_that_of_admin_and_no_clients(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("ann ann-key\nadmin a-key-of-some-length\n")
    with toy_stack() as stack:
        front = front_settings(stack.service, Settings(api_keys_file=str(path)))
    assert front.admin_key == "a-key-of-some-length" and front.api_keys == {"ann": "ann-key"}
    path.write_text("admin short\n")
    with pytest.raises(ConfigError, match="the key of admin has 5 characters, needs 16"):
        read_keys(str(path))
