"""Who holds the KV of a prompt, as people are shown it: workers here by their own books, others by the router's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.events import ROUTER
from jdisagg.core.messages import CacheHeld, Priced
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role
from jdisagg.policy.cache.prefix_cache import packed, page_hashes
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.observability.cluster_view import holders_of
from tests.sim.cases import worker

HERE = worker("prefill-0", Role.PREFILL, prefix_caching=True, peer_fetch=True, dram_pages=16)
THERE = replace(HERE, worker="decode-0", role=Role.DECODE)
TOKENS = tuple(range(40))


def test_workers_of_other_processes_are_shown_as_they_have_told_the_router():
    router = Router(RouterConfig(), (HERE, THERE))
    names = page_hashes(TOKENS, THERE.page_size)
    router.routes.kept.hear(THERE, CacheHeld(0, packed(names[:7])))
    router.routes.kept.hear(THERE, CacheHeld(0, packed(names[5:]), tier=Tier.DRAM))
    router.routes.kept.hear_prices(THERE.worker, Priced((("computed", 0.5, 0.1), ("prefill-0", 0.0, 0.01))))
    here, there = holders_of({HERE.worker: Worker(HERE), ROUTER: router}, TOKENS, "", 0.0)
    assert (here["worker"], here["held_tokens"]) == ("prefill-0", {"hbm": 0, "dram": 0})
    assert (there["worker"], there["role"]) == ("decode-0", "decode")
    assert there["held_tokens"] == {"hbm": 28, "dram": 20}
    assert there["seconds"] == {"computed": pytest.approx(1.5), "prefill-0": pytest.approx(0.1)}


def test_other_workers_are_among_the_sources_of_one_here():
    actor = Worker(HERE)
    actor.tiers.prices.learn("decode-0", 5, 0.5, 0.0)
    actor.tiers.prices.failed("decode-1", 0.0)
    (shown,) = holders_of({HERE.worker: actor}, TOKENS, "", 0.0)
    assert shown["seconds"]["decode-0"] == pytest.approx(1.0) and shown["left_alone"] == ["decode-1"]
