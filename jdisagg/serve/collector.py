"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

# Containers that are there more than at the last collection, and younger collections before an older one. A step of
# hundreds of rows makes and drops more than Python's 700 at once: they were looked through over and over, and every
# few hundred dispatches all of them, for 20 ms and more on whichever thread made the last.
THRESHOLDS = 10_000, 10, 20


def settle() -> None:
    """All is loaded and compiled: what is there stays, and is looked through no more. A full collection looked through
    JAX's million objects too: streams stood still for most of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
