"""A workload as columns: arrival times, lengths, and the names of prefix blocks where they are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jdisagg.core.errors import ConfigError


@dataclass(frozen=True)
class Trace:
    """N requests in order of arrival."""

    arrival_s: np.ndarray  # f64[N], from the trace's start, never falling
    input_tokens: np.ndarray  # i64[N], at least 1
    output_tokens: np.ndarray  # i64[N], at least 1
    block_hashes: tuple[tuple[int, ...], ...] = ()  # N paths, or none at all; equal prefixes are equal KV
    block_tokens: int = 0  # tokens of a block; a request's last block may be partial

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
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def rate_rps(self) -> float:
        """Requests a second over the span."""
        return len(self) / self.span_s if self.span_s else 0.0

    def rows(self, keep: np.ndarray) -> Trace:
        """The requests that a mask or index array names, arrivals as they were."""
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
        """Requests that arrive in [start_s, stop_s), times counted from start_s."""
        part = self.rows((self.arrival_s >= start_s) & (self.arrival_s < stop_s))
        return replace(part, arrival_s=part.arrival_s - start_s)

    def at_rate(self, rate_rps: float) -> Trace:
        """The same requests with their gaps stretched or shrunk alike, so that bursts stay bursts."""
        if rate_rps <= 0 or not self.rate_rps:
            raise ConfigError(f"cannot bring a trace of {self.rate_rps:g} requests/s to {rate_rps:g}")
        return replace(self, arrival_s=self.arrival_s * (self.rate_rps / rate_rps))

    def scaled_lengths(self, inputs: float = 1.0, outputs: float = 1.0) -> Trace:
        """Lengths multiplied and rounded, never under 1. Block names no longer fit and are dropped."""
        if inputs == outputs == 1.0:
            return self
        return Trace(self.arrival_s, _scaled(self.input_tokens, inputs), _scaled(self.output_tokens, outputs))

    def split(self, parts: int, seed: int = 0) -> tuple[Trace, ...]:
        """Each request to one of `parts` traces, drawn alike: a Poisson trace stays Poisson."""
        owner = np.random.default_rng(seed).integers(parts, size=len(self))
        return tuple(self.rows(owner == part) for part in range(parts))

    def sample(self, count: int, seed: int = 0) -> Trace:
        """`count` rows drawn with replacement, lengths of a row kept together; arrivals are those of the first rows.

        Block names are dropped: a row that is drawn twice is another conversation of the same lengths.
        """
        if not len(self):
            raise ConfigError("an empty trace has no rows to draw")
        index = np.random.default_rng(seed).integers(len(self), size=count)
        times = np.resize(self.arrival_s, count) if count <= len(self) else np.zeros(count)
        return Trace(times, self.input_tokens[index], self.output_tokens[index])

    def unnamed(self) -> Trace:
        """Prompts of which nothing is known but their lengths."""
        return replace(self, block_hashes=(), block_tokens=0)


def _scaled(lengths: np.ndarray, factor: float) -> np.ndarray:
    return np.maximum(1, np.rint(lengths * factor)).astype(np.int64)


# Arrival times: Poisson, a rate that changes, a closed loop, and the spreading of a coarse clock's ticks.


def poisson(lengths: Trace, rate_rps: float, seed: int = 0) -> Trace:
    """The trace's requests, in their order, with exponential gaps of mean 1 / rate_rps."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate_rps, len(lengths))
    return replace(lengths, arrival_s=np.cumsum(gaps))


def varying_rate(lengths: Trace, rates_rps: np.ndarray, window_s: float, seed: int = 0) -> Trace:
    """Poisson arrivals whose rate is rates_rps[i] in window i; requests are drawn from `lengths`, rows kept whole."""
    random = np.random.default_rng(seed)
    counts = random.poisson(np.asarray(rates_rps) * window_s)
    starts = np.repeat(np.arange(len(counts)) * window_s, counts)
    times = np.sort(starts + random.uniform(0.0, window_s, counts.sum()))
    return replace(lengths.sample(len(times), seed), arrival_s=times)


def closed_loop(lengths: Trace, clients: int) -> Trace:
    """The first request of each client at time 0: a driver starts a client's next when its last one ended.

    The trace only says the order; `arrival_s` is 0 for all, and the driver holds back all but `clients` of them.
    """
    assert clients > 0, clients
    return replace(lengths, arrival_s=np.zeros(len(lengths)))


def spread_ticks(trace: Trace) -> Trace:
    """Requests that share a tick, spread evenly up to the next one: a 3 s clock makes bursts that nobody sent."""
    ticks, index, counts = np.unique(trace.arrival_s, return_inverse=True, return_counts=True)
    if len(ticks) < 2:
        return trace
    room = np.append(np.diff(ticks), np.median(np.diff(ticks)))
    place = np.arange(len(trace)) - np.repeat(np.cumsum(counts) - counts, counts)
    return replace(trace, arrival_s=trace.arrival_s + place * (room / counts)[index])


def one_after_another(traces: Sequence[Trace], gap_s: float) -> Trace:
    """Each trace begins `gap_s` after the last arrival of the one before it. Block names are dropped."""
    times, begins_s = list[np.ndarray](), 0.0
    for each in traces:
        times.append(each.arrival_s + begins_s)
        begins_s = float(times[-1][-1]) + gap_s
    inputs, outputs = ([each.input_tokens for each in traces], [each.output_tokens for each in traces])
    return Trace(np.concatenate(times), np.concatenate(inputs), np.concatenate(outputs))
