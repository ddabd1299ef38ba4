"""What keeps records of pages: one protocol for a worker's own tiers and for the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PoolFailed(OSError):
    """A pool that did not answer, or not in time."""


Good = tuple[bool, ...]  # of each page, in order


class Store(Protocol):
    """Called from reader threads; blocks. Raises OSError where the store does not answer."""

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Keeps u8[n, record_bytes] under these numbers (a worker's own) or names (the pool). Which it has taken."""
        ...

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        """Fills records; False for a page that is not there, or not as it was put: its record may hold anything."""
        ...

    def close(self) -> None: ...
