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

from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Request, RequestId, Sampled
from jdisagg.serve.generation import merged, pieces
from jdisagg.serve.http.chat import chat_ids
from jdisagg.serve.http.schema import ChatFields, valid
from jdisagg.serve.sampling import choice_seed
from jdisagg.serve.sampling_params import SamplingParams
from jdisagg.serve.service import Rejected, Service
from jdisagg.serve.text import Piece, TextOptions

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[Mapping[str, Any]]
AT_ONCE = 64  # prompts of one call that are asked for together
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


def order_of(service: Service, prompt: Prompt, sampling: SamplingParams) -> Order:
    """Raises RequestError for what cannot be. It waits for its turn as long as that takes: --queue_timeout_s is for
    clients who may have left."""
    tokenizer = service.tokenizer
    tokens = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    drawn = sampling.resolved(service.sampling_defaults, tokenizer.eos_ids)
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
    return Order(requests, sampling.options(drawn, tokenizer.eos_ids))


async def chat_prompt(service: Service, messages: Messages, sampling: SamplingParams) -> tuple[Prompt, SamplingParams]:
    """Messages as token ids by the model's template, as over HTTP; an answer may fill what room the model has left."""
    body = valid(ChatFields, {"messages": [dict(each) for each in messages]})
    ids = await chat_ids(body, service.tokenizer, service.max_model_len, False)
    left = max(1, service.max_model_len - len(ids))
    return ids, replace(sampling, max_tokens=left) if sampling.max_tokens is None else sampling


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


async def stream(service: Service, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[Piece]:
    """Pieces of the answers as they come, each with its `choice`; closing the generator cancels the rest."""
    order = order_of(service, prompt, sampling)
    answers = [partial(_retrying, service, request, order.options) for request in order.requests]
    async with aclosing(merged(answers, AT_ONCE)) as batches:
        async for batch in batches:
            for choice, piece in batch:
                piece.choice = choice
                yield piece


@dataclass(slots=True)
class _Answer:
    """One choice as it grows."""

    texts: list[str] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    prompt: tuple[Sampled, ...] = ()
    last: Piece | None = None

    def take(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.sampled.extend(piece.delta.sampled)
        self.prompt = self.prompt or piece.delta.prompt
        self.last = piece

    def choice(self, index: int, sampling: SamplingParams) -> Choice:
        assert self.last is not None and self.last.finish_reason is not None
        return Choice(
            index,
            "".join(self.texts),
            tuple(each.token for each in self.sampled),
            self.last.finish_reason,
            self.last.stop_reason,
            None if sampling.logprobs is None else tuple(self.sampled),
            self.last.finish.ledger if self.last.finish else None,
        )


async def complete(service: Service, prompt: Prompt, sampling: SamplingParams) -> Completion:
    """All answers to one prompt, whole."""
    answers = [_Answer() for _ in range(sampling.n)]
    async with aclosing(stream(service, prompt, sampling)) as found:
        async for piece in found:
            answers[piece.choice].take(piece)
    choices = tuple(answer.choice(index, sampling) for index, answer in enumerate(answers))
    length = len(service.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    return Completion(choices, length, None if sampling.prompt_logprobs is None else answers[0].prompt)


async def chat(service: Service, messages: Messages, sampling: SamplingParams) -> Completion:
    """The answer to a conversation."""
    return await complete(service, *await chat_prompt(service, messages, sampling))


async def complete_all(
    service: Service, prompts: Sequence[Prompt], sampling: SamplingParams, at_once: int = AT_ONCE
) -> list[Completion]:
    """One completion a prompt, in the prompts' order, `at_once` at a time."""
    room = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> Completion:
        async with room:
            return await complete(service, prompt, sampling)

    return await asyncio.gather(*map(one, prompts))
