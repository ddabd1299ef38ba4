"""What `auto` learns from measured costs, and that it keeps still when nothing changes."""

from collections.abc import Callable

import pytest

from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.policy.streaming import Fit, Streaming
from tests.sim.cases import worker


def learnt(part_s: float, page_s: float, token_s: float, **sizes) -> Streaming:
    """After transfers and plans that cost just that."""
    config = worker("p", Role.PREFILL, page_size=16, max_model_len=4096, prefill_buckets=(256,), **sizes)
    streaming = Streaming(config)
    for n in range(60):
        streaming.computed(256, 256 * token_s)
        parts, pages = 1 + n % 4, 5 + 7 * n % 90
        streaming.shipped(parts, pages, part_s * parts + page_s * pages)
    return streaming


def test_costs_are_found_again_from_what_was_measured():
    streaming = learnt(2e-3, 3e-4, 5e-5)
    assert streaming.wire.part_s == pytest.approx(2e-3, rel=0.02)
    assert streaming.wire.page_s == pytest.approx(3e-4, rel=0.02)
    assert streaming.token_s == pytest.approx(5e-5, rel=0.02)


def test_what_was_assumed_is_forgotten_and_never_negative():
    fit = Fit(1.0, 1.0)
    for _ in range(150):
        fit.learn(1, 10, 1e-3)
    assert fit.part_s >= 0 and fit.page_s >= 0 and fit.part_s + 10 * fit.page_s == pytest.approx(1e-3, rel=0.1)


def test_a_slow_link_streams_early_and_a_costly_part_late():
    cheap, dear = learnt(1e-5, 2e-3, 1e-4), learnt(2e-2, 1e-4, 1e-4)
    assert cheap.stream_tokens < 512 < dear.stream_tokens
    assert cheap.mode(4096) is not TransferMode.WHOLE
    assert cheap.mode(cheap.stream_tokens - 1) is TransferMode.WHOLE


def test_where_a_part_costs_more_than_everything_nothing_streams():
    streaming = learnt(10.0, 1e-6, 1e-5)
    assert streaming.stream_tokens > 4096 and streaming.mode(4096) is TransferMode.WHOLE


def test_layer_groups_are_shipped_one_by_one_where_a_part_is_cheap():
    groups = {"layer_groups": tuple((2 * n, 2 * n + 2) for n in range(4))}
    assert learnt(1e-6, 1e-3, 1e-4, **groups).mode(1024) is TransferMode.LAYER
    assert learnt(3e-3, 1e-3, 1e-4, **groups).mode(1024) is TransferMode.CHUNK


def test_exposed_time_is_that_of_the_last_chunk_where_the_link_keeps_up():
    streaming = learnt(1e-4, 1e-4, 1e-3)
    whole, _ = streaming.exposed_s(TransferMode.WHOLE, 1024)
    chunk, parts = streaming.exposed_s(TransferMode.CHUNK, 1024)
    assert parts == 4
    assert whole == pytest.approx(1e-4 + 64 * 1e-4, rel=0.05) and chunk == pytest.approx(1e-4 + 16 * 1e-4, rel=0.05)


def test_a_link_that_cannot_keep_up_exposes_what_it_is_behind():
    streaming = learnt(0.0, 1e-2, 1e-5)
    chunk, _ = streaming.exposed_s(TransferMode.CHUNK, 1024)
    assert chunk == pytest.approx(64 * 1e-2 - 768 * 1e-5, rel=0.05)


@pytest.mark.parametrize("wobble", [lambda n: 1 + 0.1 * (-1) ** n, lambda n: 1 + 0.05 * (n % 3)])
def test_the_threshold_does_not_flutter(wobble: Callable[[int], float]):
    streaming = learnt(2e-4, 5e-4, 1e-4)
    seen = set()
    for n in range(100):
        streaming.shipped(2, 40, (4e-4 + 2e-2) * wobble(n))
        seen.add(streaming.stream_tokens)
    assert len(seen) <= 2


def test_the_same_observations_give_the_same_choices():
    first, second = learnt(3e-4, 2e-4, 1e-4), learnt(3e-4, 2e-4, 1e-4)
    assert [first.mode(n) for n in range(1, 4000, 97)] == [second.mode(n) for n in range(1, 4000, 97)]
