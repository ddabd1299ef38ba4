"""Rows of every kind beside rows that are guessed for: tokens are those of a step of one, whatever guesses.

What a row may ask for (a grammar, penalties, log-probabilities, texts that end it, no guesses at all) is asked for at
once, with too few pages for all, so that rows are taken back and come again, some of them elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jdisagg import LLM, SamplingParams
from jdisagg.core.request import WorkerId

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=3)
ASKED = {
    "greedy": ("def area(", GREEDY),
    "drawn": ("import os\nimport ", DRAWN),
    "drawn alike": ("import os\nimport ", replace(DRAWN, seed=4)),
    "penalties": ("for x in range(", replace(DRAWN, frequency_penalty=0.7, repetition_penalty=1.2)),
    "log-probabilities": ("class A:\n", replace(GREEDY, logprobs=3)),
    "a text that ends it": ("def b(self", replace(GREEDY, stop=("self",), max_tokens=60)),
    "a grammar": ("x = ", replace(GREEDY, ignore_eos=False, structured_outputs={"regex": "(red|green){9}[0-9]{5}"})),
    "no guesses": ("def c(x, ", replace(DRAWN, speculative=False)),
}
SIZES: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "prefill_buckets": "64",
    "table_buckets": "96",
}
FEW: dict[str, Any] = {"kv_tokens": 128, "reserve_tokens": 4}  # of a worker, whose four whole answers want 200


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float | None]


async def _answer(llm: LLM, prompt: str, how: SamplingParams) -> Answer:
    sampled = [each async for piece in llm.stream(prompt, how) for each in piece.delta.sampled]
    return Answer([each.token for each in sampled], [each.logprob for each in sampled])


def together(llm: LLM) -> dict[str, Answer]:
    async def ask() -> list[Answer]:
        return await asyncio.gather(*(_answer(llm, *each) for each in ASKED.values()))

    return dict(zip(ASKED, asyncio.run(ask()), strict=True))


def alone(llm: LLM) -> dict[str, Answer]:
    """By steps of one token."""
    return {
        name: asyncio.run(_answer(llm, prompt, replace(how, speculative=False)))
        for name, (prompt, how) in ASKED.items()
    }


def counted(llm: LLM, name: str) -> float:
    assert llm.service.metrics is not None
    lines = [line.split(" ") for line in llm.service.metrics.render().decode().splitlines()]
    return sum(float(line[1]) for line in lines if line[0].split("{")[0] == f"jdisagg_{name}_total")


@pytest.fixture(params=["eagle:2", pytest.param("auto:draft:2", marks=pytest.mark.hostile)])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(mesh="prefill:tp1,decode:2xtp1", speculative=request.param, **SIZES, **FEW) as made:
        yield made
        assert made.service.recompiles() == 0


def test_rows_of_every_kind_are_answered_as_by_steps_of_one_where_pages_are_few_and_a_worker_is_lost(llm: LLM):
    expected = alone(llm)
    for _ in range(2):
        found = together(llm)
        assert {name: each.tokens for name, each in found.items()} == {
            name: each.tokens for name, each in expected.items()
        }
        for name, each in found.items():
            assert each.logprobs == pytest.approx(expected[name].logprobs, abs=1e-3), name
    assert counted(llm, "spec_decode_draft_tokens") > 0 and counted(llm, "preemptions") > 0
    llm.service.driver.give_up(WorkerId("decode-0"))
    assert {name: each.tokens for name, each in together(llm).items()} == {
        name: each.tokens for name, each in expected.items()
    }
