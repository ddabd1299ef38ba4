"""How a command here starts: flags of its own (imported commands don't share them), --help, one line for a mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from absl import flags

from benchmarks.http_client import HTTPFailed
from jdisagg.core.errors import JdisaggError

BAD_USE = 2
INTERRUPTED = 130


def run(main: Callable[[], int], values: flags.FlagValues, law: str | None, argv: Sequence[str]) -> int:
    """Exit code of `main` with `values` read from `argv`; `law` is what --help shows first.

    A mistake of the caller's is one line on stderr and exit code 2.
    """
    if "--help" in argv or "-h" in argv:
        print(f"{law or ''}\n{values.get_help(include_special_flags=False)}")
        return 0
    try:
        rest = values(list(argv))
        if len(rest) > 1:
            raise ValueError(f"{rest[1]!r} is not a flag; flags are written --name=value")
        return main()
    except (flags.Error, ValueError, OSError, HTTPFailed, JdisaggError) as error:
        print(f"{sys.orig_argv[2]}: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        return INTERRUPTED
