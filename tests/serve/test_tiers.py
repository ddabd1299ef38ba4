"""KV below HBM, live: a tiny model, real devices, stores and restarts. No token is ever another than without tiers."""

from __future__ import annotations

from typing import Any

import pytest

import jdisagg
from jdisagg.core.errors import ConfigError
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.tiers import Tier
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.deployment import resolve_deployment, shapes_of
from tests.fixtures import conformance
from tests.kv.tiers.valkey import Valkey
from tests.serve.live_http import eventually

FAMILY = conformance.load("llama3")
GREEDY = jdisagg.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "kv_tokens": 128,
    "load_format": "hf",
}
PROMPTS, PROMPT_TOKENS = 6, 40  # together 30 pages of 16
TOKENS = [token for prompt in FAMILY.prompts for token in prompt]
COLOCATED, PAIR = "colocated:tp1", "prefill:tp2,decode:pp2"


def prompts() -> list[list[int]]:
    return [(TOKENS[first:] + TOKENS[:first])[:PROMPT_TOKENS] for first in range(PROMPTS)]


def started(mesh: str, **settings: Any) -> jdisagg.LLM:
    return jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, **{**SIZES, **settings})


def asked(llm: jdisagg.LLM) -> tuple[list[list[int]], int]:
    """Answers to the prompts, one after the other, and how many of their tokens were not computed."""
    found = [llm.generate(prompt, GREEDY) for prompt in prompts()]
    return [list(each.token_ids) for each in found], sum(each.cached_tokens for each in found)


def workers_of(llm: jdisagg.LLM) -> list[Worker]:
    return [actor for actor in llm.service.driver.actors.values() if isinstance(actor, Worker)]


def at_rest(llm: jdisagg.LLM) -> bool:
    """Every move has ended, and every page is back or kept."""
    workers = workers_of(llm)
    moving = any(each.tiers.demotions is not None and each.tiers.demotions.under_way for each in workers)
    return not moving and all(each.idle and each.shared.available == each.config.num_pages for each in workers)


def checked_at_rest(llm: jdisagg.LLM) -> None:
    eventually(lambda: at_rest(llm), 60)
    for each in workers_of(llm):
        each.check_invariants()


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What is answered without tiers."""
    with started(COLOCATED) as llm:
        first, _ = asked(llm)
        again, cached = asked(llm)
        assert first == again and not cached, "HBM alone keeps none of it until it is asked for again"
        return first


def test_what_left_hbm_comes_back_from_dram_and_the_tokens_are_the_same(plain):
    with started(COLOCATED, dram_tokens=1024) as llm:
        assert asked(llm)[0] == plain

        def came_back() -> bool:
            for each in workers_of(llm):
                each.tiers.prices.lines.clear()  # a machine that was held up may have found it dear
            answers, cached = asked(llm)
            assert answers == plain
            return cached > 0

        eventually(came_back, 120)
        assert not llm.service.driver.executors.by_worker[WorkerId("colocated-0")].recompiles()
        checked_at_rest(llm)


@pytest.mark.slow
def test_a_restarted_pair_of_workers_reads_what_the_last_ones_left_on_disk(plain, tmp_path):
    settings = {"disk_path": str(tmp_path), "disk_tokens": 1024}
    with started(PAIR, **settings) as llm:
        for _ in range(3):
            assert asked(llm)[0] == plain
        checked_at_rest(llm)
        kept = {each.config.worker: set(each.tiers.pools[Tier.DISK].kept) for each in workers_of(llm)}
        assert any(kept.values())
    with started(PAIR, **settings) as llm:
        assert {each.config.worker: set(each.tiers.pools[Tier.DISK].kept) for each in workers_of(llm)} == kept
        answers, cached = asked(llm)
        assert answers == plain and cached > 0
        checked_at_rest(llm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.hostile)])
def test_pages_that_are_quantised_in_hbm_come_back_from_a_pool_with_their_scales(tmp_path, kind):
    answers: list[list[list[int]]] = []
    cached = 0
    for _ in range(2):
        with started(COLOCATED, pool=f"file://{tmp_path}/pool", kv_dtype=kind) as llm:
            found, cached = asked(llm)
            answers += [found, asked(llm)[0]]
            checked_at_rest(llm)
            assert llm.service.recompiles() == 0
    assert cached > 0 and answers[1:] == answers[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("compress", [pytest.param("int8", marks=pytest.mark.hostile), "fp8"])
def test_a_pool_serves_a_process_that_never_saw_the_prompt_and_quantised_pages_are_taken(plain, tmp_path, compress):
    settings = {"pool": f"file://{tmp_path}/pool", "tier_compress": compress, "transfer_error_bound": 1.0}
    with started(COLOCATED, **settings) as llm:
        for _ in range(2):
            asked(llm)
        checked_at_rest(llm)
    with started(COLOCATED, **settings) as llm:
        answers, cached = asked(llm)
        assert cached > 0 and [each[:1] for each in answers] == [each[:1] for each in plain]
        checked_at_rest(llm)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_pool_that_is_gone_or_hangs_costs_no_token_and_no_answer(plain, harm):
    with Valkey() as server, started(COLOCATED, pool=server.url) as llm:
        assert asked(llm)[0] == plain
        getattr(server, harm)()
        try:
            assert [asked(llm)[0] for _ in range(2)] == [plain] * 2
        finally:
            server.thaw() if harm == "freeze" else server.start()
        assert asked(llm)[0] == plain
        checked_at_rest(llm)


def test_tiers_beside_a_ring_are_refused_at_the_start_in_one_line_with_both_settings():
    settings = Settings(model=str(FAMILY.folder), mesh="prefill:tp2,decode:ring2", dram_tokens=64)
    with pytest.raises(ConfigError, match="--dram_tokens=64 and --mesh=prefill:tp2,decode:ring2"):
        resolve_deployment(settings, "cpu", None)


def test_a_role_whose_pages_would_be_others_is_refused_to_a_worker_with_tiers():
    settings = Settings(
        **{**SIZES, "prefill_page_size": 16}, model=str(FAMILY.folder), mesh="prefill:2xtp1,decode:tp1", dram_tokens=64
    )
    deployment = resolve_deployment(settings, "cpu", None)
    place = deployment.mesh.workers()[0]
    with pytest.raises(ConfigError, match="--dram_tokens=64"):
        shapes_of(deployment, settings, place, place.worker).find("decode", "")


@pytest.mark.parametrize("wire", ["none", pytest.param("int8", marks=pytest.mark.hostile)])
def test_workers_of_any_mesh_lend_each_other_what_they_hold_and_the_tokens_are_the_same(plain, wire):
    """Two workers in turn: each prompt is asked for twice, first of the one, then of the other."""
    sizes = {"kv_tokens": 1024, "routing": "round_robin", "tier_compress": wire, "transfer_error_bound": 0.2}
    with started("colocated:2xtp1", peer_fetch=True, **sizes) as llm:
        one = prompts()[0]
        assert list(llm.generate(one, GREEDY).token_ids) == plain[0]
        again = llm.generate(one, GREEDY)
        assert again.cached_tokens == 32 and (wire != "none" or list(again.token_ids) == plain[0])
        assert not llm.service.recompiles()
        checked_at_rest(llm)


@pytest.mark.slow
def test_a_prefill_worker_reads_what_the_decode_worker_wrote():
    """The next turn of a conversation: its last answer was decoded, on another mesh."""
    with started(PAIR, peer_fetch=True, kv_tokens=1024) as llm, started(COLOCATED, kv_tokens=1024) as other:
        one, params = prompts()[0][:16], jdisagg.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        answer = list(llm.generate(one, params).token_ids)
        following = [*one, *answer, *prompts()[1][:8]]
        there = llm.generate(following, GREEDY)
        assert there.cached_tokens == 32, "16 of the prompt, and 16 of the answer"
        assert list(there.token_ids) == list(other.generate(following, GREEDY).token_ids)
        checked_at_rest(llm)
