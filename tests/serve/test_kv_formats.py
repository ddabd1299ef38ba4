"""Runs whose prefill and decode workers hold KV differently, or quantise it for the way, as a user starts them."""

from contextlib import contextmanager
from typing import Any

import pytest

import jdisagg
from jdisagg.core.events import KVArrived, WiresTimed
from jdisagg.core.worker_config import RAW
from jdisagg.kv.shipping import ErrorMonitor
from tests.fixtures import conformance

FAMILY = conformance.load("llama3")
GREEDY = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(0,), ignore_eos=True)
SIZES: dict[str, Any] = {
    "mesh": "prefill:tp1,decode:tp1",
    "max_model_len": 64,  # the longest prompt, and what it is asked for
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
}
pytestmark = pytest.mark.slow


@contextmanager
def running(**settings: Any):
    with jdisagg.LLM(model=str(FAMILY.folder), **{**SIZES, **settings}) as llm:
        yield llm


def answers(llm) -> list[list[int]]:
    return [list(answer.token_ids) for answer in llm.generate_all(FAMILY.prompts, GREEDY)]


def events(llm, kind: type) -> list:
    return [entry.event for entry in llm.service.journal.entries if isinstance(entry.event, kind)]


def error_monitor_of(llm) -> ErrorMonitor:
    (machine,) = [each for name, each in llm.service.driver.executors.by_worker.items() if name.startswith("prefill")]
    return machine.error_monitor


def agreement(got: list[list[int]]) -> float:
    pairs = [pair for rows in zip(got, FAMILY.greedy, strict=True) for pair in zip(*rows, strict=False)]
    return sum(one == other for one, other in pairs) / len(pairs)


def test_pages_of_different_sizes_give_the_same_answers_and_compile_nothing():
    sizes = {"prefill_page_size": 16, "page_size": 32, "max_num_batched_tokens": 32}
    with running(mesh="prefill:tp2,decode:pp2", transfer="chunk", **sizes) as llm:
        assert answers(llm) == FAMILY.greedy
        assert llm.service.recompiles() == 0


def test_larger_pages_in_bf16_may_go_to_smaller_ones_in_f32():
    sizes = {"prefill_page_size": 32, "page_size": 8, "max_num_batched_tokens": 32}
    with running(prefill_kv_dtype="bfloat16", kv_dtype="float32", transfer="layer", **sizes) as llm:
        assert agreement(answers(llm)) > 0.8
        assert llm.service.recompiles() == 0


def test_quantised_kv_is_taken_and_changes_little():
    with running(transfer_compress="int8") as llm:
        got = answers(llm)
        arrived = events(llm, KVArrived)
        assert arrived and all(event.intact and event.transfer.wire == "int8" for event in arrived)
        assert not error_monitor_of(llm).over and llm.service.recompiles() == 0
    assert agreement(got) > 0.8


def test_a_layer_that_would_lose_more_than_the_bound_comes_raw_and_nothing_is_lost():
    with running(transfer_compress="int4", transfer_error_bound=1e-6) as llm:
        assert answers(llm) == FAMILY.greedy
        refused = [event.transfer for event in events(llm, KVArrived) if not event.intact]
        assert refused and all(part.wire == "int4" and part.resends == 0 for part in refused)
        assert len(refused) < len(FAMILY.prompts), "once it is known, layers go raw at the first try"
        assert set().union(*error_monitor_of(llm).over) == set(range(llm.service.model_config.num_layers))
        assert llm.service.recompiles() == 0


def test_auto_is_told_what_packing_costs_and_ships_what_pays():
    with running(transfer_compress="auto") as llm:
        answers(llm)
        (timed,) = events(llm, WiresTimed)
        costs = {cost.wire: cost for cost in timed.costs}
        assert set(costs) == {RAW, "int8"} and costs["int8"].page_bytes < costs[RAW].page_bytes
        assert all(event.intact and event.transfer.wire in costs for event in events(llm, KVArrived))
        assert llm.service.recompiles() == 0


def test_quantised_pages_answer_the_same_on_one_mesh_and_on_two():
    with running(kv_dtype="int8") as llm:
        apart = answers(llm)
        assert llm.service.recompiles() == 0
    with running(kv_dtype="int8", mesh="colocated:tp1") as llm:
        assert answers(llm) == apart
    assert agreement(apart) > 0.8


def test_pages_in_f32_become_quantised_ones_of_another_size_and_stages_on_the_way():
    sizes = {"prefill_page_size": 16, "page_size": 32, "max_num_batched_tokens": 32}
    kinds = {"prefill_kv_dtype": "float32", "kv_dtype": "fp8"}
    with running(mesh="prefill:tp1,decode:pp2", transfer="layer", **sizes, **kinds) as llm:
        assert agreement(answers(llm)) > 0.8
        assert llm.service.recompiles() == 0
