"""Reads a workload from its text form: a file of a public format or a mix of lengths; cuts it and draws arrivals.

Lengths and mixes have no arrivals of their own. They are drawn at one rate, or at ServeGen's varying rates.
"""

from __future__ import annotations

import re

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces.files import SERVEGEN_WINDOW_S, read_azure, read_lengths, read_mooncake, read_servegen_rates
from jdisagg.sim.traces.trace import Trace, poisson, spread_ticks, varying_rate

READERS = {"azure": read_azure, "mooncake": lambda path: spread_ticks(read_mooncake(path)), "lengths": read_lengths}
KINDS = f"KIND:FILE, KIND one of {', '.join(READERS)}, or mix:INPUT+OUTPUT@SHARE,..."
_PART = re.compile(r"(\d+)\+(\d+)(?:@([0-9.]+))?")
MIX_ROWS = 1000  # rows of a mix, so shares are exact to a thousandth


def read_workload(text: str) -> Trace:
    """Reads KIND:FILE or mix:INPUT+OUTPUT@SHARE,... Raises ConfigError with the text."""
    kind, _, rest = text.partition(":")
    if kind == "mix" and rest:
        return _mix(rest)
    if kind not in READERS or not rest:
        raise ConfigError(f"--trace={text!r}: write {KINDS}")
    return READERS[kind](rest)


def _mix(text: str) -> Trace:
    """Returns rows of each component in proportion to its share; shares are relative, 1 by default."""
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


def cut(trace: Trace, window: str, part: str, seed: int = 0) -> Trace:
    """Returns requests of `window`, as 600:1200 (seconds, "": all), and of them a random `part`, as 1/4 ("": all)."""
    if window:
        start_s, stop_s = span_of(window)
        trace = trace.window(start_s, stop_s)
    if part:
        number, parts = _numbers(part, "/", "--part", "K/N with K from 1 to N, as 1/4")
        if not (1 <= number <= parts and number == int(number) and parts == int(parts)):
            raise ConfigError(f"--part={part!r}: write K/N with K from 1 to N, as 1/4")
        trace = trace.split(int(parts), seed)[int(number) - 1]
    return trace


def by_rates(lengths: Trace, text: str, window: str, rate_rps: float, seed: int = 0) -> Trace:
    """Draws arrivals at the rates of FILE@MODEL within `window`, scaled to a mean of rate_rps (0: unscaled)."""
    path, _, model = text.rpartition("@")
    if not path:
        raise ConfigError(f"--servegen={text!r}: write FILE@MODEL, as rates.csv@language_m-small")
    rates = read_servegen_rates(path, model)
    if window:
        first, last = (round(second / SERVEGEN_WINDOW_S) for second in span_of(window))
        rates = rates[first : max(last, first + 1)]
    if not rates.sum() > 0:
        raise ConfigError(f"--servegen={text!r} has no requests in --window={window!r}")
    scale = rate_rps / rates.mean() if rate_rps else 1.0
    return varying_rate(lengths, rates * scale, SERVEGEN_WINDOW_S, seed)


def drawn(lengths: Trace, rate_rps: float, requests: int, seed: int = 0) -> Trace:
    """Draws `requests` requests (0: as many as the trace has) with Poisson arrivals."""
    return poisson(lengths.sample(requests or len(lengths), seed), rate_rps, seed)


def span_of(window: str) -> tuple[float, float]:
    """Returns the seconds of START:STOP. Raises ConfigError."""
    start_s, stop_s = _numbers(window, ":", "--window", "START:STOP in seconds, as 600:1200")
    if not 0 <= start_s < stop_s:
        raise ConfigError(f"--window={window!r}: {start_s:g} s must lie before {stop_s:g} s, and not before 0")
    return start_s, stop_s


def _numbers(text: str, between: str, flag: str, form: str) -> tuple[float, float]:
    try:
        first, second = text.split(between)
        return float(first), float(second)
    except ValueError as error:
        raise ConfigError(f"{flag}={text!r}: write {form}") from error
