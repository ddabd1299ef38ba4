"""Two racks with a slow link between: who is told of them keeps to them, and who is not pays for it."""

import pytest

from benchmarks import topology
from jdisagg.sim.traces.workloads import drawn, read_workload


@pytest.fixture
def trace():
    topology.FLAGS(["topology", "--requests=60", "--trace=mix:4000+20@0.7,1000+60@0.3"])
    return drawn(read_workload(topology.FLAGS.trace), topology.FLAGS.rate, topology.FLAGS.requests, 0)


def test_labels_keep_kv_within_racks(trace):
    blind, aware = topology.measure(trace, "least_loaded", False), topology.measure(trace, "cache_aware", True)
    assert blind.crossed > 0.3 and aware.crossed < 0.1
    assert aware.transfer_p99_s < 0.5 * blind.transfer_p99_s


def test_links_are_learnt_where_nobody_tells_of_racks(trace):
    blind, learns = topology.measure(trace, "least_loaded", False), topology.measure(trace, "cache_aware", False)
    assert learns.crossed < 0.5 * blind.crossed
