"""Costs from tables of kernels: a grid says what was measured, and what lies between; a mixed step is one step."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cluster_spec import FREE_LINK, by_kernels, cluster_spec, plain_settings
from jdisagg.sim.cost_models import Model, distserve_fit
from jdisagg.sim.kernel_tables import KernelTables, MeasuredTable, read_kernels, shipped_kernels
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace, poisson
from tests.sim.test_cost_models import prefill, step

PLANE = {(x, y): 3.0 * x + 5.0 * y + 7.0 for x in (1.0, 2.0, 8.0) for y in (4.0, 16.0)}
MIXED = plain_settings(4096, max_num_batched_tokens=2048 + 256, steps_in_flight=1, reserve_tokens=8, mixed_steps="on")
AHEAD: dict[str, Any] = {"chunks_in_flight": 1}
COSTS = by_kernels(lambda _: tables(), 100_000)


def tables(host_s: float = 0.0) -> KernelTables:
    return KernelTables(Model(model("llama3-8b")), shipped_kernels("rtxpro6000", "llama3-8b"), host_s=host_s)


@pytest.mark.parametrize(
    ("point", "found"), [((2, 16), 93.0), ((5, 10), 72.0), ((16, 4), 75.0), ((0, 0), 30.0), ((8, 32), 191.0)]
)
def test_a_grid_is_linear_between_its_points_and_beyond_and_flat_below(point, found):
    assert MeasuredTable(PLANE).at(*point) == pytest.approx(found)


def test_a_grid_with_holes_is_refused():
    with pytest.raises(ConfigError, match="5 points lacks 1 of its grid of"):
        MeasuredTable({point: value for point, value in PLANE.items() if point != (2.0, 4.0)})


def test_a_lone_step_is_the_sum_of_its_rows():
    """One sequence of 1024 tokens: the rows of the files for 1 token, 1 sequence and (1, 1024)."""
    layer = 2 * 2.416 + 35.8297 + 2.709 + 25.664 + 159.488 + 2.67733 + 85.5257 + 14.592
    once = 3.14667 + 2.42167 + 714.006 + 24.746
    assert tables().decode_s(step(1), 1024) == pytest.approx((32 * layer + once) / 1e6)


def test_a_mixed_step_costs_less_than_both_and_more_than_either():
    cost = tables()
    chunk, decode = cost.prefill_s(prefill((0, 512))), cost.decode_s(step(32), 32_000)
    mixed = cost.mixed_s(prefill((0, 512)), step(32), 32_000)
    assert max(chunk, decode) < mixed < chunk + decode
    assert tables(1e-3).mixed_s(prefill((0, 512)), step(32), 32_000) == pytest.approx(mixed + 1e-3)


def test_shards_pay_for_two_all_reduces_a_layer():
    cost = tables()
    shard = replace(cost, tp=2, link_bytes_per_s=1e9, link_s=1e-3)
    row_s = 4096 * 2 / 1e9
    assert shard.decode_s(step(1), 64) - cost.decode_s(step(1), 64) == pytest.approx(32 * 2 * (1e-3 + row_s))


def work(requests: int = 40) -> Trace:
    lengths = Trace(np.zeros(requests), np.full(requests, 900), np.full(requests, 50))
    return poisson(lengths, 8.0)


def test_a_cluster_that_mixes_ends_its_requests_sooner_and_each_of_them_once():
    latencies = {}
    for mixes in (True, False):
        sizes = replace(MIXED, mixed_steps="on" if mixes else "off")
        given = cluster_spec(MeshSpec.parse("colocated:tp1"), sizes, COSTS, FREE_LINK, **AHEAD)
        cluster = simulated(given)
        outcome = cluster.run(work())
        cluster.check_all_ended()
        assert all(record.is_served and record.emitted_tokens == 50 for record in outcome.records)
        latencies[mixes] = outcome.values("latency").mean()
    assert latencies[True] < 0.95 * latencies[False]


def test_mixing_prefill_and_decode_workers_hand_over_as_others_do():
    given = cluster_spec(MeshSpec.parse("prefill:tp1,decode:tp1"), MIXED, COSTS, 1e9, **AHEAD)
    cluster = simulated(given)
    outcome = cluster.run(work(10))
    cluster.check_all_ended()
    assert all(record.is_served and record.emitted_tokens == 50 for record in outcome.records)


@pytest.mark.parametrize(
    ("sizes", "cost", "says"),
    [
        (MIXED, distserve_fit("opt-13b", 1), "PublishedFit has no price for a mixed step"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sizes, cost, says):
    given = cluster_spec(MeshSpec.parse("colocated:tp1"), sizes, lambda _: (cost, 100_000), FREE_LINK)
    with pytest.raises(ConfigError, match=says):
        simulated(given)


def test_tables_that_lack_something_are_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match="rtx4090-llama3-8b-tp1, rtxpro6000-llama3-8b-tp1"):
        shipped_kernels("rtx3090", "llama3-8b")
    with pytest.raises(ConfigError, match=r"dense\.csv\.gz: cannot be read"):
        read_kernels(tmp_path)
    with gzip.open(tmp_path / "dense.csv.gz", "wt") as file:
        file.write("layer,rows,time_us\n")
    with pytest.raises(ConfigError, match="no column tokens"):
        read_kernels(tmp_path)
