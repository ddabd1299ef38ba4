"""Every field that public clients may send is read, refused by name, or let by for a reason that the docs give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic.types import message_create_params as messages
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Request, Sampled
from jdisagg.serve.driver.service import Update
from jdisagg.serve.frontends.http.embeddings import EmbeddingsBody
from jdisagg.serve.frontends.http.messages import MessagesBody
from jdisagg.serve.frontends.http.responses import ResponsesBody
from jdisagg.serve.frontends.http.schema import IGNORED, REFUSED, ChatBody, CompletionBody
from tests.serve.live_http import Front
from tests.serve.scripted import Step, end, told

KINDS: list[tuple[Any, Any]] = [
    (chat.CompletionCreateParamsBase, ChatBody),
    (completions.CompletionCreateParamsBase, CompletionBody),
    (embeddings.EmbeddingCreateParams, EmbeddingsBody),
    (responses.ResponseCreateParamsBase, ResponsesBody),
    (messages.MessageCreateParamsBase, MessagesBody),
]


@pytest.mark.parametrize(("params", "body"), KINDS, ids=[body.__name__ for _, body in KINDS])
def test_no_field_of_a_public_client_is_unheard_of(params: Any, body: Any):
    known = {*body.model_fields, *getattr(body, "refused", REFUSED), *IGNORED}
    assert set(params.__annotations__) <= known


def test_a_field_is_refused_or_let_by_and_never_both():
    assert {*REFUSED, *ResponsesBody.refused, *MessagesBody.refused}.isdisjoint(IGNORED)


def likely(request: Request) -> Iterator[Step]:
    """Three tokens, as likely as the choice's number says: 0, -3, -1, -4, -2, and again."""
    index = int(request.request_id.rpartition("-")[2])
    drawn = tuple(Sampled(70 + index, -float((index * 3) % 5)) for _ in range(3))
    yield Update(TokenDelta(Attempt(request.request_id, 1), 0, drawn))
    yield end(request, FinishReason.STOP)


def test_the_likeliest_of_best_of_are_told_best_first(front: Front):
    front.service.script = likely
    answer = front.client.completions.create(model="tiny", prompt=["x", "y"], n=2, best_of=5, max_tokens=3)
    text = front.service.tokenizer.decode
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [text([70 + each] * 3) for each in (0, 2, 5, 7)]
    assert answer.choices[0].logprobs is None and answer.usage is not None and answer.usage.completion_tokens == 30


def test_best_of_fewer_than_n_or_in_a_stream_is_refused(front: Front):
    with pytest.raises(openai.BadRequestError, match="best_of is 1, must be at least n, which is 2"):
        front.client.completions.create(model="tiny", prompt="x", n=2, best_of=1)
    with pytest.raises(openai.BadRequestError, match="not known in a stream"):
        front.client.completions.create(model="tiny", prompt="x", best_of=2, stream=True)


def test_the_clients_own_stream_gathers_what_came(front: Front):
    ids = front.service.tokenizer.encode("Hello there", False)
    front.service.script = lambda request: iter([told(request, *ids), end(request, FinishReason.STOP)])
    user: Any = [{"role": "user", "content": "x"}]
    with front.client.chat.completions.stream(model="tiny", messages=user) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "Hello there"
