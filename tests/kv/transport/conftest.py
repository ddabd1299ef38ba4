"""Whoever closes a transport collects garbage: what other files left is kept out of that."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_files_is_collected() -> Iterator[None]:
    """All that jax remembers of its programs is a second to walk through, dozens of times a file."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
