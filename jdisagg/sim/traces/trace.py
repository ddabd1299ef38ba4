"""A request trace as columns (arrival times, lengths, prefix block hashes), and arrival processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jdisagg.core.errors import ConfigError


@dataclass(frozen=True)
class Trace:
    """A trace of N requests in order of arrival."""

    arrival_s: np.ndarray  # f64[N], seconds from the trace's start, never decreasing
    input_tokens: np.ndarray  # i64[N], at least 1
    output_tokens: np.ndarray  # i64[N], at least 1
    block_hashes: tuple[tuple[int, ...], ...] = ()  # N paths, or none; equal prefixes are equal KV
    block_tokens: int = 0  # tokens per block; a request's last block may be partial

    def __post_init__(self) -> None:
        sizes = {len(self.arrival_s), len(self.input_tokens), len(self.output_tokens)}
        sizes |= {len(self.block_hashes)} if self.block_hashes else set()
        if len(sizes) != 1:
            raise ConfigError(f"a trace's columns have {sorted(sizes)} rows")
        if len(self) and (np.diff(self.arrival_s) < 0).any():
            raise ConfigError("a trace's requests must be in order of arrival")
        if len(self) and min(self.input_tokens.min(), self.output_tokens.min()) < 1:
            raise ConfigError("every request needs at least 1 input and 1 output token")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Returns the seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def rate_rps(self) -> float:
        """Returns the requests per second over the span."""
        return len(self) / self.span_s if self.span_s else 0.0

    def rows(self, keep: np.ndarray) -> Trace:
        """Returns the requests that a mask or index array selects, with unchanged arrivals."""
        index = np.arange(len(self))[keep]
        hashes = tuple(self.block_hashes[i] for i in index) if self.block_hashes else ()
        return replace(
            self,
            arrival_s=self.arrival_s[index],
            input_tokens=self.input_tokens[index],
            output_tokens=self.output_tokens[index],
            block_hashes=hashes,
        )

    def window(self, start_s: float, stop_s: float) -> Trace:
        """Returns the requests that arrive in [start_s, stop_s), with times counted from start_s."""
        part = self.rows((self.arrival_s >= start_s) & (self.arrival_s < stop_s))
        return replace(part, arrival_s=part.arrival_s - start_s)

    def at_rate(self, rate_rps: float) -> Trace:
        """Returns the same requests with all gaps scaled by one factor, so that bursts are kept."""
        if rate_rps <= 0 or not self.rate_rps:
            raise ConfigError(f"cannot bring a trace of {self.rate_rps:g} requests/s to {rate_rps:g}")
        return replace(self, arrival_s=self.arrival_s * (self.rate_rps / rate_rps))

    def scaled_lengths(self, inputs: float = 1.0, outputs: float = 1.0) -> Trace:
        """Multiplies and rounds lengths, to at least 1. Drops block hashes, which no longer fit."""
        if inputs == outputs == 1.0:
            return self
        return Trace(self.arrival_s, _scaled(self.input_tokens, inputs), _scaled(self.output_tokens, outputs))

    def split(self, parts: int, seed: int = 0) -> tuple[Trace, ...]:
        """Assigns each request at random to one of `parts` traces; parts of a Poisson trace are Poisson."""
        owner = np.random.default_rng(seed).integers(parts, size=len(self))
        return tuple(self.rows(owner == part) for part in range(parts))

    def sample(self, count: int, seed: int = 0) -> Trace:
        """Draws `count` rows with replacement, keeping a row's lengths together; arrivals are those of the first rows.
        Block hashes are dropped: a row drawn twice stands for another conversation of the same lengths."""
        if not len(self):
            raise ConfigError("an empty trace has no rows to draw")
        index = np.random.default_rng(seed).integers(len(self), size=count)
        times = np.resize(self.arrival_s, count) if count <= len(self) else np.zeros(count)
        return Trace(times, self.input_tokens[index], self.output_tokens[index])

    def unnamed(self) -> Trace:
        """Returns the trace without block hashes."""
        return replace(self, block_hashes=(), block_tokens=0)


def _scaled(lengths: np.ndarray, factor: float) -> np.ndarray:
    return np.maximum(1, np.rint(lengths * factor)).astype(np.int64)


# Arrival times: Poisson, a varying rate, a closed loop, and the spreading of the ticks of a coarse clock.


def poisson(lengths: Trace, rate_rps: float, seed: int = 0) -> Trace:
    """Gives the trace's requests, in their order, exponential gaps of mean 1 / rate_rps."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate_rps, len(lengths))
    return replace(lengths, arrival_s=np.cumsum(gaps))


def varying_rate(lengths: Trace, rates_rps: np.ndarray, window_s: float, seed: int = 0) -> Trace:
    """Draws Poisson arrivals with rate rates_rps[i] in window i; requests are whole rows drawn from `lengths`."""
    random = np.random.default_rng(seed)
    counts = random.poisson(np.asarray(rates_rps) * window_s)
    starts = np.repeat(np.arange(len(counts)) * window_s, counts)
    times = np.sort(starts + random.uniform(0.0, window_s, counts.sum()))
    return replace(lengths.sample(len(times), seed), arrival_s=times)


def closed_loop(lengths: Trace, clients: int) -> Trace:
    """Sets all arrivals to 0 for a driver that starts a client's next request when its last one ended. The trace only
    gives the order; the driver holds back all but `clients` of the requests."""
    assert clients > 0, clients
    return replace(lengths, arrival_s=np.zeros(len(lengths)))


def spread_ticks(trace: Trace) -> Trace:
    """Spreads requests with the same tick evenly up to the next tick, since a 3 s clock makes false bursts."""
    ticks, index, counts = np.unique(trace.arrival_s, return_inverse=True, return_counts=True)
    if len(ticks) < 2:
        return trace
    tick_s = np.append(np.diff(ticks), np.median(np.diff(ticks)))
    index_in_tick = np.arange(len(trace)) - np.repeat(np.cumsum(counts) - counts, counts)
    return replace(trace, arrival_s=trace.arrival_s + index_in_tick * (tick_s / counts)[index])


def one_after_another(traces: Sequence[Trace], gap_s: float) -> Trace:
    """Concatenates traces; each begins `gap_s` after the last arrival of the one before. Drops block hashes."""
    times, begins_s = list[np.ndarray](), 0.0
    for each in traces:
        times.append(each.arrival_s + begins_s)
        begins_s = float(times[-1][-1]) + gap_s
    inputs, outputs = ([each.input_tokens for each in traces], [each.output_tokens for each in traces])
    return Trace(np.concatenate(times), np.concatenate(inputs), np.concatenate(outputs))
