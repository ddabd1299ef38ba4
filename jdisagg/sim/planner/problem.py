"""The planning problem: a workload that can be drawn at any rate, objectives, and how a candidate is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.planner.space import PlanCandidate
from jdisagg.sim.traces import Trace, poisson


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives for the first token and the mean gap of a request; at least `share` of all requests must meet both."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ConfigError(f"objectives of {self.ttft_s:g} s and {self.tpot_s:g} s: both must be above 0")
        if not 0 < self.share <= 1:
            raise ConfigError(f"an attainment of {self.share:g} must lie in (0, 1]")

    def scaled(self, factor: float) -> Objectives:
        return replace(self, ttft_s=self.ttft_s * factor, tpot_s=self.tpot_s * factor)

    def __str__(self) -> str:
        return f"TTFT <= {1e3 * self.ttft_s:g} ms and TPOT <= {1e3 * self.tpot_s:g} ms for {self.share:.0%}"


@dataclass(frozen=True)
class WorkloadSpec:
    """Requests by their lengths. The same seed draws the same requests and the same gaps at every rate, only scaled
    (common random numbers). So candidates and rates do not differ by chance."""

    lengths: Trace
    is_recorded: bool = False  # recorded arrivals with scaled gaps; else Poisson

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise ConfigError("a workload needs at least 1 request, this one has 0")
        if self.is_recorded and not self.lengths.rate_rps:
            raise ConfigError(f"{len(self.lengths)} requests over 0 s have no arrivals to keep: let them be drawn")

    def at(self, rate_rps: float, requests: int, seed: int) -> Trace:
        """Draws `requests` requests; a larger number begins with the same ones."""
        if self.is_recorded:
            return self._replayed(rate_rps, requests, seed)
        return poisson(self.lengths.sample(requests, seed), rate_rps, seed)

    def _replayed(self, rate_rps: float, requests: int, seed: int) -> Trace:
        """Returns rows in their order from a random start, cyclically, with scaled gaps."""
        rows = len(self.lengths)
        index = (int(np.random.default_rng(seed).integers(rows)) + np.arange(requests)) % rows
        gaps = np.diff(self.lengths.arrival_s, prepend=0.0)
        arrivals = np.cumsum(gaps[index]) * (self.lengths.rate_rps / rate_rps)
        untimed = replace(self.lengths, arrival_s=np.zeros(rows))
        return replace(untimed.rows(index), arrival_s=arrivals)

    @cached_property
    def means(self) -> MeanRequest:
        inputs, outputs = self.lengths.input_tokens, self.lengths.output_tokens
        context = float((outputs * (inputs + outputs / 2)).sum() / outputs.sum())
        return MeanRequest(float(inputs.mean()), float(outputs.mean()), context)


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """Mean token counts of a request."""

    input_tokens: float
    output_tokens: float
    context_tokens: float  # KV that a decode step reads of one sequence, averaged over steps


@dataclass(frozen=True)
class Problem:
    """A workload, objectives and a builder of clusters. `build` makes a candidate's workers; it raises ConfigError for
    an impossible one, for example if weights do not fit."""

    workload: WorkloadSpec
    objectives: Objectives
    build: Callable[[PlanCandidate], ClusterSpec]
    devices: int = 0  # paid for, used or not; 0: those that a candidate uses
    seed: int = 0

    def paid(self, candidate: PlanCandidate) -> int:
        return self.devices or candidate.devices
