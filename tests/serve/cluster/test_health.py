"""The health port of a process with workers alone says what its supervisor has to know, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.serve.cluster.worker_process import HealthServer
from tests.serve.cluster.processes import status


class Told:
    live, ready = True, False


@pytest.fixture
def server() -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, {"/live": lambda: Told.live, "/ready": lambda: Told.ready})
    server.start()
    yield server
    server.stop()


def test_each_probe_is_answered_by_what_is_true_at_that_moment(server: HealthServer, monkeypatch: pytest.MonkeyPatch):
    url = f"http://127.0.0.1:{server.port}"
    assert (status(f"{url}/live"), status(f"{url}/ready?verbose"), status(f"{url}/metrics")) == (200, 503, 404)
    monkeypatch.setattr(Told, "ready", True)
    monkeypatch.setattr(Told, "live", False)
    assert (status(f"{url}/live"), status(f"{url}/ready")) == (503, 200)


def test_who_connects_and_says_nothing_keeps_no_probe_waiting(server: HealthServer):
    with socket.create_connection(("127.0.0.1", server.port)):
        assert status(f"http://127.0.0.1:{server.port}/live") == 200


def test_a_port_in_use_is_refused_with_what_to_change(server: HealthServer):
    with pytest.raises(ConfigError, match=rf"--health_port={server.port}: cannot listen .* give this process another"):
        HealthServer("127.0.0.1", server.port, {})


def test_a_server_that_was_never_started_stops():
    server = HealthServer("127.0.0.1", 0, {})
    server.stop()
    again = HealthServer("127.0.0.1", server.port, {})
    assert again.port == server.port, "its port is free"
    again.stop()
