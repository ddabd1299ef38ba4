"""Replays a recorded journal through new actors and compares every decision.

    python -m jdisagg replay JOURNAL [--virtual] [--perfetto=FILE] [--fingerprint=HEX]

With --virtual the simulator makes the events itself from the actors' own effects, and takes from the journal only
the external events, the sampled tokens, and how long things took (`sim/rerun.py`). With --perfetto=FILE the run is
written as a trace for Perfetto, up to the first different decision. With --fingerprint=HEX, as /health shows it, a
journal of another model is refused.

Exit code: 0 and "N events, same decisions", 1 and the first event with different effects, or 2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from jdisagg import command, flags
from jdisagg.core.codec import encode
from jdisagg.core.errors import ConfigError, FlagError, JournalError
from jdisagg.core.journal import Header, Recorded, digest, read_lines
from jdisagg.serve.frontends.text import dump
from jdisagg.serve.observability.records import Records
from jdisagg.sim.rerun import actors_of, decide, rerun

DIFFERENT = 1
Observer = Callable[[str, Any, float], None]  # (actor, event or effect, when)
MOST_REQUESTS, MOST_STEPS = 10_000, 1_000_000  # of a trace: the last ones


def replay(header: Header, entries: Iterable[Recorded], observe: Observer = lambda actor, item, at_s: None) -> int:
    """Returns the number of events, all with the same decisions. Raises JournalError at the first that differs.
    `observe` gets every event, and every effect that followed."""
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
        for item in (entry.event, *effects):
            observe(entry.actor, item, entry.at_s)
    return number


def declare() -> flags.FlagValues:
    values = flags.own()
    absl_flags.DEFINE_string("journal", "", "a file that --record_dir kept; needs no name", flag_values=values)
    absl_flags.DEFINE_bool("virtual", False, "decide again in the simulator, on measured durations", flag_values=values)
    absl_flags.DEFINE_string("perfetto", "", "file for a trace that ui.perfetto.dev opens", flag_values=values)
    meaning = "refuse a journal whose model has another fingerprint than this, which /health shows"
    absl_flags.DEFINE_string("fingerprint", "", meaning, flag_values=values)
    return values


def body(values: flags.FlagValues) -> int:
    if not values.journal:
        raise FlagError("needed: the journal, a file that --record_dir kept")
    path = Path(values.journal)
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    with lines:
        try:
            header, entries = read_lines(lines)
            check_model(header, values.fingerprint)
            if values.virtual:
                summary_line = f"{len(rerun(header, entries).entries)} events, same decisions in virtual time"
            else:
                summary_line = f"{_replay_and_trace(header, entries, values.perfetto)} events, same decisions"
            print(f"{summary_line}; model {header.model}" if header.model else summary_line)
        except (JournalError, OSError, UnicodeDecodeError) as error:
            what = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
            print(f"{path}: {what}", file=sys.stderr)
            return DIFFERENT
    return 0


def check_model(header: Header, fingerprint: str) -> None:
    """Raises JournalError with both fingerprints if the journal's model is not the requested one; "" accepts any."""
    found = header.model_fingerprint
    if fingerprint and (not found or not fingerprint.startswith(found)):
        raise JournalError(f"line 1: the journal is of the model {header.model or 'unknown'}, not of {fingerprint}")


def _replay_and_trace(header: Header, entries: Iterable[Recorded], perfetto: str) -> int:
    """Replays as `replay`, and writes the trace if one is requested. Raises ConfigError if it cannot be written."""
    records = Records(keep=MOST_REQUESTS, steps=MOST_STEPS)
    count = replay(header, entries, records.observe if perfetto else lambda actor, item, at_s: None)
    if perfetto:
        try:
            Path(perfetto).write_text(dump(records.window(-math.inf, math.inf)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--perfetto={perfetto}: {error.strerror}") from error
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the head of this file lists the exit codes."""
    return command.run("jdisagg replay", __doc__, declare(), argv, body, positional="journal")


if __name__ == "__main__":
    sys.exit(main())
