"""Prices by pool: DeepSeek's published day, and the parts of a shortlisted's bill."""

import pytest

from jdisagg.core.worker_config import Role
from jdisagg.sim.planner.limits import CapacityLimits
from jdisagg.sim.planner.problem import Problem
from jdisagg.sim.planner.recommendation import prefill_share, token_prices
from jdisagg.sim.planner.search import BoundedCandidate, ShortlistEntry, TrialResult
from tests.sim.planner.cases import candidate, problem

DAY_S = 86400.0


def shortlisted(
    mesh: str, busy: dict[Role, float], rate_rps: float = 10.0, prompt_device_s: float = 0.1
) -> ShortlistEntry:
    one = candidate(mesh)
    limits = CapacityLimits(99.0, 99.0, 99.0, 99.0, 99.0, prompt_device_s, 0.01)
    trial = TrialResult(rate_rps, 0.95, 0.96, 0.97, 0.5, 0.02, busy)
    return ShortlistEntry(BoundedCandidate(one, limits, 9.0), (rate_rps / one.devices,), trial, trial)


def day() -> tuple[Problem, float]:
    """168e9 output tokens by requests of one prompt of 608/168 tokens for each later token."""
    asked = problem("mix:608000+168001")
    return asked, 608e9 / DAY_S / 608000


def test_deepseeks_day_has_its_published_prices():
    """Pools of 95.5 and 131.4 nodes of 8 H800 at 2 USD: 0.0603 USD a million input tokens, 0.3001 of output.

    Devices are counted in twentieths of a node here, so that both pools are whole numbers of them.
    """
    asked, rate = day()
    prefill, decode = (round(20 * tokens / DAY_S / speed) for tokens, speed in ((608e9, 73.7e3), (168e9, 14.8e3)))
    mesh = f"prefill:{prefill}xtp1,decode:{decode}xtp1"
    one = shortlisted(mesh, {Role.PREFILL: 1.0, Role.DECODE: 1.0})
    asked = Problem(asked.workload, asked.objectives, asked.build)  # paid for what it uses
    prices = token_prices(asked, one, rate, usd_per_hour=8 * 2.0 / 20)
    assert prices.uncached_input_tokens == pytest.approx(0.0603, rel=1e-3)
    assert prices.output_tokens == pytest.approx(0.3001, rel=1e-3)


def test_idle_devices_are_paid_by_both_pools_alike():
    used = shortlisted("prefill:tp1,decode:tp1", {Role.PREFILL: 0.9, Role.DECODE: 0.9})
    exact, idle = (token_prices(problem(devices=devices), used, 10.0, 3.6) for devices in (2, 4))
    assert idle.input_tokens == pytest.approx(2 * exact.input_tokens)
    assert idle.output_tokens == pytest.approx(2 * exact.output_tokens)
    assert exact.input_tokens == pytest.approx(1e6 * 1e-3 / (10 * 1000))


def test_workers_of_both_roles_are_split_by_their_busy_time():
    both = shortlisted("colocated:2xtp1", {Role.COLOCATED: 0.8})
    assert prefill_share(both) == pytest.approx(10 * 0.1 / 1.6)
    prices = token_prices(problem(devices=2), both, 10.0, 3.6)
    assert prices.input_tokens * 10_000 + prices.output_tokens * 50 == pytest.approx(2 * 1e-3 * 1e6)
