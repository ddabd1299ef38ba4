"""A disk that is full, for one test: files may grow to so many bytes and no further."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Writing on beyond `num_bytes` of any file fails in this process, in the middle of a write as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
