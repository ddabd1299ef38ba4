"""Families of metrics, and what is counted many times at once."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jdisagg.serve.observability.metric_families import SECONDS, Families, observe_times


@pytest.mark.parametrize("value", [0.0, 0.001, 0.0011, 0.03, 119.0, 121.0])
def test_a_value_seen_many_times_is_counted_as_each_of_them(value: float):
    at_once, one_by_one = CollectorRegistry(), CollectorRegistry()
    observe_times(Families(at_once, "m").histogram("gap_seconds", "-", SECONDS).of(), value, 4)
    each = Families(one_by_one, "m").histogram("gap_seconds", "-", SECONDS).of()
    for _ in range(4):
        each.observe(value)
    told, apart = (
        [line for line in generate_latest(of).decode().splitlines() if "_created" not in line]
        for of in (at_once, one_by_one)
    )
    assert told == apart
