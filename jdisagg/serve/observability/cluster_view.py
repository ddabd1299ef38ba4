"""The whole cluster as one JSON document, made on demand from metrics and records.

Counters are totals: to get a rate, take two documents and divide the difference by the time between them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.samples import Sample

from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.cache.directory import TierDirectory
from jdisagg.policy.cache.fetch import COMPUTED
from jdisagg.policy.cache.prefix_cache import PageHash, page_hashes
from jdisagg.policy.router.decisions import Decision
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends.text import dump
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import DebugState

REQUESTS, DECISIONS = 24, 16  # the latest requests and decisions in a document
SHARED_S = 0.25  # the shortest time between two documents, however many clients ask
# Fields of a document and their samples: per worker, per pair of workers, and in total.
OF_WORKERS = {
    "prefill_tokens": "jdisagg_prefill_tokens_total",
    "decode_steps": "jdisagg_decode_runs_total",
    "decode_tokens": "jdisagg_decode_batch_sequences_sum",
    "prefix_queries": "jdisagg_prefix_cache_queries_total",
    "prefix_hits": "jdisagg_prefix_cache_hits_total",
    "backlog_tokens": "jdisagg_prefill_backlog_tokens",
    "parts_resent": "jdisagg_parts_resent_total",
    "failures": "jdisagg_engine_failures_total",
}
OF_LINKS = {
    "bytes": "jdisagg_shipped_bytes_total",
    "wire_s": "jdisagg_ship_seconds_sum",
    "parts": "jdisagg_ship_seconds_count",
}
OF_ALL = {
    "waiting": "jdisagg_requests_waiting",
    "running": "jdisagg_requests_running",
    "output_tokens": "jdisagg_generation_tokens_total",
    "prompt_tokens": "jdisagg_prompt_tokens_total",
    "rejects": "jdisagg_rejects_total",
}
BY_USE, SEQUENCES = "jdisagg_kv_pages_by_use", "jdisagg_decode_sequences"
SAMPLES = frozenset({*OF_WORKERS.values(), *OF_LINKS.values(), *OF_ALL.values(), BY_USE, SEQUENCES})


class Counted:
    """Samples by name, and by worker or pair of workers."""

    def __init__(self, samples: list[Sample]) -> None:
        self._by_worker: dict[tuple[str, str, str], float] = {}
        self._by_link: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        self._of_all: dict[str, float] = defaultdict(float)
        for name, labels, value, *_ in samples:
            if "source" in labels:
                self._by_link[labels["source"], labels["destination"]][name] = value
            elif "worker" in labels:
                self._by_worker[labels["worker"], name, labels.get("use") or labels.get("state") or ""] = value
            else:
                self._of_all[name] += value

    def of(self, worker: str, name: str, state: str = "") -> float:
        return self._by_worker.get((worker, name, state), 0.0)

    def worker(self, worker: str) -> dict[str, Any]:
        pages = {use: int(self.of(worker, BY_USE, use)) for use in ("live", "in_flight", "cached", "free")}
        sequences = {state: int(self.of(worker, SEQUENCES, state)) for state in ("running", "room")}
        totals = {field: self.of(worker, name) for field, name in OF_WORKERS.items()}
        return {"pages": pages, "sequences": sequences} | totals

    def links(self) -> list[dict[str, Any]]:
        return [
            {"source": source, "destination": destination}
            | {field: values.get(name, 0.0) for field, name in OF_LINKS.items()}
            for (source, destination), values in sorted(self._by_link.items())
        ]

    def totals(self) -> dict[str, float]:
        return {field: self._of_all[name] for field, name in OF_ALL.items()}


class ClusterView:
    """Makes documents. Methods are safe from any thread."""

    def __init__(self, service: Service, metrics: Metrics, debug_state: DebugState, version: str) -> None:
        self._service, self._metrics, self._debug, self._version = service, metrics, debug_state, version

    def now_s(self) -> float:
        return self._service.now_s()

    def document(self) -> dict[str, Any]:
        """Returns the document. Times are seconds of the driver's clock; `time` is wall-clock time."""
        service, records, now_s = self._service, self._debug.records, self._service.now_s()
        counted = Counted(list(self._metrics.merged.values(SAMPLES)))
        places = {info.config.worker: info for info in self._debug.places()}
        return {
            "now_s": now_s,
            "time": time.time(),
            "version": self._version,
            "model": service.model_name,
            "max_model_len": service.max_model_len,
            "chat": service.tokenizer.has_chat_template,
            "state": state_of(service),
            "totals": counted.totals(),
            "workers": [info.to_json() | counted.worker(worker) for worker, info in places.items()],
            "links": [each for each in counted.links() if {each["source"], each["destination"]} <= places.keys()],
            "changes": list(records.changes),
            "requests": records.summaries(REQUESTS, now_s),
            "decisions": [_brief(decision) for decision in records.last(DECISIONS)],
        }


def state_of(service: Service) -> str:
    return "draining" if service.draining else "ready" if service.ready else "unready"


def _brief(decision: Decision) -> dict[str, Any]:
    """Returns a decision without its candidates, which /debug/requests/ID has."""
    return {name: value for name, value in decision.to_json().items() if name != "candidates"}


class SharedDocument:
    """The latest document as bytes, shared by all clients; made on another thread, and only on request."""

    def __init__(self, make: Callable[[], dict[str, Any]], shared_s: float = SHARED_S) -> None:
        self._make, self._shared_s = make, shared_s
        self._lock, self._body, self._fresh_until_s = asyncio.Lock(), b"", 0.0

    async def get(self) -> bytes:
        async with self._lock:
            if time.monotonic() >= self._fresh_until_s:
                self._body = await asyncio.to_thread(lambda: dump(self._make()).encode())
                self._fresh_until_s = time.monotonic() + self._shared_s
            return self._body


# The workers that hold the KV of a prompt, tier by tier, and the cost to fetch it (/debug).


def holders_of(actors: Mapping[Any, Any], tokens: Sequence[int], salt: str, now_s: float) -> list[dict[str, Any]]:
    """Returns one entry per worker of this process; with the router among `actors`, also of the workers it knows of.

    `held_tokens` are, in HBM, the cached prefix of the prompt; in lower tiers, all its pages that are there. The shared
    pool's content is unknown. `seconds` is the recent cost to fetch all full pages of the prompt from each source. Safe
    from any thread, since only single table entries are read.
    """
    workers = {actor.config.worker: actor for actor in actors.values() if isinstance(actor, Worker)}
    found = [_described(worker, _names(worker.config, tokens, salt), now_s) for worker in workers.values()]
    for router in actors.values():
        if isinstance(router, Router):
            others = [peer.config for peer in [*router.peers.values()] if peer.config.worker not in workers]
            found += [_reported(router.routes.kept, config, _names(config, tokens, salt)) for config in others]
    return found


def _names(config: WorkerConfig, tokens: Sequence[int], salt: str) -> Sequence[PageHash]:
    return page_hashes(tokens, config.page_size, salt) if config.prefix_caching else ()


def _reported(holdings: TierDirectory, config: WorkerConfig, names: Sequence[PageHash]) -> dict[str, Any]:
    """Returns the entry of another process's worker; empty tiers if the router does not follow its cache."""
    reported = {
        tier: directory.told(config.worker) for tier, directory in holdings.by_tier.items() if config.pages_of(tier)
    }
    held = {tier.value: sum(name in pages for name in names) for tier, pages in reported.items()}
    sources = holdings.prices.get(config.worker, {})
    seconds = {source: holdings.seconds(config.worker, source, len(names)) for source in sources}
    return _row(config, held, seconds, [])


def _row(
    config: WorkerConfig, held: Mapping[str, int], seconds: Mapping[str, float | None], left_alone: Sequence[str]
) -> dict[str, Any]:
    return {
        "worker": config.worker,
        "role": config.role.value,
        "page_size": config.page_size,
        "held_tokens": {tier: pages * config.page_size for tier, pages in held.items()},
        "seconds": dict(seconds),
        "left_alone": list(left_alone),
    }


def _described(worker: Worker, names: Sequence[PageHash], now_s: float) -> dict[str, Any]:
    config, tiers = worker.config, worker.tiers
    held = {Tier.HBM.value: worker.shared.cache.match(names)}
    held |= {tier.value: sum(map(pool.readable, names)) for tier, pool in tiers.pools.items()}
    sources = [
        *map(str, tiers.pools),
        *([Tier.POOL.value] if config.shared_pool else []),
        *([COMPUTED] if config.has_tiers else []),
    ]
    sources += [source for source in [*tiers.prices.lines] if source not in sources]  # other workers
    seconds = {str(source): tiers.prices.seconds(source, len(names), now_s) for source in sources}
    alone = [str(source) for source in [*tiers.prices.backoffs] if not tiers.prices.usable(source, now_s)]
    return _row(config, held, seconds, alone)
