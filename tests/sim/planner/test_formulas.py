"""Dynamo's replica formulas, and the estimate made of them; mixes and policy files."""

import math
import tomllib

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.worker_config import TransferMode
from jdisagg.sim.planner.limits import corrected_itl, decode_replicas, estimates, prefill_replicas
from jdisagg.sim.planner.problem import WorkloadSpec
from jdisagg.sim.planner.recommendation import as_policy, settings_of
from jdisagg.sim.planner.space import CandidateSource, PlanCandidate
from jdisagg.sim.traces.workloads import read_workload
from tests.sim.planner.cases import candidate, problem


def test_replicas_follow_from_load_and_throughput():
    assert prefill_replicas(10, 3000, 10_000, 1) == 3
    assert prefill_replicas(10, 3000, 10_000, 2) == 2
    assert prefill_replicas(10, 3000, 10_000, 1, p_correction_factor=0.5) == 2
    assert prefill_replicas(10, 3000, 10_000, 1, p_correction_factor=9.0) == 3  # never more than the load
    assert decode_replicas(10, 200, 500, 2) == 2
    assert decode_replicas(0.001, 1, 500, 2) == 1
    assert corrected_itl(0.05, 1.25) == pytest.approx(0.04)
    with pytest.raises(ConfigError, match="correction factor of 0"):
        corrected_itl(0.05, 0.0)


def test_an_estimate_has_the_engines_that_the_rate_takes():
    asked = problem("mix:1000+6", devices=8)
    (found,) = estimates(asked, CandidateSource(2, (1,), (1,), (512,)), rate_rps=25.0)
    assert str(found.candidate.mesh) == f"prefill:{math.ceil(25 * 0.1018)}xtp1,decode:tp1"
    assert found.devices == 4


def test_a_mix_has_its_shares_and_its_mistakes_are_named():
    mixed = read_workload("mix:100+10@3,200+20@1")
    assert np.mean(mixed.input_tokens == 100) == pytest.approx(0.75)
    for text in ("mix:100", "mix:100+10@0", "mix:", "parquet:x", "mix:1+1@1.1.1"):
        with pytest.raises(ConfigError, match=r"mix:|KIND"):
            read_workload(text)


def test_drawn_requests_are_the_first_of_more_and_the_same_at_every_rate():
    for workload in (
        problem("mix:9+1,8+2").workload,
        WorkloadSpec(problem("mix:9+1,8+2").workload.at(3.0, 50, 1), True),
    ):
        few, many = workload.at(2.0, 40, 7), workload.at(4.0, 90, 7)
        assert (few.input_tokens == many.input_tokens[:40]).all()
        assert few.arrival_s == pytest.approx(2 * many.arrival_s[:40])
        assert (workload.at(2.0, 40, 8).arrival_s != few.arrival_s).any()


def test_a_policy_holds_what_was_simulated_and_only_settings_there_are():
    one = PlanCandidate(candidate("prefill:tp1,decode:pp2").mesh, 512, TransferMode.LAYER)
    build = problem().build
    settings = settings_of(one, build(one))
    text = as_policy({"dtype": "bfloat16", **settings}, ["because"])
    found = tomllib.loads(text)
    assert text.startswith("# because\n")
    assert found["mesh"] == {"mesh": "prefill:tp1,decode:pp2"} and found["transfer"] == {"transfer": "layer"}
    assert found["sizes"]["max_num_seqs"] == 64 and found["sizes"]["max_num_batched_tokens"] == 512
    assert "transfer" not in settings_of(candidate("colocated:tp1"), build(candidate("colocated:tp1")))
    with pytest.raises(ConfigError, match="no setting slots"):
        as_policy({"slots": 1}, [])
