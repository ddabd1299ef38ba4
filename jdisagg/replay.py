"""`python -m jdisagg.replay PATH`: takes a recorded journal through fresh actors and compares every decision.

With --virtual its events are not handed over: the simulator makes them again from the actors' own effects, and takes of
the journal what came from outside, the tokens drawn, and how long things took (`sim/rerun.py`).

Exit code 0 and "N events, same decisions", or 1 and the first event that led to something else, or 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from jdisagg.core.codec import encode
from jdisagg.core.errors import JournalError
from jdisagg.core.journal import Header, Recorded, digest, read_lines
from jdisagg.sim.follow import actors_of, decide
from jdisagg.sim.rerun import rerun


def replay(header: Header, entries: Iterable[Recorded]) -> int:
    """The number of events whose decisions were the same. Raises JournalError at the first that differs."""
    actors = actors_of(header)
    number = 0
    for number, entry in enumerate(entries, 1):
        effects = decide(actors, entry, number)
        if digest(effects) != entry.decided:
            raise JournalError(
                f"line {entry.line}: event {number}, at {entry.at_s} s, {entry.actor}: {encode(entry.event)}\n"
                f"led to effects with the digest {entry.decided}; now it leads to {digest(effects)}:\n"
                + "\n".join(f"  {encode(effect)}" for effect in effects)
            )
    return number


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="jdisagg.replay", description="Replay a journal to the same decisions.")
    parser.add_argument("path", type=Path, help="a file that --record_dir kept")
    parser.add_argument("--virtual", action="store_true", help="decide again in the simulator, on measured durations")
    given = parser.parse_args(arguments)
    path: Path = given.path
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        print(f"cannot open {path}: {error.strerror}", file=sys.stderr)
        return 2
    with lines:
        try:
            if given.virtual:
                print(f"{len(rerun(*read_lines(lines)).entries)} events, same decisions in virtual time")
            else:
                print(f"{replay(*read_lines(lines))} events, same decisions")
        except (JournalError, OSError, UnicodeDecodeError) as error:
            what = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
            print(f"{path}: {what}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
