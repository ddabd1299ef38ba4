"""What `POST /v1/embeddings` and `POST /v1/score` take."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field

from jdisagg.core.errors import RequestError
from jdisagg.core.events import Finish
from jdisagg.core.request import MAX_PRIORITY, POOLED_ONE, Request, RequestId, SamplingParams
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.errors import documented
from jdisagg.serve.frontends.http.front import Front, request_name
from jdisagg.serve.frontends.http.jobs import Choice, Job, Prompt, check_model, encode, last_tokens, listed
from jdisagg.serve.frontends.http.schema import INT32, Count, Texts, TokenIds, takes
from jdisagg.serve.frontends.text import Piece, TextOptions


class PoolingFields(BaseModel):
    """What both share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    pooling: Literal["last", "mean"] | None = None  # null: as --embeddings says
    truncate_prompt_tokens: Count | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    request_id: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    user: str | None = None


class EmbeddingsBody(PoolingFields, BaseModel):
    """`POST /v1/embeddings`."""

    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    normalize: bool = True


class ScoreBody(PoolingFields, BaseModel):
    """`POST /v1/score`: one text against each of the others, or pairs of two lists."""

    text_1: str | Texts
    text_2: str | Texts


# Texts made ready to be pooled: a request each, that is over when its prompt is computed.


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


# Pooled states as vectors, and vectors as answers.


def vector(pooled: tuple[int, ...], choice: Choice, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """f32: the last token's state or the mean of all, its first `dimensions` numbers, of length 1 where `normalize`."""
    count = len(choice.prompt.ids) if choice.request.sampling.pooling == "mean" else 1
    found = np.array(pooled, np.float64)[:dimensions] / (POOLED_ONE * count)
    length = np.linalg.norm(found)
    return (found / length if normalize and length > 0 else found).astype(np.float32)


def written(found: np.ndarray, encoding: str | None) -> Any:
    """As OpenAI's clients read it: numbers, or the bytes of little-endian floats."""
    return base64.b64encode(found.astype("<f4").tobytes()).decode() if encoding == "base64" else found.tolist()


# Vectors, or how near they are, as bodies of answers.

Shown = Callable[[Sequence[np.ndarray]], list[dict[str, Any]]]


class VectorRenderer:
    """Implements `Rendering`."""

    def __init__(self, job: Job, shown: Shown, dimensions: int | None = None, *, normalize: bool = True) -> None:
        self.job, self.finish = job, None
        self._shown, self._dimensions, self._normalize = shown, dimensions, normalize
        self._pooled: list[tuple[int, ...]] = [()] * len(job.choices)
        self.finish: Finish | None

    async def gather(self, index: int, piece: Piece) -> None:
        self._pooled[index] = self._pooled[index] or piece.delta.pooled
        if index == 0:
            self.finish = piece.finish or self.finish

    def whole(self) -> dict[str, Any]:
        pairs = zip(self._pooled, self.job.choices, strict=True)
        found = [vector(pooled, choice, self._dimensions, normalize=self._normalize) for pooled, choice in pairs]
        tokens = self.job.prompt_tokens
        return {
            "id": self.job.public_id,
            "object": "list",
            "created": self.job.created,
            "model": self.job.model,
            "data": self._shown(found),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }


# The routes of embeddings and scores.

ANSWERS = documented(400, 401, 404, 408, 413, 429, 503)


def add_embeddings(app: FastAPI, front: Front) -> None:
    service, settings = front.service, front.settings

    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingsBody), responses=ANSWERS)
    async def embeddings(request: HttpRequest) -> Response:
        """The states of texts after the last layer: the last token's, or the mean of all. By --embeddings."""
        body, hidden = await front.body(request, EmbeddingsBody), service.model_config.hidden_size
        if body.dimensions is not None and body.dimensions > hidden:
            said = f"dimensions is {body.dimensions}, the model's states have {hidden}"
            raise RequestError(said, param="dimensions")
        job = await pooling_job(
            body, listed(body.input), service, settings, request_name(request, body.request_id), "embd-"
        )

        def shown(found: Sequence[np.ndarray]) -> list[dict[str, Any]]:
            texts = [written(each, body.encoding_format) for each in found]
            return [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(texts)]

        renderer = VectorRenderer(job, shown, body.dimensions, normalize=body.normalize)
        return front.respond(job, request, lambda *_: renderer)

    @app.post("/v1/score", openapi_extra=takes(ScoreBody), responses=ANSWERS)
    @app.post("/score", include_in_schema=False)
    async def score(request: HttpRequest) -> Response:
        """How near texts are, by the cosine between their embeddings. By --embeddings."""
        body = await front.body(request, ScoreBody)
        first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: must be 1, or as many", "text_1"
            )
        texts = [*first, *second]
        name = request_name(request, body.request_id)
        job = await pooling_job(body, texts, service, settings, name, "score-")

        def shown(found: Sequence[np.ndarray]) -> list[dict[str, Any]]:
            left, right = found[: len(first)], found[len(first) :]
            near = [float(left[i % len(left)] @ right[i]) for i in range(len(right))]
            return [{"object": "score", "index": i, "score": each} for i, each in enumerate(near)]

        return front.respond(job, request, lambda *_: VectorRenderer(job, shown))
