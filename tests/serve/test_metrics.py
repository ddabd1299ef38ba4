"""Metrics are a fold over what the driver observes, and every one that is exported is fed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import ROUTER, EngineFailed, Received, Reject, Send, Submit
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Ended, Preempted, Progress, Resend
from jdisagg.core.request import Adapter, Attempt, FinishReason, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.tiers import PageMove, PagesMoved, Tier
from jdisagg.core.worker_config import Role
from jdisagg.serve.driver.local_service import pieces
from jdisagg.serve.frontends.text import TextOptions
from jdisagg.serve.observability import health
from jdisagg.serve.observability.metrics import NAMES, Metrics
from tests.serve.live_toy import PAGE_BYTES, PAGE_SIZE, ToyStack, toy_stack, worker_config
from tests.serve.scripted import end

A1 = Attempt(RequestId("a"), 1)

DECODE = WorkerId("decode-0")
PROMPT = tuple(range(20, 40))


def request(name: str, max_tokens: int = 12) -> Request:
    return Request(RequestId(name), PROMPT, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def read(metrics: Metrics) -> dict[tuple[str, str], float]:
    """{(sample name, labels without the model's name): value}."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[sample.name, labels] = sample.value
    return found


async def run(stack: ToyStack, asked: list[Request], stop: tuple[str, ...] = ()) -> None:
    async def one(each: Request) -> None:
        options = TextOptions(stop=stop)
        async with aclosing(pieces(stack.service, each, options)) as answer:
            async for piece in answer:
                assert piece.finish_reason in (None, "stop", "length")

    watch = asyncio.create_task(health.watch(stack.metrics.lagged))
    await asyncio.gather(*(one(each) for each in asked))
    await asyncio.sleep(2 * health.PERIOD_S)
    watch.cancel()


@pytest.fixture(scope="module")
def ran() -> Iterator[ToyStack]:
    """A short real run, and the things that go wrong too seldom to wait for."""
    sizes = {"dram_pages": 64, "draft_tokens": 2, "max_loras": 2, "max_lora_rank": 4}
    decoder = replace(worker_config("decode-0", Role.DECODE, 256), **sizes)
    with toy_stack(configs=(worker_config("prefill-0", Role.PREFILL, 256), decoder)) as stack:
        now_s = stack.service.now_s()
        timed = [
            Request(each.request_id, each.prompt, each.sampling, now_s) for each in map(request, ("a", "b", "c", "d"))
        ]
        asyncio.run(run(stack, timed))
        observe = stack.metrics.observe
        observe("router", Submit(request("full")), now_s)
        observe("router", Reject(RequestId("full"), 1.0, "full"), now_s)
        observe("decode-0", Send(WorkerId("router"), Preempted(A1, (), "no pages")), now_s)
        observe("decode-0", Send(WorkerId("prefill-0"), Resend(A1, 0)), now_s)
        observe("decode-0", EngineFailed(1, "fault"), now_s)
        move = PageMove(A1, Tier.HBM, Tier.DRAM, bytes(3 * 16))
        observe("decode-0", PagesMoved(move, (True, False, True), 0.25, 2000), now_s)
        observe("decode-0", PagesMoved(move, (False,) * 3, failed="it does not answer"), now_s)
        stack.metrics.journal_dropped()
        stack.metrics.limited("requests_per_minute")
        observe(
            "decode-0",
            Send(ROUTER, Ended(A1, FinishReason.ERROR, now_s, 0, "no numbers")),
            now_s,
        )
        yield stack


def test_every_exported_metric_is_fed_by_a_run(ran: ToyStack) -> None:
    families = list(text_string_to_metric_families(ran.metrics.render().decode()))
    unfed = [family.name for family in families if not family.samples]
    assert unfed == []
    counted = [f for f in families if f.type in ("counter", "histogram") and not f.name.startswith("vllm:num_pre")]
    silent = [f.name for f in counted if not any(s.value > 0 for s in f.samples if not s.name.endswith("_created"))]
    assert silent == []
    assert len([f for f in families if f.name.startswith("jdisagg_")]) >= 24


def test_counts_are_those_of_the_run(ran: ToyStack) -> None:
    found = read(ran.metrics)
    assert found["jdisagg_requests_total", "reason=length"] == 4
    assert found["jdisagg_prompt_tokens_total", ""] == 4 * len(PROMPT)
    assert found["jdisagg_generation_tokens_total", ""] == 48
    assert found["jdisagg_prefix_cache_queries_total", "worker=prefill-0"] == 4 * len(PROMPT)
    reused = found["jdisagg_prefix_cache_hits_total", "worker=prefill-0"]
    assert reused > 0 and found["jdisagg_prefill_tokens_total", "worker=prefill-0"] == 4 * len(PROMPT) - reused
    assert found["jdisagg_time_to_first_token_seconds_count", ""] == 4
    assert found["jdisagg_inter_token_latency_seconds_count", ""] == 44
    assert found["jdisagg_rejects_total", ""] == 1
    assert found["jdisagg_requests_running", ""] == found["jdisagg_requests_waiting", ""] == 0
    rows = found["jdisagg_decode_batch_sequences_sum", "worker=decode-0"]
    guessed = found["jdisagg_spec_decode_accepted_tokens_total", "kind=ngram,worker=decode-0"]
    assert rows + guessed >= 44 and found["jdisagg_decode_runs_total", "worker=decode-0"] >= 11 - guessed
    assert found["jdisagg_nan_logits_total", "worker=decode-0"] == 1  # a sequence that ended by length is none


def test_guessed_tokens_are_counted_and_those_of_them_that_were_drawn(ran: ToyStack) -> None:
    found = read(ran.metrics)
    drafts, tokens, accepted, steps = (
        found[f"jdisagg_{name}_total", f"{kind}worker=decode-0"]
        for name, kind in (
            *(("spec_decode_drafts", "kind=ngram,"), ("spec_decode_draft_tokens", "kind=ngram,")),
            *(("spec_decode_accepted_tokens", "kind=ngram,"), ("decode_runs", "")),
        )
    )
    assert 0 < accepted < tokens <= 2 * drafts and steps <= 44
    assert accepted + drafts <= 44, "every draft's row draws a token of its own as well"
    assert ("jdisagg_spec_decode_drafts_total", "kind=ngram,worker=prefill-0") not in found


def test_moves_between_tiers_are_counted_by_their_ends(ran: ToyStack) -> None:
    found, ends = read(ran.metrics), "destination=dram,source=hbm,worker=decode-0"
    counted = {name: found[f"jdisagg_tier_{name}_total", ends] for name in ("pages_moved", "pages_missed", "failures")}
    assert counted == {"pages_moved": 2, "pages_missed": 1, "failures": 1}
    assert (found["jdisagg_tier_bytes_total", ends], found["jdisagg_tier_move_seconds_sum", ends]) == (2000, 0.25)
    uses = ("free", "in_flight", "live", "cached")
    assert sum(found["jdisagg_tier_pages", f"tier=dram,use={use},worker=decode-0"] for use in uses) == 64


def test_shipped_bytes_are_pages_times_their_size(ran: ToyStack) -> None:
    found = read(ran.metrics)
    pages = -(-len(PROMPT) // PAGE_SIZE)
    assert found["jdisagg_shipped_bytes_total", "destination=decode-0,source=prefill-0"] == 4 * pages * PAGE_BYTES
    assert found["jdisagg_ship_seconds_count", "destination=decode-0,source=prefill-0"] == 4


def test_the_parts_are_those_of_the_ledger() -> None:
    metrics, asked = Metrics("m"), request("a")
    ended = end(asked, FinishReason.LENGTH)
    assert ended.finish is not None
    metrics.observe("router", Submit(asked), 0.0)
    metrics.observe("router", ended.finish, 0.006)
    found = read(metrics)
    parts = {labels: value for (name, labels), value in found.items() if name == "jdisagg_request_part_seconds_sum"}
    assert len(parts) == 6
    assert parts["part=prefill"] == pytest.approx(0.002)
    assert sum(parts.values()) == pytest.approx(found["jdisagg_request_seconds_sum", ""]) == 0.006


def test_all_pages_are_free_again_after_the_run(ran: ToyStack) -> None:
    found = read(ran.metrics)
    for worker in ("prefill-0", "decode-0"):
        assert found["jdisagg_kv_pages", f"state=free,worker={worker}"] == 256
        assert found["jdisagg_kv_pages", f"state=used,worker={worker}"] == 0


def test_other_servers_names_show_the_same_numbers(ran: ToyStack) -> None:
    found = read(ran.metrics)
    assert found["vllm:generation_tokens_total", ""] == 48
    assert found["vllm:request_success_total", "finished_reason=length"] == 4
    assert found["vllm:time_to_first_token_seconds_count", ""] == 4
    assert found["vllm:kv_cache_usage_perc", "engine=decode-0"] == 0
    assert found["jetstream_request_output_length_sum", ""] == 48
    ours = {name.removeprefix("jdisagg_") for name in _families(ran.metrics, "jdisagg_")}
    for names in NAMES.values():
        assert names.keys() <= ours


def _families(metrics: Metrics, prefix: str) -> set[str]:
    found = text_string_to_metric_families(metrics.render().decode())
    return {family.name for family in found if family.name.startswith(prefix)}


def test_waiting_steps_to_running_when_a_prefill_holds_the_request() -> None:
    with toy_stack() as stack:
        folds: list[tuple[float, float]] = []

        def watch(actor: str, item: Any, now_s: float) -> None:
            stack.metrics.observe(actor, item, now_s)
            found = read(stack.metrics)
            folds.append((found["jdisagg_requests_waiting", ""], found["jdisagg_requests_running", ""]))

        stack.service.driver._observers = [watch]
        asyncio.run(run(stack, [request("a", 3)]))
    assert folds[0] == (1, 0)
    assert (0, 1) in folds
    assert folds[-1] == (0, 0)


def test_an_unknown_set_of_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="sglang"):
        Metrics("m", compat=["sglang"])


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    one, two = Metrics("one"), Metrics("two")
    one.observe("router", Submit(request("a")), 0.0)
    assert read(one)["jdisagg_requests_waiting", ""] == 1
    assert read(two)["jdisagg_requests_waiting", ""] == 0


def test_adapters_that_run_and_wait_are_told_as_vllm_tells_them():
    config = replace(worker_config("colocated-0", Role.COLOCATED, 64), max_loras=3, max_lora_rank=8)
    metrics = Metrics("toy", [config], compat=("vllm",))
    for name, adapter in (("1", "sql"), ("2", "tales"), ("3", "sql"), ("4", None)):
        asked = SamplingParams(adapter=None if adapter is None else Adapter(adapter, "0" * 32, "/"))
        metrics.observe("router", Submit(Request(RequestId(name), (1, 2), asked)), 0.0)
    started = Progress(Attempt(RequestId("3"), 1), Mark.PREFILL_STARTED, 0.0)
    metrics.observe("router", Received(config.worker, started), 0.0)
    told = metrics.render().decode()
    labels = 'max_lora="3",model_name="toy",running_lora_adapters="sql",waiting_lora_adapters="sql,tales"'
    assert f"jdisagg_lora_requests_info{{{labels}}}" in told and f"vllm:lora_requests_info{{{labels}}}" in told
    assert "lora_requests_info{" not in Metrics("toy").render().decode()
