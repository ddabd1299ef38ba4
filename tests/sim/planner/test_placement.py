"""Pairs within fast domains: DistServe's published placements fit theirs, and what links carry says which kind wins."""

from dataclasses import replace

import pytest

from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.sim.cluster_spec import plain_settings, published
from jdisagg.sim.planner.limits import CapacityModel
from jdisagg.sim.planner.problem import Objectives, Problem, WorkloadSpec
from jdisagg.sim.planner.search import RunBudget, try_rate
from jdisagg.sim.planner.space import CandidateBuilder, CandidateSource, PlanCandidate, paired
from jdisagg.sim.traces.workloads import read_workload
from tests.sim.planner.cases import LINES, TOKEN_BYTES

NODE = 8  # A100s of DistServe's nodes
NVLINK, ETHERNET = 228e9, 25e9 / 8 / NODE  # bytes a second of a device: measured inside; a share of 25 Gbps between
ALL_OF_THEM = RunBudget(requests_per_device=1.5)
THEIRS = PlanCandidate(MeshSpec.parse("prefill:tp4,decode:pp2tp2"), 2048)  # OPT-66B, their table 3


def mesh(prefill: tuple[int, int, int], decode: tuple[int, int, int]) -> MeshSpec:
    return MeshSpec((PoolSpec(Role.PREFILL, *prefill), PoolSpec(Role.DECODE, *decode)))


@pytest.mark.parametrize(
    ("placement", "domains"),
    [(mesh((1, 1, 2), (1, 1, 1)), 1), (mesh((1, 1, 4), (1, 2, 2)), 1), (mesh((1, 3, 3), (1, 3, 4)), 3)],
)
def test_distserves_table_3_fits_nodes_of_eight(placement, domains):
    """OPT-13B and 66B whole; 175B stage by stage, 3 + 4 devices of each of three nodes."""
    (unit,) = paired(placement, NODE)
    assert unit.domains == domains and unit.workers == ("prefill-0", "decode-0")


def test_units_are_as_few_as_fit_and_hold_everybody():
    units = paired(MeshSpec.parse("prefill:4xtp2,decode:2xtp4"), NODE)
    assert [unit.workers for unit in units] == [
        ("prefill-0", "prefill-2", "decode-0"), ("prefill-1", "prefill-3", "decode-1")
    ]  # fmt: skip
    assert [unit.devices for unit in units] == [8, 8] and "prefill-0, prefill-2, decode-0 in one domain" in str(
        units[0]
    )
    assert not paired(MeshSpec.parse("prefill:tp8,decode:tp4"), NODE)
    assert len(paired(MeshSpec.parse("prefill:tp8,decode:tp4"), 12)) == 1


def test_only_placements_that_fit_the_domains_there_are_are_tried():
    """Eight prefill workers of two devices and eight decode workers of one: four domains hold them, three do not."""
    three, four = (CandidateSource(devices, (1, 2), (1,), (512,), domain_devices=8) for devices in (24, 32))
    pools = MeshSpec.parse("prefill:8xtp2,decode:8xtp1")
    assert not three._has_paired_form(pools) and four._has_paired_form(pools)
    among = [each for each in CandidateSource(8, (4,), (1, 2), (512,), domain_devices=8) if each.domain_devices]
    assert [str(each.mesh) for each in among] == ["prefill:tp4,decode:tp4"]
    assert "pairs within 8 devices" in str(among[0])


def opt_66b(device_bytes_per_s: float, text: str = "mix:512+200") -> Problem:
    lengths = read_workload(text)
    builder = CandidateBuilder(plain_settings(2048), published("opt-66b"), device_bytes_per_s, NVLINK)
    return Problem(WorkloadSpec(lengths), Objectives(2.5, 0.15), builder.build, NODE)


def link_rps(candidate: PlanCandidate, device_bytes_per_s: float) -> float:
    return CapacityModel(opt_66b(device_bytes_per_s)).limits(candidate).link


def test_ten_requests_of_512_tokens_of_opt_66b_need_90_gbps_as_published():
    """Theirs: 1.125 GiB a request, 90 Gibps for 10 a second; the four devices of the prefill worker share that."""
    gibps = 90 * 2**30 / 8
    assert link_rps(THEIRS, gibps / 4) == pytest.approx(10.0, rel=0.001)


def kept(device_bytes_per_s: float, domain_devices: int) -> float:
    """The share of few requests, six a second, that keep both objectives."""
    asked = opt_66b(device_bytes_per_s, "mix:512+20")
    return try_rate(asked, replace(THEIRS, domain_devices=domain_devices), 6.0, ALL_OF_THEM, 0).met


def test_over_25_gbps_pairs_keep_within_a_node():
    """Their low-affinity case: between nodes 2.8 requests a second of 512 tokens would go, all devices together."""
    assert kept(ETHERNET, NODE) > 0.9
    assert kept(ETHERNET, 0) < 0.5
    assert link_rps(THEIRS, ETHERNET) * 2 == pytest.approx(10 * 25 / 90 / 1.0737, rel=0.02)


def test_over_a_fast_network_the_same_pools_do_as_well_wherever_they_stand():
    """Their high-affinity case."""
    assert kept(NVLINK, 0) == kept(NVLINK, NODE) > 0.9


def test_a_part_of_a_placement_still_pairs():
    whole = PlanCandidate(MeshSpec.parse("prefill:8xtp2,decode:4xtp4"), 512, domain_devices=NODE)
    part, parts = whole.part(least_devices=16)
    assert parts == 2 and len(paired(part.mesh, NODE)) == 2


def test_within_a_domain_kv_crosses_no_uplink():
    builder = CandidateBuilder(plain_settings(1200), lambda place: (LINES, 10_000), 5.0, 100.0)
    links = builder.build(PlanCandidate(MeshSpec.parse("prefill:2xtp1,decode:2xtp1"), 512, domain_devices=2)).links
    for destination, seconds in (("decode-0", 1.0), ("decode-1", 10.0)):
        links.start(destination, (("out", WorkerId("prefill-0")), ("in", WorkerId(destination))), 100.0, 0.0)
        assert links.next_end_s == pytest.approx(seconds)
        links.finish(seconds)
    alone = builder.build(PlanCandidate(MeshSpec.parse("prefill:tp1,decode:tp1"), 512))
    assert {each.kv_token_bytes for each in alone.workers} == {TOKEN_BYTES}
