"""Reads files that hold a secret, and refuses files that other users may read, as ssh does with its keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jdisagg.core.errors import ConfigError

OTHERS, GROUP = 0o007, 0o070


def read_private(flag: str, path: str) -> bytes:
    """Returns the bytes of the file that --flag names. Raises ConfigError, with the mode if other users may read it.

    A group may have rights on a file of another owner, because orchestrators mount secrets that way.
    """
    try:
        with Path(path).open("rb") as file:
            _check_mode(flag, path, os.fstat(file.fileno()))
            return file.read()
    except OSError as error:
        raise ConfigError(f"--{flag}={path}: {error.strerror}") from error


def _check_mode(flag: str, path: str, status: os.stat_result) -> None:
    forbidden = OTHERS | GROUP if status.st_uid == os.geteuid() else OTHERS
    if stat.S_ISREG(status.st_mode) and status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"--{flag}={path} has mode {mode:04o}, so others may read it: chmod 600 {path}")
