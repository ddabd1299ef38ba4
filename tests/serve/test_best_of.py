"""Of more answers than are told the likeliest are, in Python as over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import RequestError
from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Request, Sampled, SamplingParams
from jdisagg.serve.driver.service import Update
from jdisagg.serve.frontends import offline
from jdisagg.serve.frontends.best_of import answers_drawn, likeliest
from tests.serve.scripted import ScriptedService, end


def scored(request: Request) -> Iterator[Update]:
    """Three tokens of a choice, which is the likelier the nearer it is to the third."""
    index = int(request.request_id.rsplit("-", 1)[1])
    drawn = tuple(Sampled(70 + index, -float(abs(index - 2))) for _ in range(3))
    yield Update(TokenDelta(Attempt(request.request_id, 1), 0, drawn))
    yield end(request, FinishReason.STOP)


@given(st.lists(st.lists(st.floats(-9, 0), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(1, 4))
def test_those_that_are_told_are_no_less_likely_than_those_that_are_not(prompts: list[list[float]], kept: int):
    found = likeliest([each for prompt in prompts for each in prompt], 4, kept)
    for number, prompt in enumerate(prompts):
        told = [index - 4 * number for index in found[number * kept : (number + 1) * kept]]
        assert [prompt[index] for index in told] == sorted(prompt, reverse=True)[:kept] and len(set(told)) == kept


def test_the_likeliest_are_told_best_first_and_are_numbered_anew():
    service = ScriptedService(script=scored)
    asked = SamplingParams(max_tokens=3, n=2, best_of=5)
    completion = asyncio.run(offline.complete(service, [1, 2], asked))
    assert [(choice.index, choice.token_ids) for choice in completion.choices] == [(0, (72,) * 3), (1, (71,) * 3)]
    assert completion.logprobs is None and len(service.seen) == 5
    assert {request.sampling.logprobs for request in service.seen} == {0}, "asked of the model alone"


def test_as_many_as_are_told_are_drawn_as_without():
    service = ScriptedService(script=scored)
    completion = asyncio.run(offline.complete(service, [1, 2], SamplingParams(n=2, best_of=2)))
    assert [choice.token_ids[0] for choice in completion.choices] == [70, 71]
    assert {request.sampling.logprobs for request in service.seen} == {None}


def test_fewer_than_are_told_or_more_in_a_stream_or_a_chat_are_refused_with_both_numbers():
    service = ScriptedService(script=scored)
    with pytest.raises(RequestError, match="best_of is 1, must be at least n, which is 2"):
        asyncio.run(offline.complete(service, [1, 2], SamplingParams(n=2, best_of=1)))

    async def streamed() -> None:
        async for _ in offline.stream(service, [1, 2], SamplingParams(best_of=2)):
            pass

    with pytest.raises(RequestError, match="best_of is 2 of n 1: which are best is not known in a stream"):
        asyncio.run(streamed())
    with pytest.raises(RequestError, match="best_of is 2 in a chat, which draws n: 1"):
        asyncio.run(offline.chat(service, [{"role": "user", "content": "x"}], SamplingParams(best_of=2)))
    with pytest.raises(RequestError, match=r"best_of is 129, must lie in \[1, 128\]"):
        SamplingParams(best_of=129)
    assert answers_drawn(3, None, stream=True) == 3
