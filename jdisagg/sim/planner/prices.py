"""USD a million tokens of a candidate: each pool's hours over the tokens that it serves within the objectives.

The first output token is a prefill product: it is counted there. Idle devices are paid by both pools alike. A worker of
both roles is split by the share of its busy time that prompts take, so that architectures compare.
"""

from __future__ import annotations

from jdisagg.core.worker_config import Role
from jdisagg.sim.arithmetic import PoolPrices, pool_prices
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.search import Shortlisted
from jdisagg.sim.planner.space import Kind, devices_of

HOUR_S = 3600.0


def token_prices(problem: Problem, shortlisted: Shortlisted, rate_rps: float, usd_per_hour: float) -> PoolPrices:
    """At `rate_rps` requests a second, with every paid device at `usd_per_hour`."""
    means = problem.workload.means
    usd_per_s = usd_per_hour / HOUR_S * problem.paid(shortlisted.candidate)
    share = prefill_share(shortlisted)
    later_tokens = max(means.output_tokens - 1.0, 1e-9)
    return pool_prices(
        share * usd_per_s,
        (1 - share) * usd_per_s,
        0.0,
        rate_rps * means.input_tokens,
        rate_rps * later_tokens,
    )


def prefill_share(shortlisted: Shortlisted) -> float:
    """Of the devices in use, or of their busy time where they do both."""
    candidate = shortlisted.candidate
    if candidate.kind is Kind.DISAGGREGATED:
        return devices_of(candidate.mesh.pools[0]) / candidate.devices
    busy_devices = shortlisted.at_goodput.busy[Role.COLOCATED] * candidate.devices
    return min(1.0, shortlisted.at_goodput.rate_rps * shortlisted.limits.prompt_device_s / max(busy_devices, 1e-9))
