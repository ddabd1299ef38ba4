"""The benchmarks of many workers and of changing ratios measure what they say, on small cases."""

from __future__ import annotations

import pytest

from benchmarks import autoscale, scale
from jdisagg.core.router_config import Routing
from jdisagg.policy.scaling import Scaling


@pytest.mark.parametrize("routing", [Routing.LEAST_LOADED, Routing.CACHE_AWARE])
def test_every_followed_stream_ends_and_its_messages_are_counted(routing: Routing):
    scale.FLAGS(["scale", "--followed=20", "--tokens_a_word=8", "--output_tokens=65"])
    row = scale.measure(16, 40, routing)
    assert row.streams == 40 and row.decisions_per_s > 0 and row.state_bytes > 100
    assert row.messages_per_token == pytest.approx((2 + 5 + 8 + 1) / 65, abs=0.04)


def test_failures_come_as_often_as_was_published_and_cost_less_where_kv_is_shipped_again():
    found = scale.losses(scale.Fleet(), 365)
    assert 5 < found[0].hours_between < 8, "a device every few hours in a thousand groups of eight"
    by_case = {(each.reshipped, each.standby): each for each in found}
    assert by_case[True, False].lost < by_case[False, False].lost
    assert by_case[True, False].stalled_s < by_case[False, False].stalled_s
    assert by_case[True, True].spares > 0 == by_case[True, False].spares


def test_the_oracle_is_at_least_as_good_as_every_ratio_and_the_autoscaler_near_it():
    autoscale.FLAGS(["autoscale", "--workers=4", "--slots=8"])
    rows = {each.ratio: each for each in autoscale.compare(autoscale.synthetic())}
    assert all(each.good <= rows["oracle"].good for each in rows.values() if each.ratio != "auto")
    assert rows["auto"].of_oracle > 0.9 and rows["auto"].flips <= Scaling(rest_s=20.0).flips_an_hour
    assert rows["auto"].good > rows["1:3"].good or rows["1:3"].of_oracle > 0.95
