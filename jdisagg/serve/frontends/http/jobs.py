"""Makes the body of a request ready to run: its prompts as tokens, a `Request` per choice, the fields to return."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError, RequestError
from jdisagg.core.request import PARAMETERS, POOLED_ONE, Request, RequestId, SamplingParams
from jdisagg.model.grammars.grammars import open_grammars
from jdisagg.serve.driver.local_service import check_work
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends import text as offload
from jdisagg.serve.frontends.adapters import ModelNotFound
from jdisagg.serve.frontends.best_of import answers_drawn
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.chat import chat_ids
from jdisagg.serve.frontends.http.schema import ChatBody, CompletionBody, FormFields, GenerationFields, PoolingFields
from jdisagg.serve.frontends.sampling import choice_seed, resolved, text_options, token_biases
from jdisagg.serve.frontends.structured import Form, form_of, grammar_of
from jdisagg.serve.frontends.text import TextOptions
from jdisagg.serve.frontends.tools.asked import NONE, OFF, Tools, form_of_choice, reads_of, tools_of
from jdisagg.serve.frontends.tools.told import Told

PROMPT_END = 16  # tokens in which a prompt may begin the answer's reasoning


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    text: str = ""  # as the client sees it, for `echo`


@dataclass(frozen=True, slots=True)
class Choice:
    request: Request
    prompt: Prompt
    first_of_prompt: bool  # usage counts a prompt once, however many choices it has


@dataclass(frozen=True, slots=True)
class Job:
    """All choices of one HTTP request; choice i is `choices[i]`."""

    chat: bool
    public_id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    options: TextOptions
    stream: bool
    include_usage: bool
    usage_everywhere: bool
    echo: bool
    prompt_only: bool  # max_tokens was 0: the one token that had to be drawn is dropped
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    ledger: bool
    reads: Callable[[], Told] | None = None  # begins to read an answer for reasoning and calls
    shows_reasoning: bool = True
    drawn: int = 0  # answers of each prompt, of which the `kept` likeliest are told; 0: all
    kept: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(each.prompt.ids) for each in self.choices if each.first_of_prompt)


def check_model(name: str | None, service: Service, settings: FrontSettings) -> None:
    """Raises ModelNotFound unless `name` is empty or one this server answers to."""
    if name and name not in (service.model_name, *settings.served_names, *settings.adapters.found):
        raise ModelNotFound(f"the model {name[:200]!r} does not exist; this server has {service.model_name!r}", "model")


async def encode(service: Service, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
    """Token ids of each; off the event loop where it would take long. Raises TooLong before what can never fit."""
    tokenizer = service.tokenizer
    tokenizer.check_size(texts, service.max_model_len)
    found = await offload.tokenizing(sum(map(len, texts)), lambda: tokenizer.encode_all(texts, add_special_tokens))
    return [tuple(ids) for ids in found]


async def decode(service: Service, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of `ids`; off the event loop where it would take long."""
    return await offload.tokenizing(len(ids), lambda: service.tokenizer.decode(ids, skip_special_tokens))


async def completion_job(body: CompletionBody, service: Service, settings: FrontSettings, name: str) -> Job:
    """Returns the job of a body of completions; `name` is the client's request id, or a fresh one."""
    check_model(body.model, service, settings)
    asked = sampling_of(body, service, settings)
    drawn = answers_drawn(asked.n, asked.best_of, stream=bool(body.stream))
    given = listed(body.prompt)
    _check_shape(body, asked, len(given) * drawn, len(given), settings)
    prompts = await _prompts(given, body, asked.skip_special_tokens, service)
    prompt_only = bool(body.echo) and asked.max_tokens == 0
    sampling = replace(
        asked,
        max_tokens=1 if prompt_only else asked.max_tokens,
        n=drawn,
        logprobs=0 if asked.logprobs is None and drawn > asked.n else asked.logprobs,
        prompt_logprobs=asked.logprobs if body.echo and asked.prompt_logprobs is None else asked.prompt_logprobs,
    )
    grammar = await grammar_for(form_of(_forms(body)), service, settings)
    job = _job(body, f"cmpl-{name}", prompts, sampling, grammar, service, settings)
    job = replace(job, prompt_only=prompt_only, prompt_logprobs=asked.prompt_logprobs is not None)
    return replace(job, logprobs=asked.logprobs is not None, drawn=drawn, kept=asked.n) if drawn > asked.n else job


async def chat_job(
    body: ChatBody, service: Service, settings: FrontSettings, name: str, prefix: str = "chatcmpl-"
) -> Job:
    """Returns the job of a body of chat; without a limit the answer may fill the model's length."""
    check_model(body.model, service, settings)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(f"top_logprobs is {body.top_logprobs} while logprobs is not true", param="top_logprobs")
    if body.echo:
        raise RequestError("echo is not supported in chat", param="echo")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, service, settings, logprobs=logprobs)
    _check_shape(body, sampling, sampling.n, 1, settings)
    tools = _tools_of(body, service, settings)
    if tools is not None and tools.choice == NONE:
        body = body.model_copy(update={"tools": None})
    found = await chat_ids(body, service.tokenizer, service.max_model_len, bool(body.add_special_tokens))
    ids = last_tokens(found, body.truncate_prompt_tokens, service)
    if body.max_completion_tokens is not None:
        sampling = replace(sampling, max_tokens=body.max_completion_tokens)
    elif "max_tokens" not in sampling.given():
        sampling = replace(sampling, max_tokens=max(1, service.max_model_len - len(ids)))
    grammar = await grammar_for(_chat_form(body, tools), service, settings)
    job = _job(body, prefix + name, [Prompt(ids)], sampling, grammar, service, settings)
    end = service.tokenizer.decode(ids[-PROMPT_END:], skip_special_tokens=False)
    reads = reads_of(settings.parsers, tools, end, service.tokenizer.special_text, sampling.skip_special_tokens)
    if reads is None:
        return job
    options = replace(job.options, skip_special_tokens=False)
    return replace(job, options=options, reads=reads, shows_reasoning=body.include_reasoning)


def sampling_of(body: GenerationFields, service: Service, settings: FrontSettings, **fields: Any) -> SamplingParams:
    """Returns the sampling parameters of a body, by the table of `core/request.py`; `fields` go before the body's."""
    given = {name: getattr(body, name) for name in PARAMETERS if name in body.model_fields_set}
    given = {name: value for name, value in (given | fields).items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = token_biases(given["logit_bias"], service.tokenizer)
    return SamplingParams(**given, adapter=settings.adapters.find(body.model))


def _tools_of(body: ChatBody, service: Service, settings: FrontSettings) -> Tools | None:
    """What may be called. Raises RequestError for tools that the model would never see, or never be heard to call."""
    tools = tools_of({name: getattr(body, name) for name in ("tools", "tool_choice", "parallel_tool_calls")})
    if tools is None or tools.choice == NONE or tools.forced:
        return tools
    if not service.tokenizer.takes_tools:
        raise RequestError(
            "the model's chat template shows no tools; tool_choice may name one, or be required", "tools"
        )
    if settings.parsers.tools == OFF:
        raise RequestError("no --tool_call_parser is known for this model; tool_choice may name one", param="tools")
    return tools


def _chat_form(body: ChatBody, tools: Tools | None) -> Form | None:
    form, forced = form_of(_forms(body)), None if tools is None else form_of_choice(tools)
    if form is not None and forced is not None:
        raise RequestError(f"{form.field} and tool_choice are given, an answer has one form", param="tool_choice")
    return form or forced


def _forms(body: GenerationFields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.model_fields_set & FormFields.model_fields.keys()}


async def grammar_for(form: Form | None, service: Service, settings: FrontSettings) -> str:
    """Returns the grammar that the answer follows; "" if it is free. Raises RequestError."""
    if form is None:
        return ""
    if settings.no_grammars:
        raise RequestError(f"{form.field} cannot be had: {settings.no_grammars}", param=form.field)
    place, vocab_size = service.tokenizer.place, service.model_config.vocab_size
    try:
        return await offload.compiling(lambda: grammar_of(form, open_grammars(place, vocab_size)))
    except ConfigError as error:
        raise RequestError(f"{form.field} cannot be had: {error}", param=form.field) from error


def traced(job: Job, traceparent: str) -> Job:
    """The job, its requests in the trace of whoever asked."""
    choices = tuple(replace(each, request=replace(each.request, traceparent=traceparent)) for each in job.choices)
    return replace(job, choices=choices)


async def _prompts(
    given: Sequence[str] | Sequence[list[int]], body: CompletionBody, skips_special: bool, service: Service
) -> list[Prompt]:
    texts = [each for each in given if isinstance(each, str)]
    if texts:
        found = await encode(service, texts, body.add_special_tokens is not False)
        prompts = [Prompt(*each) for each in zip(found, texts, strict=True)]
        return [await _shortened(each, body, skips_special, service) for each in prompts]
    listed = [each for each in given if not isinstance(each, str)]
    shown = [await decode(service, ids, skips_special) if body.echo else "" for ids in listed]
    return [
        await _shortened(Prompt(tuple(ids), text), body, skips_special, service)
        for ids, text in zip(listed, shown, strict=True)
    ]


def last_tokens(ids: tuple[int, ...], most: int | None, service: Service) -> tuple[int, ...]:
    """As many of the prompt's last tokens as the client wants kept."""
    if most is None:
        return ids
    if most == 0:
        raise RequestError("truncate_prompt_tokens is 0, must be -1 or at least 1", param="truncate_prompt_tokens")
    return ids[-(service.max_model_len - 1 if most < 0 else most) :]


async def _shortened(prompt: Prompt, body: CompletionBody, skips_special: bool, service: Service) -> Prompt:
    ids = last_tokens(prompt.ids, body.truncate_prompt_tokens, service)
    if len(ids) == len(prompt.ids):
        return prompt
    return Prompt(ids, await decode(service, ids, skips_special) if body.echo else "")


def listed(prompt: Any) -> list[str] | list[list[int]]:
    """Every spelling of `prompt`: a text, texts, token ids, lists of token ids."""
    alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if alone else list(prompt)


def _job(
    body: GenerationFields,
    public_id: str,
    prompts: Sequence[Prompt],
    asked: SamplingParams,
    grammar: str,
    service: Service,
    settings: FrontSettings,
) -> Job:
    eos_ids = service.tokenizer.eos_ids if settings.eos_ids is None else settings.eos_ids
    sampling = resolved(asked, settings.sampling_defaults, eos_ids, grammar)
    options = text_options(asked, sampling, eos_ids, settings.max_stops, settings.max_stop_chars)
    choices = _choices(public_id, prompts, asked.n, sampling, body, service, settings)
    runs_on = not (sampling.stop_token_ids or options.stop)
    check_work(service, [each.request for each in choices], settings.queue_timeout_s, runs_on)
    stream_options = body.stream_options
    return Job(
        chat=isinstance(body, ChatBody),
        public_id=public_id,
        created=int(time.time()),
        model=body.model or service.model_name,
        choices=choices,
        options=options,
        stream=bool(body.stream),
        include_usage=stream_options is not None and stream_options.include_usage,
        usage_everywhere=stream_options is not None and stream_options.continuous_usage_stats,
        echo=bool(body.echo),
        prompt_only=False,
        logprobs=asked.logprobs is not None,
        prompt_logprobs=asked.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ledger=body.ledger,
    )


def _check_shape(
    body: GenerationFields, sampling: SamplingParams, wanted: int, num_prompts: int, settings: FrontSettings
) -> None:
    if wanted == 0:
        raise RequestError("the prompt is empty: it is a list of 0 prompts, at least 1 is needed", param="prompt")
    if wanted > settings.max_choices:
        raise RequestError(
            f"{num_prompts} prompts times n = {wanted} choices, at most {settings.max_choices} are allowed", param="n"
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given while stream is not true", param="stream_options")
    if sampling.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs is not supported with stream", param="prompt_logprobs")


def _choices(
    public_id: str,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    body: GenerationFields,
    service: Service,
    settings: FrontSettings,
) -> tuple[Choice, ...]:
    """Every request, checked before the first is submitted. Ids are unique even where clients repeat theirs."""
    now_s, unique = service.now_s(), uuid.uuid4().hex[:8]
    deadline_s = None if settings.queue_timeout_s is None else now_s + settings.queue_timeout_s
    choices = []
    for index in range(len(prompts) * n):
        prompt, nth = prompts[index // n], index % n
        drawn = replace(sampling, seed=choice_seed(sampling.seed, nth))
        request_id = RequestId(f"{public_id}-{unique}-{index}")
        request = Request(
            *(request_id, prompt.ids, drawn, now_s, body.priority, deadline_s, body.cache_salt),
            ttft_s=body.ttft_s,
            tpot_s=body.tpot_s,
        )
        if nth == 0:
            request.check(service.model_config.vocab_size, service.max_model_len)
        choices.append(Choice(request, prompt, nth == 0))
    return tuple(choices)


async def pooling_job(
    body: PoolingFields,
    given: Sequence[str] | Sequence[list[int]],
    service: Service,
    settings: FrontSettings,
    name: str,
    prefix: str,
) -> Job:
    """Returns the job of texts to be pooled: a request each, which ends with its prompt. Raises RequestError."""
    check_model(body.model, service, settings)
    if settings.embeddings == "off":
        raise RequestError("this server makes no embeddings; start it with --embeddings=last or mean", param="model")
    if not 1 <= len(given) <= settings.max_choices:
        raise RequestError(f"there are {len(given)} inputs, must be 1 to {settings.max_choices}", param="input")
    texts = [each for each in given if isinstance(each, str)]
    found = await encode(service, texts, body.add_special_tokens is not False) if texts else []
    ids = found or [tuple(each) for each in given if not isinstance(each, str)]
    prompts = [last_tokens(each, body.truncate_prompt_tokens, service) for each in ids]
    choices = tuple(
        _pooled_choice(body, prompt, service, settings, f"{prefix}{name}", i) for i, prompt in enumerate(prompts)
    )
    return Job(
        chat=False,
        public_id=f"{prefix}{name}",
        created=int(time.time()),
        model=body.model or service.model_name,
        choices=choices,
        options=TextOptions(),
        stream=False,
        include_usage=False,
        usage_everywhere=False,
        echo=False,
        prompt_only=True,
        logprobs=False,
        prompt_logprobs=False,
        token_ids=False,
        tokens_as_ids=False,
        ledger=False,
    )


def _pooled_choice(
    body: PoolingFields, ids: tuple[int, ...], service: Service, settings: FrontSettings, public_id: str, index: int
) -> Choice:
    now_s = service.now_s()
    pooling, adapter = body.pooling or settings.embeddings, settings.adapters.find(body.model)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, adapter=adapter)
    deadline_s = None if settings.queue_timeout_s is None else now_s + settings.queue_timeout_s
    request_id = RequestId(f"{public_id}-{uuid.uuid4().hex[:8]}-{index}")
    request = Request(request_id, ids, sampling, now_s, body.priority, deadline_s, body.cache_salt)
    request.check(service.model_config.vocab_size, service.max_model_len)
    return Choice(request, Prompt(ids), True)


def vector(pooled: tuple[int, ...], choice: Choice, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """Returns the last token's state or the mean of all as f32, cut to `dimensions` and normalised to length 1."""
    count = len(choice.prompt.ids) if choice.request.sampling.pooling == "mean" else 1
    found = np.array(pooled, np.float64)[:dimensions] / (POOLED_ONE * count)
    length = np.linalg.norm(found)
    return (found / length if normalize and length > 0 else found).astype(np.float32)
