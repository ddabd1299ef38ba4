"""Vectors, or how near they are, as bodies of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdisagg.core.events import Finish
from jdisagg.serve.http.embeddings.vectors import vector
from jdisagg.serve.http.jobs import Job
from jdisagg.serve.text import Piece

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
