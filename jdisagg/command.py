"""One runner for every command: its help, where its flags' values come from, its errors, its end by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from jdisagg import flags
from jdisagg.core.errors import JdisaggError

# Ctrl-C and SIGTERM while a command starts or stops: one line, an exit code that is not 0, and the end at once.
#
# Only the standard library, so that a command can ask for it before it imports what takes seconds. The process
# ends without Python's own tear-down: under threads that compile, that has ended in a segmentation fault.

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


BAD_USE = 2
PIPE_CLOSED = 141  # as a shell calls SIGPIPE
Body = Callable[[flags.FlagValues], int]


def run(
    name: str,
    law: str | None,
    values: flags.FlagValues,
    argv: Sequence[str] | None,
    body: Body,
    *,
    positional: str = "",
    own_file: bool = False,
) -> int:
    """Exit code of `body` with these flags, 2 with one line that begins with `name` for a mistake, 130 after Ctrl-C.

    law: the docstring of the command's file, which --help shows before the flags. positional: the flag that a bare
    argument is the value of. own_file: `body` reads the file of --config, which holds more than flags.
    """
    settings = "print_config" in values
    try:
        flags.read(values, sys.argv if argv is None else argv, positional)
        if values["help"].value or values["helpfull"].value:
            print(f"{(law or '').rstrip()}\n{flags.help_of(values, settings)}", flush=True)
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
    """Exit code where nobody reads any more what is printed, as after `| head`; nothing is flushed into it later."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
