"""Every interleaving where two requests have one text: who keeps, reads, evicts and writes which page."""

from dataclasses import replace

import pytest

from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import TransferMode
from jdisagg.policy.cache import page_pool
from jdisagg.policy.cache.page_pool import SharedPages
from jdisagg.policy.cache.prefix_cache import LockedPages
from jdisagg.policy.worker import decode
from tests.explore.scenes import ROUTER, Scene, colocated, disaggregated, request, twins
from tests.explore.search import explore
from tests.explore.test_explore import endings, whole
from tests.explore.world import World

KEPT = {"prefix_caching": True, "transfer": TransferMode.WHOLE}
PAIR = disaggregated(requests=twins(2, 5), num_pages=4, **KEPT)
BOTH = colocated(2, 1, requests=twins(2, 5), num_pages=4, **KEPT)
THREE = colocated(3, 1, requests=[*twins(2, 5), request(3)], num_pages=4, num_slots=2, **KEPT)  # the third evicts


def broken(scene: Scene) -> str:
    found = explore(World(scene)).violation
    print(found)
    return found


@pytest.mark.parametrize("scene", [PAIR, BOTH, THREE], ids=["pair", "colocated", "and a third"])
def test_two_requests_of_one_text_share_its_pages(scene):
    assert endings(whole(scene)) == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("scene", [BOTH, pytest.param(PAIR, marks=pytest.mark.hostile)], ids=["colocated", "pair"])
def test_a_plan_that_fails_costs_no_request_that_reads_what_it_left(scene):
    assert endings(whole(scene.but(fail=1))) == {"length"}


@pytest.mark.parametrize(
    ("fault", "also"),
    [
        ("cancel", {"abort"}),
        pytest.param("fail", set(), marks=pytest.mark.slow),
        pytest.param("loss", set(), marks=pytest.mark.hostile),
    ],
)
def test_a_fault_of_one_takes_no_page_from_the_others(fault, also):
    assert endings(whole(THREE.but(**{fault: 1}))) == {"length"} | also


@pytest.mark.parametrize(
    ("scene", "fault"),
    [
        (BOTH, "restart"),
        *(pytest.param(BOTH, fault, marks=pytest.mark.slow) for fault in ("loss", "dup")),
        pytest.param(BOTH, "late", marks=pytest.mark.hostile),
        pytest.param(PAIR, "", marks=pytest.mark.hostile),
    ],
)
def test_what_the_router_misses_of_its_workers_caches_costs_no_request_and_no_token(scene, fault):
    aware = scene.but(router=replace(ROUTER, routing=Routing.CACHE_AWARE), **({fault: 1} if fault else {}))
    assert endings(whole(aware)) == {"length"}


def test_on_one_worker_a_reader_that_goes_leaves_the_other_what_it_reads():
    assert endings(whole(BOTH.but(cancel=1))) == {"length", "abort"}


def test_kept_pages_make_room_for_whoever_needs_it():
    """Three pages hold one request: what is kept of the first goes when the second, of other text, is reserved."""
    assert endings(whole(colocated(2, 1, **KEPT))) == {"length"}


def test_pages_that_nobody_locks_could_go_while_they_are_read(monkeypatch):
    monkeypatch.setattr(SharedPages, "lock", _unlocked)
    assert broken(THREE)


def _unlocked(shared: SharedPages, names: tuple[int, ...]) -> LockedPages:
    cache = shared.cache
    return LockedPages((), tuple(cache._nodes[name].page for name in names[: cache.match(names)]))


def test_the_last_page_of_a_prompt_that_is_computed_here_must_be_its_own(monkeypatch):
    monkeypatch.setattr(page_pool, "readable_pages", lambda request, config: request.prompt_tokens // config.page_size)
    scene = colocated(2, 1, requests=twins(2, 4), num_pages=4, **KEPT)
    assert broken(scene)


def test_kv_that_never_was_whole_must_not_be_kept(monkeypatch):
    keep = decode.DecodePhase._release_pages
    monkeypatch.setattr(decode.DecodePhase, "_release_pages", lambda self, each, good: keep(self, each, good=True))
    assert broken(PAIR.but(cancel=1)) or broken(PAIR.but(fail=1))
