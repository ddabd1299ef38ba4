"""Arrival times: Poisson, a rate that changes, a closed loop, and the spreading of a coarse clock's ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jdisagg.sim.traces.trace import Trace


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
