"""The replay of named prompts: queues add up, caches are bounded, and fetched prefixes are paid for."""

import math

import numpy as np
import pytest

from jdisagg.core.router_config import Routing
from jdisagg.sim.traces import Trace
from tests.published.prefix_replay import PromptPrice, replay, reuse

ALONE = PromptPrice(lambda tokens, cached: float(tokens - cached), lambda tokens: math.inf)
SHARED = PromptPrice(ALONE.prefill, lambda tokens: 0.1 * tokens)


def trace_of(*rows: tuple[float, int, tuple[int, ...]]) -> Trace:
    """(arrival, tokens, names of 10 tokens each)"""
    times, tokens, names = zip(*rows, strict=True)
    return Trace(np.array(times), np.array(tokens), np.ones(len(rows), dtype=np.int64), names, 10)


REPEATED = trace_of((0.0, 40, (1, 2, 3, 4)), (0.0, 40, (1, 2, 3, 5)), (100.0, 35, (1, 2, 6, 7)))


def test_one_node_is_a_queue_and_computes_what_it_does_not_hold():
    found = replay(REPEATED, 1, 1000, ALONE, Routing.LEAST_LOADED)
    assert found.ttft_s.tolist() == [40, 50, 15] and found.cached_tokens.tolist() == [0, 30, 20]


def test_a_prompt_that_is_held_whole_still_computes_its_last_token():
    found = replay(trace_of((0.0, 20, (1, 2)), (50.0, 20, (1, 2))), 1, 1000, ALONE, Routing.LEAST_LOADED)
    assert found.ttft_s.tolist() == [20, 1]


def test_a_node_holds_no_more_than_it_can():
    rows = [(100.0 * index, 20, (10 * index, 10 * index + 1)) for index in range(3)]
    again = trace_of(*rows, (400.0, 20, (20, 21)), (500.0, 20, (0, 1)))
    assert replay(again, 1, 40, ALONE, Routing.LEAST_LOADED).cached_tokens.tolist() == [0, 0, 0, 19, 0]


def test_least_loaded_spreads_what_cache_aware_keeps_together_and_a_fetch_has_both():
    apart = replay(REPEATED, 2, 1000, ALONE, Routing.LEAST_LOADED)
    assert apart.ttft_s.tolist()[:2] == [40, 40]
    far = replay(trace_of((0.0, 40, (1, 2, 3, 4)), (39.0, 40, (1, 2, 3, 5))), 2, 1000, ALONE, Routing.CACHE_AWARE)
    assert far.ttft_s.tolist() == [40, 11]
    fetched = replay(REPEATED, 2, 1000, SHARED, Routing.CACHE_AWARE)
    assert fetched.ttft_s.tolist()[:2] == [40, 13] and fetched.cached_tokens.tolist()[:2] == [0, 30]
    assert fetched.hit_share == pytest.approx((0 + 30 + 20) / 115)


def test_reuse_counts_blocks_and_tokens_apart():
    found = reuse(REPEATED, math.inf)
    assert found.block_share == pytest.approx(5 / 12) and found.token_share == pytest.approx(50 / 115)
    assert reuse(REPEATED, 20).hit_blocks.tolist() == [0, 2, 2]
