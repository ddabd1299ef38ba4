"""The bodies, renderer and routes of `POST /v1/embeddings` and `POST /v1/score`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field

from jdisagg.core.errors import RequestError
from jdisagg.core.events import Finish
from jdisagg.serve.frontends.http.errors import documented
from jdisagg.serve.frontends.http.front import Front
from jdisagg.serve.frontends.http.jobs import Job, listed, pooling_job, vector
from jdisagg.serve.frontends.http.rendering import RendererOf
from jdisagg.serve.frontends.http.schema import INT32, PoolingFields, Texts, TokenIds, takes
from jdisagg.serve.frontends.text import Piece


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


# Vectors as answers.


def written(found: np.ndarray, encoding: str | None) -> Any:
    """Returns a vector as OpenAI's clients read it: numbers, or the bytes of little-endian floats."""
    return base64.b64encode(found.astype("<f4").tobytes()).decode() if encoding == "base64" else found.tolist()


# Vectors, or how near they are, as bodies of answers.

Shown = Callable[[Sequence[np.ndarray]], list[dict[str, Any]]]


class VectorRenderer:
    """A renderer of a job's pooled states as vectors or scores."""

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


async def prepare_embeddings(front: Front, body: EmbeddingsBody, name: str) -> tuple[Job, RendererOf]:
    """Returns the job of a body of embeddings. Raises RequestError."""
    hidden = front.service.model_config.hidden_size
    if body.dimensions is not None and body.dimensions > hidden:
        said = f"dimensions is {body.dimensions}, the model's states have {hidden}"
        raise RequestError(said, param="dimensions")
    job = await pooling_job(body, listed(body.input), front.service, front.settings, name, "embd-")

    def shown(found: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        texts = [written(each, body.encoding_format) for each in found]
        return [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(texts)]

    renderer = VectorRenderer(job, shown, body.dimensions, normalize=body.normalize)
    return job, lambda *_: renderer


async def prepare_scores(front: Front, body: ScoreBody, name: str) -> tuple[Job, RendererOf]:
    """Returns the job of a body of scores. Raises RequestError."""
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise RequestError(f"text_1 has {len(first)} texts and text_2 {len(second)}: must be 1, or as many", "text_1")
    job = await pooling_job(body, [*first, *second], front.service, front.settings, name, "score-")

    def shown(found: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        left, right = found[: len(first)], found[len(first) :]
        near = [float(left[i % len(left)] @ right[i]) for i in range(len(right))]
        return [{"object": "score", "index": i, "score": each} for i, each in enumerate(near)]

    return job, lambda *_: VectorRenderer(job, shown)


def add_embeddings(app: FastAPI, front: Front) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingsBody), responses=ANSWERS)
    async def embeddings(request: HttpRequest) -> Response:
        """The states of texts after the last layer: the last token's, or the mean of all. By --embeddings."""
        return await front.answer(request, EmbeddingsBody, prepare_embeddings)

    @app.post("/v1/score", openapi_extra=takes(ScoreBody), responses=ANSWERS)
    @app.post("/score", include_in_schema=False)
    async def score(request: HttpRequest) -> Response:
        """How near texts are, by the cosine between their embeddings. By --embeddings."""
        return await front.answer(request, ScoreBody, prepare_scores)
