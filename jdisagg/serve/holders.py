"""Who holds the KV of a prompt, tier by tier, and what it would cost from each: for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.holdings import Holdings
from jdisagg.policy.prefix_cache import PageHash, page_hashes
from jdisagg.policy.prices import COMPUTED
from jdisagg.policy.router import Router
from jdisagg.policy.worker import Worker


def holders_of(actors: Mapping[Any, Any], tokens: Sequence[int], salt: str, now_s: float) -> list[dict[str, Any]]:
    """Of the workers of this process, and where the router is among the actors, of all others as far as they have told
    it. From any thread: what is read are single entries of tables.

    `held_tokens`: in HBM as many as a prompt could begin with now, below it all that are there. What a pool holds
    nobody knows but itself. `seconds`: of all the prompt's full pages from each source, as measured of late.
    """
    workers = {actor.config.worker: actor for actor in actors.values() if isinstance(actor, Worker)}
    found = [_described(worker, _names(worker.config, tokens, salt), now_s) for worker in workers.values()]
    for router in actors.values():
        if isinstance(router, Router):
            others = [peer.config for peer in [*router.peers.values()] if peer.config.worker not in workers]
            found += [_told(router.routes.kept, config, _names(config, tokens, salt)) for config in others]
    return found


def _names(config: WorkerConfig, tokens: Sequence[int], salt: str) -> Sequence[PageHash]:
    return page_hashes(tokens, config.page_size, salt) if config.prefix_caching else ()


def _told(kept: Holdings, config: WorkerConfig, names: Sequence[PageHash]) -> dict[str, Any]:
    """Of a worker elsewhere; nothing is known where nobody follows what it keeps."""
    told = {tier: directory.told(config.worker) for tier, directory in kept.by_tier.items() if config.pages_of(tier)}
    held = {tier.value: sum(name in there for name in names) for tier, there in told.items()}
    sources = kept.prices.get(config.worker, {})
    seconds = {source: kept.seconds(config.worker, source, len(names)) for source in sources}
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
    alone = [str(source) for source in [*tiers.prices.troubles] if not tiers.prices.usable(source, now_s)]
    return _row(config, held, seconds, alone)
