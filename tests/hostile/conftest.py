"""One server process a file, attacked by every test of it (see `bystander.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.bystander import Server, serving


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The file's server, with the flags of its FLAGS and the key of its KEY, where it has them."""
    flags, key = getattr(request.module, "FLAGS", ()), getattr(request.module, "KEY", "")
    with serving(tmp_path_factory.mktemp("server"), flags, key) as running:
        yield running
