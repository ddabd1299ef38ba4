"""Prompts with named blocks, replayed over prefill nodes that keep prefixes: who hits what, and how long prompts wait.

A node is a queue (first come, first served, one prompt at a time), a prefix cache and a price for prompts; the routing
is the router's own. Decoding is left out. A prefix counts as held from when its prompt was sent, as the router's
directory has it: on one node the queue sees to it, and a fetch from a node that still computes it comes too cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import cast

import numpy as np

from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.steps import KVTransfer, PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import Role
from jdisagg.policy.cache.prefix_cache import PrefixCache
from jdisagg.policy.router.routing import (
    Candidate,
    CostForecast,
    FetchEstimate,
    RoutingRequest,
    WorkerSnapshot,
    choose_pair,
)
from jdisagg.sim.cost_models import CostModel, Model, Roofline
from jdisagg.sim.fast_forward import SimulatedSequence as Length
from jdisagg.sim.hardware import hardware
from jdisagg.sim.traces import Trace
from tests.published.mooncake import MOONCAKE_70B

DECODER = WorkerSnapshot(WorkerId("decode"), Role.DECODE, 0.0, 0, True)  # of no concern here, and always free


@dataclass(frozen=True, slots=True)
class PromptPrice:
    """Seconds of a prompt on one node, and of KV that comes from another."""

    prefill: Callable[[int, int], float]  # tokens, leading tokens that are there already
    fetch: Callable[[int], float]  # tokens; infinite where nodes share nothing


def mooncake_70b() -> Roofline:
    """A prefill node of Mooncake: LLaMA3-70B on 8 A800, its two shares fitted on the paper's figure 14a (FAST 2025).

    T(n, p) = 80 (22 (n - p) d² / .41 + 2 (n² - p²) d / .73) / (8 x 312 TFLOP/s) for n tokens of which p are held.
    """
    chip = replace(hardware("a800"), gemm=0.41, prefill_attention=0.73, collective_s=0.0, link_bytes_per_s=math.inf)
    return Roofline(Model(MOONCAKE_70B), chip, tp=8, host_s=0.0)


def price_of(cost: CostModel, kv_bytes_per_s: float = 0.0) -> PromptPrice:
    """By `cost`, whole prompts at once. kv_bytes_per_s: at which a node gets KV of another; 0: it gets none."""

    def fetch_s(tokens: int) -> float:
        return cost.transfer_bytes(_shipped(tokens)) / kv_bytes_per_s if kv_bytes_per_s else math.inf

    return PromptPrice(lambda tokens, cached: cost.prefill_s(_prompt(tokens, cached)), fetch_s)


def _prompt(tokens: int, cached: int) -> PrefillChunks:
    left = cast(tuple[int, ...], Length(tokens - cached))
    chunk = PrefillChunk(RequestId(""), left, cached, (), True, SamplingParams(max_tokens=1))
    return PrefillChunks((chunk,), tokens - cached, 0)


def _shipped(tokens: int) -> KVTransfer:
    return KVTransfer(Attempt(RequestId(""), 0), WorkerId(""), WorkerId(""), (), (), tokens)


@dataclass(slots=True)
class Prefixes:
    """Blocks that a node, or all of them together, can hold; the least recent leaves go."""

    capacity: float  # blocks
    cache: PrefixCache = field(default_factory=PrefixCache)
    _ids: count[int] = field(default_factory=count)

    def match(self, names: Sequence[int]) -> int:
        return self.cache.match(names)

    def keep(self, names: Sequence[int]) -> None:
        """A path used now: what is held of it is the most recent, the rest is taken up."""
        self.cache.insert(names, tuple(islice(self._ids, len(names))))
        if len(self.cache) > self.capacity:
            self.cache.evict(int(len(self.cache) - self.capacity))


@dataclass(frozen=True)
class Reuse:
    """What was found again."""

    hit_blocks: np.ndarray  # i64[N], leading blocks of each request
    blocks: np.ndarray  # i64[N]
    hit_tokens: np.ndarray  # i64[N]
    tokens: np.ndarray  # i64[N]

    @property
    def block_share(self) -> float:
        return float(self.hit_blocks.sum() / self.blocks.sum())

    @property
    def token_share(self) -> float:
        return float(self.hit_tokens.sum() / self.tokens.sum())


def reuse(trace: Trace, capacity_tokens: float) -> Reuse:
    """One cache for the whole trace, in its order. capacity_tokens: may be infinite."""
    held, hits = Prefixes(capacity_tokens // trace.block_tokens), []
    for names in trace.block_hashes:
        hits.append(held.match(names))
        held.keep(names)
    return _reuse(trace, hits)


def _reuse(trace: Trace, hits: Sequence[int]) -> Reuse:
    hit_blocks = np.array(hits, dtype=np.int64)
    blocks = np.array([len(names) for names in trace.block_hashes], dtype=np.int64)
    tokens = np.minimum(hit_blocks * trace.block_tokens, trace.input_tokens)  # the last block may be partial
    return Reuse(hit_blocks, blocks, tokens, trace.input_tokens)


@dataclass(slots=True)
class Node:
    """A prefill node: what it holds, and until when it is busy."""

    name: WorkerId
    held: Prefixes
    free_s: float = 0.0
    served: int = 0

    def look(self, names: Sequence[int], block_tokens: int, most_tokens: int, now_s: float) -> WorkerSnapshot:
        cached_tokens = min(self.held.match(names) * block_tokens, most_tokens)
        waits_s = max(0.0, self.free_s - now_s)
        return WorkerSnapshot(self.name, Role.PREFILL, waits_s, self.served, True, False, cached_tokens)


@dataclass(frozen=True)
class Replayed:
    """Of each request: seconds to its first token, seconds of its node, and prompt tokens it did not compute."""

    ttft_s: np.ndarray
    node_s: np.ndarray
    cached_tokens: np.ndarray
    input_tokens: np.ndarray

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens."""
        return float(self.cached_tokens.sum() / self.input_tokens.sum())


def replay(
    trace: Trace, nodes: int, capacity_tokens: float, price: PromptPrice, routing: Routing, seed: int = 0
) -> Replayed:
    """`nodes` equal nodes of `capacity_tokens` each. A prompt computes at least its last token."""
    pool = [Node(WorkerId(f"node-{index}"), Prefixes(capacity_tokens // trace.block_tokens)) for index in range(nodes)]
    by_name = {node.name: node for node in pool}
    rows = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.block_hashes, strict=True)
    ttft_s, node_s, cached = [], [], []
    for number, (now_s, tokens, names) in enumerate(rows):
        looks = {node.name: node.look(names, trace.block_tokens, tokens - 1, now_s) for node in pool}
        looks = with_fetches(looks, tokens, price)
        forecast = CostForecast(prefill=lambda look, left, tokens=tokens: price.prefill(tokens, tokens - left))
        routed = RoutingRequest(f"r{number}", tokens, number, seed, forecast)
        choice = choose_pair([*looks.values(), DECODER], routed, routing)
        assert choice.taken is not None, "prefill nodes have always room here"
        node = by_name[choice.taken.prefill]
        seconds, cached_tokens = _spent(choice.prefills[0], looks, tokens, price)
        start_s = max(now_s, node.free_s)
        node.free_s = start_s + seconds
        node.served += 1
        node.held.keep(names)
        ttft_s.append(node.free_s - now_s)
        node_s.append(seconds)
        cached.append(cached_tokens)
    return Replayed(np.array(ttft_s), np.array(node_s), np.array(cached), trace.input_tokens)


def with_fetches(
    looks: dict[WorkerId, WorkerSnapshot], tokens: int, price: PromptPrice
) -> dict[WorkerId, WorkerSnapshot]:
    """Returns the snapshots with what each node could fetch from the one that holds the longest prefix.

    Mooncake (Qin et al., FAST 2025), algorithm 1, without its threshold: both ways are priced and the lesser counts.
    """
    holder = max(looks.values(), key=lambda look: look.cached_tokens)
    found = dict(looks)
    for name, look in looks.items():
        missing = holder.cached_tokens - look.cached_tokens
        fetch_s = price.fetch(missing) if missing > 0 else math.inf
        if fetch_s < math.inf:
            saved_s = price.prefill(tokens, look.cached_tokens) - price.prefill(tokens, holder.cached_tokens)
            found[name] = look._replace(reach=FetchEstimate(holder.worker, holder.cached_tokens, fetch_s / saved_s))
    return found


def _spent(
    taken: Candidate, looks: dict[WorkerId, WorkerSnapshot], tokens: int, price: PromptPrice
) -> tuple[float, int]:
    """Seconds of the node that was taken, a fetch included, and the tokens that it had or got."""
    parts, look = dict(taken.parts), looks[taken.worker]
    if look.reach is not None and f"fetch from {look.reach.source}" in parts:
        return parts[f"fetch from {look.reach.source}"] + parts["prefill"], look.reach.tokens
    cached_tokens = look.cached_tokens
    return price.prefill(tokens, cached_tokens), cached_tokens
