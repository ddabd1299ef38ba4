"""Who holds the KV of a prompt, tier by tier, and what it would cost from each: for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jdisagg.core.tiers import Tier
from jdisagg.policy.prefix_cache import page_hashes
from jdisagg.policy.prices import COMPUTED
from jdisagg.policy.worker import Worker


def holders_of(actors: Mapping[Any, Any], tokens: Sequence[int], salt: str, now_s: float) -> list[dict[str, Any]]:
    """Of the workers of this process. From any thread: what is read are single entries of tables.

    `held_tokens`: in HBM as many as a prompt could begin with now, below it all that are there. What a pool holds
    nobody knows but itself. `seconds`: of all the prompt's full pages from each source, as measured of late.
    """
    workers = [actor for actor in actors.values() if isinstance(actor, Worker)]
    return [_described(worker, tokens, salt, now_s) for worker in workers]


def _described(worker: Worker, tokens: Sequence[int], salt: str, now_s: float) -> dict[str, Any]:
    config, tiers = worker.config, worker.tiers
    names = page_hashes(tokens, config.page_size, salt) if config.prefix_caching else ()
    held = {Tier.HBM.value: worker.shared.cache.match(names)}
    held |= {tier.value: sum(map(pool.readable, names)) for tier, pool in tiers.pools.items()}
    sources = [
        *map(str, tiers.pools),
        *([Tier.POOL.value] if config.shared_pool else []),
        *([COMPUTED] if config.has_tiers else []),
    ]
    sources += [source for source in [*tiers.prices.lines] if source not in sources]  # other workers
    seconds = {str(source): tiers.prices.seconds(source, len(names), now_s) for source in sources}
    return {
        "worker": config.worker,
        "role": config.role.value,
        "page_size": config.page_size,
        "held_tokens": {tier: pages * config.page_size for tier, pages in held.items()},
        "seconds": seconds,
        "left_alone": [str(source) for source in [*tiers.prices.troubles] if not tiers.prices.usable(source, now_s)],
    }
