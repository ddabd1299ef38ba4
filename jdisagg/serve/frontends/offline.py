"""Completions without a server: prompts or messages in, whole answers or pieces of them out."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Request, RequestId, Sampled, SamplingParams
from jdisagg.serve.driver.local_service import Batch, merged, pieces
from jdisagg.serve.driver.service import Rejected, Service
from jdisagg.serve.frontends.best_of import answers_drawn, likeliest, likelihood
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.chat import chat_ids
from jdisagg.serve.frontends.http.jobs import chat_job, grammar_for, pooling_job, vector
from jdisagg.serve.frontends.http.schema import ChatBody, ChatFields, PoolingFields, valid
from jdisagg.serve.frontends.sampling import choice_seed, resolved, text_options
from jdisagg.serve.frontends.structured import form_of
from jdisagg.serve.frontends.text import Piece, TextOptions
from jdisagg.serve.frontends.tools.parser import Call
from jdisagg.serve.frontends.tools.told import told

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[Mapping[str, Any]]
AT_ONCE = 64  # prompts of one call that are asked for together
PLAIN, NO_OPTIONS = FrontSettings(), dict[str, Any]()
CHAT_OPTIONS = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message"}
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `finish_reason` is "stop", "length" or "abort"; `stop_reason` a stop string or token you named."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[Sampled, ...] | None  # of each token, where they were asked for
    ledger: Ledger | None
    reasoning: str = ""  # in chat, where the model marks it
    calls: tuple[Call, ...] = ()  # of tools, in chat


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one prompt; `text` and its kin are the first one's."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    prompt_logprobs: tuple[Sampled, ...] | None = None  # of each prompt token but the first, where asked for

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[Sampled, ...] | None:
        return self.choices[0].logprobs

    @property
    def ledger(self) -> Ledger | None:
        return self.choices[0].ledger

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those whose KV was there already."""
        return 0 if self.ledger is None else self.ledger.cached_tokens


@dataclass(frozen=True, slots=True)
class Order:
    """One prompt made ready: a request a choice, and how their tokens are read."""

    requests: tuple[Request, ...]
    options: TextOptions


def order_of(service: Service, prompt: Prompt, sampling: SamplingParams, grammar: str = "") -> Order:
    """Raises RequestError for what cannot be. It waits for its turn as long as that takes: --queue_timeout_s is for
    clients who may have left."""
    tokenizer = service.tokenizer
    tokens = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    drawn = resolved(sampling, service.sampling_defaults, tokenizer.eos_ids, grammar)
    name, now_s = f"local-{next(_numbers)}", service.now_s()
    requests = tuple(
        Request(
            RequestId(f"{name}-{choice}"),
            tokens,
            replace(drawn, seed=choice_seed(drawn.seed, choice)),
            arrival_s=now_s,
            queue_deadline_s=math.inf,
        )
        for choice in range(sampling.n)
    )
    requests[0].check(service.model_config.vocab_size, service.max_model_len)
    return Order(requests, text_options(sampling, drawn, tokenizer.eos_ids))


async def chat_prompt(service: Service, messages: Messages, sampling: SamplingParams) -> tuple[Prompt, SamplingParams]:
    """Messages as token ids by the model's template, as over HTTP; an answer may fill what room the model has left."""
    body = valid(ChatFields, {"messages": [dict(each) for each in messages]})
    ids = await chat_ids(body, service.tokenizer, service.max_model_len, False)
    left = max(1, service.max_model_len - len(ids))
    return ids, sampling if "max_tokens" in sampling.given() else replace(sampling, max_tokens=left)


async def _retrying(service: Service, request: Request, options: TextOptions) -> AsyncGenerator[Piece]:
    """Pieces of one answer; waits and tries again while the queue is full."""
    while True:
        try:
            async with aclosing(pieces(service, request, options)) as answer:
                async for piece in answer:
                    yield piece
            return
        except Rejected as full:
            await asyncio.sleep(full.retry_after_s)


async def stream(
    service: Service, prompt: Prompt, sampling: SamplingParams, settings: FrontSettings = PLAIN
) -> AsyncGenerator[Piece]:
    """Pieces of the answers as they come, each with its `choice`; closing the generator cancels the rest."""
    answers_drawn(sampling.n, sampling.best_of, stream=True)
    form = form_of({"structured_outputs": sampling.structured_outputs})
    order = order_of(service, prompt, sampling, await grammar_for(form, service, settings))
    async with aclosing(_batches(service, order)) as batches:
        async for batch in batches:
            for choice, piece in batch:
                piece.choice = choice
                yield piece


def _batches(service: Service, order: Order) -> AsyncGenerator[Batch]:
    return merged([partial(_retrying, service, request, order.options) for request in order.requests], AT_ONCE)


@dataclass(slots=True)
class _Answer:
    """One choice as it grows."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    prompt: tuple[Sampled, ...] = ()
    last: Piece | None = None

    def take(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.thoughts.append(piece.reasoning)
        self.calls += piece.calls
        self.sampled.extend(piece.delta.sampled)
        self.prompt = self.prompt or piece.delta.prompt
        self.last = piece

    def choice(self, index: int, logprobs: bool) -> Choice:
        assert self.last is not None and self.last.finish_reason is not None
        return Choice(
            index,
            "".join(self.texts),
            tuple(each.token for each in self.sampled),
            self.last.finish_reason,
            self.last.stop_reason,
            tuple(self.sampled) if logprobs else None,
            self.last.finish.ledger if self.last.finish else None,
            "".join(self.thoughts),
            tuple(self.calls),
        )


async def complete(
    service: Service, prompt: Prompt, sampling: SamplingParams, settings: FrontSettings = PLAIN
) -> Completion:
    """All answers to one prompt, whole; of `best_of`, the likeliest."""
    number = answers_drawn(sampling.n, sampling.best_of, stream=False)
    scored = sampling.logprobs if number == sampling.n else sampling.logprobs or 0
    drawn = replace(sampling, n=number, best_of=None, logprobs=scored)
    answers = [_Answer() for _ in range(number)]
    async with aclosing(stream(service, prompt, drawn, settings)) as found:
        async for piece in found:
            answers[piece.choice].take(piece)
    if number > sampling.n:
        answers = [answers[i] for i in likeliest([likelihood(each.sampled) for each in answers], number, sampling.n)]
    length = len(service.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    return _completion(answers, length, sampling)


def _completion(answers: Sequence[_Answer], prompt_tokens: int, sampling: SamplingParams) -> Completion:
    choices = tuple(answer.choice(index, sampling.logprobs is not None) for index, answer in enumerate(answers))
    return Completion(choices, prompt_tokens, None if sampling.prompt_logprobs is None else answers[0].prompt)


async def chat(
    service: Service,
    messages: Messages,
    sampling: SamplingParams,
    settings: FrontSettings = PLAIN,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Completion:
    """The answer to a conversation, made as HTTP's: by the model's template, read for reasoning and calls."""
    unknown = sorted(options.keys() - CHAT_OPTIONS)
    if unknown:
        raise RequestError(f"chat takes no {unknown[0]!r}, it takes {', '.join(sorted(CHAT_OPTIONS))}", unknown[0])
    if sampling.best_of not in (None, sampling.n):
        raise RequestError(f"best_of is {sampling.best_of} in a chat, which draws n: {sampling.n}", param="best_of")
    fields = {"messages": [dict(each) for each in messages], **_body_of(sampling), **options}
    job = await chat_job(valid(ChatBody, fields), service, settings, str(next(_numbers)), "local-")
    requests = tuple(_adapted(each.request, sampling) for each in job.choices)
    batches, answers = _batches(service, Order(requests, job.options)), [_Answer() for _ in requests]
    async with aclosing(batches if job.reads is None else told(batches, job.reads)) as found:
        async for batch in found:
            for choice, piece in batch:
                answers[choice].take(piece)
    return _completion(answers, job.prompt_tokens, sampling)


def _body_of(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the parameters that the caller gave as the fields of a chat over HTTP."""
    given = {name: value for name, value in sampling.given().items() if name in ChatBody.model_fields}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in dict(given["logit_bias"]).items()}
    if sampling.logprobs is not None:
        given |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _adapted(request: Request, sampling: SamplingParams) -> Request:
    """The request with its caller's adapter; it waits for its turn as long as that takes."""
    drawn = replace(request.sampling, adapter=sampling.adapter or request.sampling.adapter)
    return replace(request, sampling=drawn, queue_deadline_s=math.inf)


async def embed(
    service: Service, prompts: Sequence[Prompt], settings: FrontSettings, pooling: str | None = None
) -> list[list[float]]:
    """A vector of length one for each prompt, as /v1/embeddings gives."""
    body = valid(PoolingFields, {"pooling": pooling})
    encoded = [[*(service.tokenizer.encode(each) if isinstance(each, str) else each)] for each in prompts]
    job = await pooling_job(body, encoded, service, settings, str(next(_numbers)), "local-")
    requests = tuple(replace(each.request, queue_deadline_s=math.inf) for each in job.choices)
    found: dict[int, tuple[int, ...]] = {}
    async with aclosing(_batches(service, Order(requests, job.options))) as batches:
        async for batch in batches:
            found |= {index: piece.delta.pooled for index, piece in batch if piece.delta.pooled}
    return [vector(found[i], choice, None, normalize=True).tolist() for i, choice in enumerate(job.choices)]


async def complete_all(
    service: Service, prompts: Sequence[Prompt], sampling: SamplingParams, settings: FrontSettings = PLAIN
) -> list[Completion]:
    """One completion a prompt, in the prompts' order, AT_ONCE at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> Completion:
        async with room:
            return await complete(service, prompt, sampling, settings)

    return await asyncio.gather(*map(one, prompts))
