"""Texts made ready to be pooled: a request each, that is over when its prompt is computed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from jdisagg.core.errors import RequestError
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.serve.front_settings import FrontSettings
from jdisagg.serve.http.embeddings.body import PoolingFields
from jdisagg.serve.http.jobs import Choice, Job, Prompt, check_model, encode, last_tokens
from jdisagg.serve.service import Service
from jdisagg.serve.text import TextOptions


async def pooling_job(
    body: PoolingFields,
    given: Sequence[str] | Sequence[list[int]],
    service: Service,
    settings: FrontSettings,
    name: str,
    prefix: str,
) -> Job:
    """Raises RequestError, before the first is submitted, for any that cannot be."""
    check_model(body.model, service, settings)
    if settings.embeddings == "off":
        raise RequestError("this server makes no embeddings; start it with --embeddings=last or mean", param="model")
    if not 1 <= len(given) <= settings.max_choices:
        raise RequestError(f"there are {len(given)} inputs, must be 1 to {settings.max_choices}", param="input")
    texts = [each for each in given if isinstance(each, str)]
    found = await encode(service, texts, body.add_special_tokens is not False) if texts else []
    ids = found or [tuple(each) for each in given if not isinstance(each, str)]
    prompts = [last_tokens(each, body.truncate_prompt_tokens, service) for each in ids]
    choices = tuple(_choice(body, prompt, service, settings, f"{prefix}{name}", i) for i, prompt in enumerate(prompts))
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


def _choice(
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
