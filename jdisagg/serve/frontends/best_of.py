"""`best_of`: more answers are drawn than are told, and the likeliest of each prompt are, by their tokens' logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jdisagg.core.errors import RequestError
from jdisagg.core.request import Sampled


def answers_drawn(kept: int, best_of: int | None, *, stream: bool) -> int:
    """Of each prompt. Raises RequestError."""
    drawn = best_of or kept
    if drawn < kept:
        raise RequestError(f"best_of is {drawn}, must be at least n, which is {kept}", param="best_of")
    if drawn > kept and stream:
        said = f"best_of is {drawn} of n {kept}: which are best is not known in a stream"
        raise RequestError(said, param="best_of")
    return drawn


def likelihood(sampled: Iterable[Sampled]) -> float:
    """The logarithm of that of these tokens."""
    return sum(each.logprob or 0.0 for each in sampled)


def likeliest(likelihoods: Sequence[float], drawn: int, kept: int) -> list[int]:
    """Of every `drawn` answers that follow each other the `kept` likeliest, best first; of those that are as likely,
    the first."""
    found = list[int]()
    for first in range(0, len(likelihoods), drawn):
        found += sorted(range(first, first + drawn), key=lambda index: -likelihoods[index])[:kept]
    return found
