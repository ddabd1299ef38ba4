"""What the router decides with: limits of the queue, deadlines of every wait, and how often it tries again."""

from __future__ import annotations

from enum import StrEnum

from jdisagg.core.codec import Number, TaggedStruct, Whole

RESERVE_TOKENS = 64  # output tokens reserved at first by default: servers, simulator and planner


class Routing(StrEnum):
    """How the router chooses a prefill and a decode worker; see `policy/router/routing.py`."""

    LEAST_LOADED = "least_loaded"  # the least outstanding work
    ROUND_ROBIN = "round_robin"  # whose turn it is
    CACHE_AWARE = "cache_aware"  # least predicted: queue, uncached prefill, the pair's link, decode, missed objectives
    RANDOM = "random"  # by lot


class RouterConfig(TaggedStruct, frozen=True):
    """Every wait of a request has one of these deadlines, and the router owns them all."""

    queue_limit: Whole = 256  # waiting requests over which new ones are rejected
    queue_timeout_s: Number = 60.0  # longest wait for a reservation, where the request does not say; 0: none
    handoff_timeout_s: Number = 30.0  # for a reservation's answer, KV to reach it, or an abort to be acknowledged
    lease_s: Number = 15.0  # of a reservation, from the last that was heard of its source
    prefill_timeout_s: Number = 300.0  # from the reservation to the first token
    stall_timeout_s: Number = 120.0  # between two tokens of one request
    max_retries: Whole = 3  # times a request is prefilled again after a failure (preemptions are not counted)
    abort_tries: Whole = 3  # times an abort is sent before the lease is left to end it
    capacity_retry_s: Number = 1.0  # a full house is asked again after this, should its word of free pages be lost
    workers_return: bool = False  # lost workers may be replaced: requests wait for that until their queue deadline
    adopt_s: Number = 5.0  # that a request which another router had waits for a worker that keeps it
    first_epoch: Whole = 1  # over every epoch of earlier routers: workers may still hold what those asked for
    decode_token_weight: Number = 4.0  # work of one output token, in prompt tokens, when workers are compared
    short_token_weight: Number = 2.0  # a prompt token computed beside rows that decode, which wait for it
    early_rejection: bool = True  # of requests that cannot meet the objectives they state, by prediction
    routing: Routing = Routing.LEAST_LOADED
    colocated_fallback: bool = True  # beside pools, workers of both roles take what is predicted to be better there
    max_loras: Whole = 0  # different adapters that run at once: what one step may hold; 0: no bound
    routing_seed: int = 0  # of --routing=random
