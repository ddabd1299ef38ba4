"""Ctrl-C and SIGTERM while a command starts or stops: one line, an exit code that is not 0, and the end at once.

Only the standard library, so that a command can ask for it before it imports what takes seconds. The process ends
without Python's own tear-down: under threads that compile, that has ended in a segmentation fault.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar may have hidden it
_doing = "starting"


def end_at_once(doing: str) -> None:
    """From now on a signal ends the process with 128 + its number, and a line that says what it was `doing`."""
    global _doing  # noqa: PLW0603  # a signal handler is the whole process's
    _doing = doing
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def raise_again() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, and SIGTERM the end, as in any Python program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stdout is not None and sys.stdout.isatty():
        os.write(1, SHOW_CURSOR)
    os.write(2, f"jdisagg: interrupted while {_doing}\n".encode())
    os._exit(128 + number)
