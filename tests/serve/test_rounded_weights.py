"""A pair that serves matrices in bf16 or int8: compiled once, the same answers in company, alone and on one mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import pytest

import jdisagg
from jdisagg.core.events import KVArrived
from tests.fixtures import conformance

FAMILY = conformance.load("llama3")
GREEDY = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(0,), ignore_eos=True)
SIZES: dict[str, Any] = {
    "max_model_len": 64,  # the longest prompt, and what it is asked for
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "prefix_caching": "off",  # so that nothing of a prompt is computed in one company and read in another
}
STORED = {"bfloat16": jnp.bfloat16, "int8": jnp.int8}
pytestmark = pytest.mark.slow


@contextmanager
def running(mesh: str, weight_dtype: str, **settings: Any) -> Iterator[jdisagg.LLM]:
    with jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, weight_dtype=weight_dtype, **{**SIZES, **settings}) as llm:
        yield llm


def together(llm: jdisagg.LLM) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in llm.generate_all(FAMILY.prompts, GREEDY)]


def alone(llm: jdisagg.LLM) -> list[tuple[int, ...]]:
    return [tuple(llm.generate(prompt, GREEDY).token_ids) for prompt in FAMILY.prompts]


def numbers(llm: jdisagg.LLM) -> set[Any]:
    """What the first matrices of all workers' layers hold."""
    groups = [group for machine in llm.service.driver.executors.by_worker.values() for group in machine.layer_groups]
    stages = [group.params.merge(group.params.leaves) for group in groups]
    return {stage.layers[0].mlp.gate_up.kernel[...].dtype for stage in stages}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_pair_with_rounded_weights_answers_the_same_in_company_alone_and_on_one_mesh(dtype: str):
    with running("prefill:tp2,decode:pp2", dtype) as llm:
        found = together(llm)
        assert alone(llm) == found
        assert llm.service.recompiles() == 0
        assert numbers(llm) == {jnp.dtype(STORED[dtype])}
    with running("colocated:tp1", dtype) as llm:
        assert together(llm) == found


def test_pages_stay_as_they_were_beside_int8_weights_and_may_be_quantised_for_the_way():
    with running("prefill:tp2,decode:pp2", "int8", transfer_compress="int8") as llm:
        assert llm.deployment.kv.dtype == llm.deployment.prefill_kv.dtype == "float32"
        answers = together(llm)
        arrived = [entry.event for entry in llm.service.journal.entries if isinstance(entry.event, KVArrived)]
        assert arrived and all(event.intact and event.transfer.wire == "int8" for event in arrived)
        assert llm.service.recompiles() == 0
    pairs = [pair for rows in zip(answers, FAMILY.greedy, strict=True) for pair in zip(*rows, strict=True)]
    assert sum(one == other for one, other in pairs) / len(pairs) > 0.7
