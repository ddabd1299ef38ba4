"""Runs every command: its help, the sources of its flags' values, its errors and its end by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from jdisagg import flags
from jdisagg.core.errors import JdisaggError

# Ctrl-C and SIGTERM while a command starts or stops: one line, a nonzero exit code, and an immediate end.
#
# This part uses only the standard library, so that a command can call it before its slow imports. The process ends
# without Python's own shutdown, which has ended in a segmentation fault while threads compiled.

INTERRUPTED = 130
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar may have hidden it
_doing = "starting"  # the current activity, for the message


def end_at_once(doing: str) -> None:
    """Makes a signal end the process at once with 128 + its number, and a line that says what it was `doing`."""
    global _doing  # noqa: PLW0603  # signal handlers are process-wide
    _doing = doing
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def raise_again() -> None:
    """Restores Python's default handling: Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stdout is not None and sys.stdout.isatty():
        os.write(1, SHOW_CURSOR)
    os.write(2, f"jdisagg: interrupted while {_doing}\n".encode())
    os._exit(128 + number)


BAD_USE = 2
PIPE_CLOSED = 141  # the exit code of a shell for SIGPIPE
Body = Callable[[flags.FlagValues], int]


def run(
    name: str,
    docstring: str | None,
    values: flags.FlagValues,
    argv: Sequence[str] | None,
    body: Body,
    *,
    positional: str = "",
    own_file: bool = False,
) -> int:
    """Returns the exit code of `body` with these flags, 2 with one line that begins with `name` for an error, 130 after
    Ctrl-C. `docstring`: the docstring of the command's file, which --help shows before the flags. `positional`: the
    flag that takes a bare argument. `own_file`: `body` reads the file of --config, which holds more than flags."""
    settings = "print_config" in values
    try:
        flags.read(values, sys.argv if argv is None else argv, positional)
        if values["help"].value or values["helpfull"].value:
            print(f"{(docstring or '').rstrip()}\n{flags.help_of(values, settings)}", flush=True)
            return 0
        if not own_file:
            flags.fill(values)
        if settings and values["print_config"].value:
            print(flags.as_toml(flags.settings_of(values)))
            return 0
        code = body(values)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return pipe_closed()
    except JdisaggError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def pipe_closed() -> int:
    """Returns the exit code for a closed pipe, as after `| head`, and redirects later output to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
