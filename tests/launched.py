"""`python -m jdisagg.launch` in this process, for what ends before anything is loaded: a process takes seconds."""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass

from jdisagg.launch import main


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def launch_here(*arguments: str) -> Ended:
    """What the process would have said; the log is left as it was."""
    root, out, err = logging.getLogger(), io.StringIO(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["launch", *arguments])
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return Ended(code, out.getvalue(), err.getvalue())
