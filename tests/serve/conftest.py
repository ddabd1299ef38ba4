"""One real HTTP server a test file, over a service whose script each test may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.chromium import chromium
from tests.serve.live_http import Front, serving
from tests.serve.live_tools import tools_front
from tests.serve.live_toy import ToyStack, toy_stack
from tests.serve.scripted import ScriptedService, echo


@pytest.fixture(scope="module")
def served() -> Iterator[Front]:
    service = ScriptedService()
    settings = FrontSettings(served_names=("also-tiny",), max_body_bytes=100_000)
    with serving(create_app(service, settings)) as url:
        yield Front(service, url)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One whose model thinks and calls tools."""
    with tools_front(tmp_path_factory.mktemp("model") / "tiny") as front:
        yield front


@pytest.fixture
def front(served: Front) -> Front:
    """The file's server, its service as new."""
    service = served.service
    service.script, service.ready, service.draining = echo, True, False
    service.seen.clear()
    return served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest) -> str:
    """Where pictures for the docs go; empty where none are asked for."""
    return str(request.config.getoption("--screenshots"))


@pytest.fixture(scope="module")
def stack() -> Iterator[ToyStack]:
    """The file's toy workers, without a server."""
    with toy_stack() as stack:
        yield stack
