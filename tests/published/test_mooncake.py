"""Mooncake's published figures (Qin et al., FAST 2025) on its conversation trace: what is found again, and who waits.

Hit rates have three definitions, which differ: shares of blocks, of tokens, and means over requests (36.6, 37.4 and
38.4 % here, without limit). Where a figure of the paper names none, tokens are counted; blocks have 512 tokens, as the
trace has, and 256 in the paper. The trace's clock ticks every 3 s, and its bursts are left as they are.

Figure 5 does not say how many nodes prefill: they are 6 to 9 here, with 3 million tokens of cache each and 87 GB/s
between them, and the published ratios have to lie within the range that those span. The paper's absolute times are two
to three times ours at 7 nodes and more.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jdisagg.core.router_config import Routing
from jdisagg.sim.traces import Trace, read_mooncake
from tests.published.full_files import full_file
from tests.published.gates import Gate, absolute, between, hold, hold_all, in_order, relative
from tests.published.prefix_replay import PromptPrice, Replayed, Reuse, mooncake_70b, price_of, replay, reuse

TRACE = "mooncake_fast25_conversation.jsonl.gz"
EXCERPT = Path(__file__).parents[1] / "fixtures" / "traces" / "mooncake_conversation_first_300.jsonl.gz"
FIGURE_9 = {1e6: 0.087, 3e6: 0.165, 1e7: 0.326, 5e7: 0.398}  # hit rate by tokens of cache
FIGURE_14A = {8: 1.0, 16: 2.05, 32: 4.5, 64: 10.5, 128: 27.4}  # seconds of a prompt of so many thousand tokens
FIGURE_5 = {"random": 19.65, "least loaded": 5.27, "local cache-aware": 3.58, "global": 3.07}  # mean TTFT, s
NODES, NODE_TOKENS, LINK_BYTES_PER_S = (6, 7, 8, 9), 3e6, 87e9

ALONE, SHARED = price_of(mooncake_70b()), price_of(mooncake_70b(), LINK_BYTES_PER_S)
SYSTEMS: dict[str, tuple[Routing, PromptPrice]] = {
    "random": (Routing.RANDOM, ALONE),
    "round robin": (Routing.ROUND_ROBIN, ALONE),
    "least loaded": (Routing.LEAST_LOADED, ALONE),
    "local cache-aware": (Routing.CACHE_AWARE, ALONE),
    "global": (Routing.CACHE_AWARE, SHARED),
}


@cache
def read(path: Path) -> Trace:
    return read_mooncake(path)


@cache
def found(path: Path, capacity_tokens: float) -> Reuse:
    return reuse(read(path), capacity_tokens)


@cache
def replayed(path: Path, system: str, nodes: int) -> Replayed:
    routing, price = SYSTEMS[system]
    return replay(read(path), nodes, NODE_TOKENS, price, routing)


@pytest.fixture
def trace(request: pytest.FixtureRequest) -> Path:
    return full_file(request, TRACE)


# ------------------------------------------------------------------ grade A: what is found again


def test_a1_blocks_seen_before(trace):
    ours = 100 * found(trace, math.inf).block_share
    hold(absolute("A1 conversation: blocks seen before, % (Dynamo's docs)", 36.64, ours, 0.01))


def test_a2_cache_ratio_without_limit(trace):
    ours = 100 * found(trace, math.inf).token_share
    note = "of tokens, in blocks of 512; the paper's have 256"
    hold(between("A2 conversation: cache ratio without limit, % (table 2)", 40.0, ours, 36.0, 41.0, note))


def test_a4_hit_rate_by_capacity(trace):
    gates = []
    for capacity, published in FIGURE_9.items():
        ours, name = found(trace, capacity).token_share, f"A4 hit rate with {capacity / 1e6:g}M tokens (figure 9)"
        gates.append(between(name, published, ours, published - 0.045, published))
    hold_all(gates)


def test_a5_share_of_the_most_with_3_million_tokens(trace):
    ours = 100 * found(trace, 3e6).token_share / found(trace, math.inf).token_share
    hold(absolute("A5 conversation: share of the most at 3M tokens, %", 41.0, ours, 5.0))


def test_a6_50_million_tokens_nearly_reach_the_most(trace):
    full, most = found(trace, 5e7), found(trace, math.inf)
    shares = {"tokens": full.token_share / most.token_share, "blocks": full.block_share / most.block_share}
    name = "A6 conversation: share of the most at 50M tokens, %% of %s"
    hold_all([between(name % what, "nearly 100", 100 * share, 98, 100) for what, share in shares.items()])


# ------------------------------------------------------------------ figures 14 and 8: what a prompt costs


def test_two_shares_of_the_data_sheet_give_five_prompt_times():
    gates = [
        relative(f"figure 14a (fitted): prefill of {thousand}k tokens, s", seconds, price_s(1024 * thousand), 0.05)
        for thousand, seconds in FIGURE_14A.items()
    ]
    hold_all(gates)


def price_s(tokens: int) -> float:
    return ALONE.prefill(tokens, 0)


def test_prefill_time_with_and_without_a_cache(trace):
    """With nothing fitted anew. The last token of a prompt is always computed."""
    tokens, hits = read(trace).input_tokens, found(trace, math.inf).hit_tokens
    held = np.minimum(hits, tokens - 1)
    none, all_held = (mean_s(tokens, cached) for cached in (np.zeros_like(held), held))
    hold_all(
        [
            relative("figure 8: mean prefill without a cache, s", 1.66, none, 0.10),
            relative("figure 8: mean prefill with the global cache, s", 1.06, all_held, 0.10),
            absolute("figure 8: saved by the cache, %", 36.0, 100 * (1 - all_held / none), 4.0),
        ]
    )


def mean_s(tokens: np.ndarray, cached: np.ndarray) -> float:
    return float(np.mean([ALONE.prefill(n, p) for n, p in zip(tokens.tolist(), cached.tolist(), strict=True)]))


# ------------------------------------------------------------------ figures 5 and 10: routing


def mean_ttft_s(path: Path, system: str, nodes: int) -> float:
    return float(replayed(path, system, nodes).ttft_s.mean())


def order_of(path: Path) -> Gate:
    times = {nodes: [mean_ttft_s(path, system, nodes) for system in FIGURE_5] for nodes in NODES}
    right = all(sorted(each, reverse=True) == each for each in times.values())
    shown = "; ".join(f"{nodes} nodes: " + " > ".join(f"{s:.3g}" for s in each) for nodes, each in times.items())
    return in_order("figure 5: mean TTFT, s", " > ".join(FIGURE_5), shown, right)


@pytest.mark.slow
def test_the_order_of_four_ways_to_route(trace):
    hold(order_of(trace))


@pytest.mark.slow
def test_published_ratios_lie_in_the_range_that_6_to_9_nodes_span(trace):
    gates = []
    for system in ("random", "least loaded", "local cache-aware"):
        published = FIGURE_5[system] / FIGURE_5["global"]
        ours = [mean_ttft_s(trace, system, nodes) / mean_ttft_s(trace, "global", nodes) for nodes in NODES]
        name, shown = f"figure 5: TTFT of {system} over global", f"{max(ours):.3g} to {min(ours):.3g}"
        gates.append(in_order(name, f"{published:.3g}", shown, min(ours) <= published <= max(ours), "6 to 9 nodes"))
    hold_all(gates)


@pytest.mark.slow
def test_a_global_cache_finds_more_than_local_ones(trace):
    shares = [replayed(trace, system, 8).hit_share for system in ("global", "local cache-aware", "round robin")]
    shown = f"{100 * shares[0]:.3g} > {100 * shares[1]:.3g} % of tokens (round robin: {100 * shares[2]:.3g})"
    note = "by how much depends on the local router; 8 nodes"
    hold(in_order("figure 10: hits of a global cache against local ones", "1.38 to 2.36 x", shown,
                  shares[0] > shares[1] > shares[2], note))  # fmt: skip


# ------------------------------------------------------------------ without the full file


def test_the_excerpt_is_replayed_alike_twice_and_keeps_the_order():
    """300 requests of the first minutes, at two nodes: the same rules, on what the repository has."""
    short = read(EXCERPT)
    times = {
        system: replay(short, 2, NODE_TOKENS, price, routing).ttft_s.mean()
        for system, (routing, price) in SYSTEMS.items()
    }
    assert times["global"] <= times["local cache-aware"] < times["least loaded"] < times["random"], times
    again = replay(short, 2, NODE_TOKENS, SYSTEMS["random"][1], Routing.RANDOM)
    assert again.ttft_s.mean() == times["random"]
    assert found(EXCERPT, 1e5).hit_blocks.sum() < found(EXCERPT, math.inf).hit_blocks.sum()
