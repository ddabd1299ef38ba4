"""Answers of a request with `best_of`, rendered: the likeliest of those that were drawn."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.serve.best_of import likeliest, likelihood
from jdisagg.serve.http.jobs import Job
from jdisagg.serve.http.rendering import Renderer
from jdisagg.serve.logprobs import TokenNames
from jdisagg.serve.text import Piece


class BestOfRenderer(Renderer):
    """Of whole answers; `job.kept` of every `job.drawn` that follow each other are shown."""

    def __init__(self, job: Job, names: TokenNames, fingerprint: str) -> None:
        super().__init__(job, names, fingerprint)
        self._sums = [0.0] * len(job.choices)

    async def gather(self, index: int, piece: Piece) -> None:
        self._sums[index] += likelihood(piece.delta.sampled)
        await super().gather(index, piece)

    def shown(self) -> Sequence[int]:
        return likeliest(self._sums, self.job.drawn, self.job.kept)
