"""Flows share ports fairly, whatever the order in which they come and go."""

import math
from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.sim.links import DomainLinks, FairLinks


def drain(links: FairLinks, until_s: float = math.inf) -> dict:
    """When each flow is through."""
    ended = {}
    while links.flows and links.next_end_s <= until_s:
        now_s = links.next_end_s
        ended |= dict.fromkeys(links.finish(now_s), now_s)
    return ended


def test_two_flows_of_one_port_take_twice_as_long():
    links = FairLinks({"out": 10.0})
    links.start("a", ("out",), 100.0, 0.0)
    links.start("b", ("out",), 100.0, 0.0)
    assert drain(links) == {"a": 20.0, "b": 20.0}


def test_who_comes_later_halves_what_is_left():
    links = FairLinks({"out": 10.0})
    links.start("a", ("out",), 100.0, 0.0)
    links.start("b", ("out",), 100.0, 5.0)
    assert drain(links) == {"a": 15.0, "b": 20.0}


def test_what_one_flow_cannot_use_is_the_others():
    """Max-min: `a` is held to 1 at its far end, so that `b` gets 9 of the shared 10."""
    links = FairLinks({"out": 10.0, "slow": 1.0})
    links.start("a", ("out", "slow"), 10.0, 0.0)
    links.start("b", ("out",), 90.0, 0.0)
    assert drain(links) == {"a": 10.0, "b": 10.0}


def test_a_port_without_a_limit_takes_no_time():
    links = FairLinks()
    links.start("a", ("anywhere",), 1e12, 3.0)
    assert drain(links) == {"a": 3.0}


def test_workers_of_one_host_share_its_nic_and_cross_none_among_themselves():
    hosts: dict[Hashable, tuple[str, ...]] = {"p0": ("left",), "p1": ("left",), "d0": ("right",)}
    links = DomainLinks({("out", "left"): 10.0, ("in", "right"): 100.0, ("out", "p1"): 5.0}, hosts)
    links.start("a", (("out", "p0"), ("in", "d0")), 100.0, 0.0)
    links.start("b", (("out", "p1"), ("in", "d0")), 100.0, 0.0)
    assert drain(links) == {"a": 20.0, "b": 20.0}
    links.start("a", (("out", "p0"), ("in", "d0")), 100.0, 30.0)
    links.start("within", (("out", "p1"), ("in", "p0")), 10.0, 30.0)
    assert drain(links) == {"within": 32.0, "a": 40.0}


def test_racks_have_uplinks_that_only_what_leaves_them_crosses():
    places: dict[Hashable, tuple[str, ...]] = {"p": ("h0", "r0"), "near": ("h1", "r0"), "far": ("h2", "r1")}
    links = DomainLinks({("out", "h0"): 10.0, ("out", "r0"): 2.0, ("in", "r1"): 1.0}, places)
    links.start("near", (("out", "p"), ("in", "near")), 100.0, 0.0)
    assert drain(links) == {"near": 10.0}
    links.start("far", (("out", "p"), ("in", "far")), 100.0, 20.0)
    assert drain(links) == {"far": 120.0}


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 2), st.integers(0, 2), st.floats(1, 100)), max_size=12))
def test_no_byte_is_lost_and_no_port_is_overdrawn(flows):
    """Each port's flows end no sooner than its bytes allow; none takes longer than if all of them had shared one."""
    ports: dict[Hashable, float] = {(way, p): rate for way, rate in (("out", 7.0), ("in", 11.0)) for p in range(3)}
    links, ended = FairLinks(ports), {}
    for name, (at_s, source, destination, size) in enumerate(sorted(flows)):
        ended |= drain(links, at_s)
        links.start(name, (("out", source), ("in", destination)), size, at_s)
    ended |= drain(links)
    assert sorted(ended) == list(range(len(flows)))
    for name, (at_s, source, _, size) in enumerate(sorted(flows)):
        rivals = [each for each in sorted(flows) if each[1] == source]
        assert ended[name] >= at_s + size / 7.0 - 1e-6
        assert max(ended[i] for i, each in enumerate(sorted(flows)) if each[1] == source) >= (
            min(each[0] for each in rivals) + sum(each[3] for each in rivals) / 7.0 - 1e-6
        )
    total = sum(each[3] for each in flows) / 7.0
    assert all(ended[i] <= max(f[0] for f in flows) + total + 1e-6 for i in ended)
