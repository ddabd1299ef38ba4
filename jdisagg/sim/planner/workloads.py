"""Workloads by their text: a file of one of the public formats, or a mix of lengths."""

from __future__ import annotations

import re

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces import Trace, read_azure, read_lengths, read_mooncake, spread_ticks

READERS = {"azure": read_azure, "mooncake": lambda path: spread_ticks(read_mooncake(path)), "lengths": read_lengths}
_PART = re.compile(r"(\d+)\+(\d+)(?:@([0-9.]+))?")
MIX_ROWS = 1000  # shares are kept to a thousandth


def read_workload(text: str) -> Trace:
    """KIND:FILE, or mix:INPUT+OUTPUT@SHARE,... Raises ConfigError with what was given."""
    kind, _, rest = text.partition(":")
    if kind == "mix" and rest:
        return _mix(rest)
    if kind not in READERS or not rest:
        kinds = ", ".join(READERS)
        raise ConfigError(f"--trace={text!r}: write KIND:FILE, KIND one of {kinds}, or mix:INPUT+OUTPUT@SHARE,...")
    return READERS[kind](rest)


def _mix(text: str) -> Trace:
    """Rows of each part in proportion to its share; shares are relative, and 1 where none is given."""
    parts = [_part(each, text) for each in text.split(",")]
    sum_of_shares = sum(share for _, _, share in parts)
    if not sum_of_shares > 0:
        raise ConfigError(f"--trace=mix:{text}: shares come to {sum_of_shares:g}, must be above 0")
    counts = [round(MIX_ROWS * share / sum_of_shares) for _, _, share in parts]
    inputs, outputs = (np.repeat([part[column] for part in parts], counts) for column in (0, 1))
    return Trace(np.zeros(len(inputs)), inputs.astype(np.int64), outputs.astype(np.int64))


def _part(text: str, whole: str) -> tuple[int, int, float]:
    match = _PART.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"--trace=mix:{whole}: cannot read {text!r}; write INPUT+OUTPUT@SHARE, as 2000+200@0.7")
    try:
        return int(match[1]), int(match[2]), float(match[3] or 1)
    except ValueError as error:
        raise ConfigError(f"--trace=mix:{whole}: {match[3]!r} is no share") from error
