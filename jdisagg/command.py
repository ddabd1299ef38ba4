"""One runner for every command: its help, where its flags' values come from, its errors, its end by Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from jdisagg import config, flags, interrupts
from jdisagg.core.errors import JdisaggError

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
            config.fill(values)
        if settings and values["print_config"].value:
            print(config.as_toml(config.settings_of(values)))
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
        return interrupts.INTERRUPTED


def pipe_closed() -> int:
    """Exit code where nobody reads any more what is printed, as after `| head`; nothing is flushed into it later."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED
