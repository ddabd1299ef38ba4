"""Records in the host's memory, which is taken as it is first written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jdisagg.kv.tiers.store import Good


class DramStore:
    """Implements `Store` by page numbers. The digests in the records guard them; nothing else writes here."""

    def __init__(self, num_pages: int, record_bytes: int) -> None:
        self._records = np.zeros((num_pages, record_bytes), np.uint8)

    def put(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        for page, record in zip(pages, records, strict=True):
            self._records[page] = record
        return (True,) * len(pages)

    def get(self, pages: Sequence[int], names: Sequence[bytes], records: np.ndarray) -> Good:
        for page, record in zip(pages, records, strict=True):
            record[:] = self._records[page]
        return (True,) * len(pages)

    def close(self) -> None:
        """Its memory goes with it."""
