"""Stages that take several turns a dispatch give the answers of single steps, whatever becomes of a request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import jdisagg
from jdisagg.core.events import StepDone
from jdisagg.core.messages import Preempted
from tests.serve.test_ring_serving import ASKED, PROMPTS, STAGES, answers, events, heard, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with running(STAGES, multi_step=1) as llm:
        return answers(llm)


def most_turns(llm: jdisagg.LLM) -> int:
    return max(len(drawn or ()) for done in events(llm, StepDone) for _, drawn in done.decode)


def test_stages_that_take_turns_answer_as_single_steps_do_and_go_on_beside_who_leaves(expected: list[list[int]]):
    """Every kind of draw; an answer that stops, and one that its client leaves in the midst of a dispatch."""
    with running(STAGES, multi_step=4) as llm:
        assert answers(llm) == expected
        assert most_turns(llm) == 4
        stop = expected[0][9]
        stopped = llm.generate(PROMPTS[0], replace(ASKED[0], stop_token_ids=(stop,)))
        assert list(stopped.token_ids) == expected[0][: expected[0].index(stop) + 1]
        asyncio.run_coroutine_threadsafe(_left(llm), llm._loop).result(60)
        assert answers(llm) == expected


async def _left(llm: jdisagg.LLM) -> None:
    stream = llm.stream(PROMPTS[1], ASKED[1])
    async for _ in stream:
        break
    await stream.aclose()


def test_sequences_that_are_sent_back_between_dispatches_of_stages_are_answered_the_same(expected: list[list[int]]):
    with running(STAGES, multi_step=4, kv_tokens=160, reserve_tokens=1) as llm:
        assert answers(llm) == expected
        assert heard(llm, Preempted)
