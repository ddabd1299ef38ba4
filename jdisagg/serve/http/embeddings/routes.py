"""The routes of embeddings and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response

from jdisagg.core.errors import RequestError
from jdisagg.serve.http.embeddings.body import EmbeddingsBody, ScoreBody
from jdisagg.serve.http.embeddings.jobs import pooling_job
from jdisagg.serve.http.embeddings.rendering import VectorRenderer
from jdisagg.serve.http.embeddings.vectors import written
from jdisagg.serve.http.errors import documented
from jdisagg.serve.http.front import Front, request_name
from jdisagg.serve.http.jobs import listed
from jdisagg.serve.http.schema import takes

ANSWERS = documented(400, 401, 404, 408, 413, 429, 503)


def add_embeddings(app: FastAPI, front: Front) -> None:
    service, settings = front.service, front.settings

    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingsBody), responses=ANSWERS)
    async def embeddings(request: Request) -> Response:
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
    async def score(request: Request) -> Response:
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
