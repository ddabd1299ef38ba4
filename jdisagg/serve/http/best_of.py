"""`best_of`: more answers are drawn than are told, and the likeliest of each prompt are."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.serve.http.jobs import Job
from jdisagg.serve.http.rendering import Renderer
from jdisagg.serve.logprobs import TokenNames
from jdisagg.serve.text import Piece


class BestOfRenderer(Renderer):
    """Of whole answers; `job.kept` of every `job.drawn` that follow each other are shown, by their tokens' logprobs."""

    def __init__(self, job: Job, names: TokenNames, fingerprint: str) -> None:
        super().__init__(job, names, fingerprint)
        self._sums = [0.0] * len(job.choices)

    async def gather(self, index: int, piece: Piece) -> None:
        self._sums[index] += sum(each.logprob or 0.0 for each in piece.delta.sampled)
        await super().gather(index, piece)

    def shown(self) -> Sequence[int]:
        """Of those that are as likely, the first."""
        drawn, found = self.job.drawn, list[int]()
        for first in range(0, len(self._sums), drawn):
            likeliest = sorted(range(first, first + drawn), key=lambda index: -self._sums[index])
            found += likeliest[: self.job.kept]
        return found
