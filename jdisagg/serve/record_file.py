"""The journal's file under --record_dir: prompts are in it, so only its owner reads it; serving goes on without."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from jdisagg.core.errors import ConfigError
from jdisagg.core.journal import Header, Journal

log = logging.getLogger("jdisagg.journal")


def open_journal(header: Header, record_dir: str, dropped: Callable[[], None]) -> Journal:
    """A journal that also appends to a new file of the folder, where one is named. Raises ConfigError.

    `dropped` is told when the file takes no more (a full disk): the journal goes on in memory alone.
    """
    if not record_dir:
        return Journal(header)
    path = Path(record_dir) / f"journal-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _open_new(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--record_dir={record_dir}: {getattr(error, 'strerror', None) or error}") from error

    def drop(error: OSError) -> None:
        with contextlib.suppress(OSError):  # what it still held finds no room either
            file.close()
        log.error("%s takes no more: %s; the record ends there, serving goes on", path, error.strerror or error)
        dropped()

    try:
        return Journal(header, sink=lambda line: file.write(line + "\n"), dropped=drop)
    except OSError as error:
        raise ConfigError(f"--record_dir={record_dir}: {error.strerror}") from error


def _open_new(path: Path) -> TextIO:
    """For its owner alone, and never one that was there, or what a link leads to. Written line by line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
