"""`import jdisagg`: the Python way in, as the README shows it."""

import asyncio
import subprocess
import sys
import time

import pytest

import jdisagg
from tests.fixtures import conformance

FAMILY = conformance.load("llama3")


@pytest.fixture(scope="module")
def llm():
    with jdisagg.LLM(
        model=str(FAMILY.folder),
        mesh="prefill:tp2,decode:pp2",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    ) as running:
        yield running


def greedy(max_tokens):
    return jdisagg.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(0,))


def test_importing_the_package_imports_neither_jax_nor_a_server():
    code = "import sys, jdisagg; sys.exit(bool({'jax', 'flax', 'fastapi', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_greedy_answers_are_those_of_transformers(llm):
    answers = llm.generate_all(FAMILY.prompts, greedy(24))
    assert [list(answer.token_ids) for answer in answers] == FAMILY.greedy


def test_an_answer_knows_where_its_time_went(llm):
    answer = llm.generate("def f():", greedy(5))
    assert answer.finish_reason in ("length", "stop") and len(answer.token_ids) <= 5
    assert answer.ledger is not None
    assert sum(answer.ledger.parts_ns().values()) == answer.ledger.total_ns > 0


def test_a_stream_closed_early_frees_everything_it_held(llm):
    async def first_piece():
        async for piece in llm.stream(FAMILY.prompts[0], greedy(80)):
            return piece
        return None

    assert asyncio.run(first_piece()) is not None
    pools = [actor.pool for name, actor in llm.service.driver.actors.items() if name != "router"]
    for _ in range(200):
        if all(pool.free_pages == pool.num_pages for pool in pools):
            break
        time.sleep(0.05)
    assert all(pool.free_pages == pool.num_pages for pool in pools)
    assert llm.service.running == 0


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(llm):
    with pytest.raises(Exception, match=r"prompt of 120 tokens \+ max_tokens 24 = 144, over the limit of 128"):
        llm.generate([1] * 120, greedy(24))


def test_nothing_is_compiled_after_the_stack_is_ready(llm):
    llm.generate_all([[1, 2, 3], [5] * 70, "for x in"], jdisagg.SamplingParams(max_tokens=20, seed=3, top_p=0.9))
    assert llm.service.recompiles() == 0
