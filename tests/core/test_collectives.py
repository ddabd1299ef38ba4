"""Bytes that collectives send over the links that lie between, and what a ring's tick reads and computes."""

from __future__ import annotations

import pytest

from jdisagg.core.hardware import KINDS, Collective, Sent, Shard, Target, Work, counted, ring_tick, sent_by
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.model_config import ModelConfig

MODEL = ModelConfig("llama", 1000, 64, 128, 5, 4, 2, 16, 512)


@pytest.mark.parametrize(
    ("kind", "groups", "hosts", "expected"),
    [
        ("all-reduce", ((0, 1, 2, 3),), (0, 0, 0, 0), Sent(150.0, 0.0)),
        ("all-reduce", ((0, 1, 2, 3),), (0, 0, 1, 1), Sent(100.0, 50.0)),  # half of it each, between the two
        ("all-reduce", ((0, 1), (2, 3)), (0, 0, 1, 1), Sent(100.0, 0.0)),
        ("all-reduce", ((0, 2), (1, 3)), (0, 0, 1, 1), Sent(0.0, 100.0)),
        ("all-gather", (), (0, 0, 1, 1), Sent(50.0, 25.0)),
        ("reduce-scatter", ((0, 1),), (0, 1), Sent(0.0, 50.0)),
        ("all-to-all", ((0, 1, 2, 3),), (0, 0, 1, 1), Sent(25.0, 50.0)),
        ("collective-permute", ((0, 1), (1, 0)), (0, 0), Sent(100.0, 0.0)),
        ("collective-permute", ((0, 1), (1, 2), (2, 3), (3, 0)), (0, 0, 1, 1), Sent(100.0, 100.0)),
    ],
)
def test_bytes_go_over_the_links_that_lie_between(kind, groups, hosts, expected):
    assert Collective(kind, 100, groups, depth=0).sent(hosts) == expected


def test_what_is_in_a_loop_counts_as_often_as_it_goes_round():
    once, looped, within = (Collective("all-gather", 64, (), depth) for depth in range(3))
    assert sent_by([once, looped], (0, 1), (9,)) == Sent(0.0, 32.0 * 10)
    assert sent_by([once, looped, within], (0, 1), (4, 80)) == Sent(0.0, 32.0 * (1 + 4 + 4 * 80))


def test_one_device_sends_nothing_and_kinds_are_counted():
    alone = [Collective(kind, 100, ((0,),), depth=0) for kind in KINDS if kind != "collective-permute"]
    assert sent_by(alone, (0,)) == Sent()
    assert counted([*alone, alone[0]])[alone[0].kind] == 2


def test_hosts_are_those_that_links_see():
    """Chips of a slice are joined by ICI, whatever hosts have them."""
    hosts = {text: [Target.parse(text).host_of(device) for device in range(4)] for text in ("h100:2x2", "v5p:2x2x2")}
    assert hosts == {"h100:2x2": [0, 0, 1, 1], "v5p:2x2x2": [0, 0, 0, 0]}


def shard(layers: range) -> Shard:
    return Shard(MODEL, layers, 1, 2.0, 2)


def test_a_tick_reads_a_layer_a_place_and_a_stages_share_of_the_head():
    cut = ring_cut(MODEL, 2)
    places = [shard(range(number, number + 1)) for number in cut.numbers]
    tick, head = ring_tick(places, 2, 8, 100), shard(range(5)).head(8)
    assert len(places) == 3, "five layers on two stages: one place of the second is padding"
    layers = shard(range(3)).decode_layers(8, 100)
    assert tick.weight_bytes == pytest.approx(layers.weight_bytes + head.weight_bytes / 2)
    assert tick.kv_bytes == layers.kv_bytes == 3 * 8 * 100 * places[0].kv_bytes_per_token
    assert tick.flops == pytest.approx(layers.flops + head.flops / 2)


def test_the_work_of_a_dispatch_is_that_of_its_ticks():
    tick = Work(2.0, 3.0, 5.0)
    assert tick.times(3) == tick + tick + tick == Work(6.0, 9.0, 15.0)
    whole = shard(range(5))
    assert whole.decode(8, 100) == whole.decode_layers(8, 100) + whole.head(8)
