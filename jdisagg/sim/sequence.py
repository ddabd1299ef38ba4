"""A prompt that only knows how long it is and, where its trace tells, what its pages are called: it has no words."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from collections.abc import Sized
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jdisagg.policy.prefix_cache import NamedTokens, PageHash

MOST_TOKENS = 1 << 32  # of one request


class Names(NamedTuple):
    """What is known of one request's tokens, be they prompt or output."""

    blocks: npt.NDArray[np.int64]  # numbers of its prompt's blocks, each with all blocks before it
    block_tokens: int
    tokens: int  # leading ones that are in those blocks; the others are nobody's but its own
    number: int  # of the request

    def of_pages(self, start: int, stop: int, page_size: int) -> tuple[PageHash, ...]:
        """Of the full pages of tokens [start, stop): the block in which a page ends, and where. Its own are odd.

        Two pages have one name exactly where they end alike in blocks that are equal up to there; this holds whether
        or not pages and blocks divide each other.
        """
        last = np.arange(start + page_size - 1, stop, page_size, dtype=np.int64)
        known, own = last[last < self.tokens], last[last >= self.tokens]
        named = self.blocks[known // self.block_tokens] * self.block_tokens + known % self.block_tokens
        return (*(2 * named).tolist(), *(2 * (own + self.number * MOST_TOKENS) + 1).tolist())


class Sequence(NamedTokens):
    """Tokens of nothing. Slicing and joining take no time: a prompt of a million is as cheap as one of one."""

    __slots__ = ("_names", "_start", "_stop")

    def __init__(self, tokens: int, names: Names | None = None, start: int = 0) -> None:
        """start: of these tokens in what `names` names."""
        assert tokens >= 0, tokens
        self._start, self._stop, self._names = start, start + tokens, names

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> Sequence:
        inside = range(self._start, self._stop)[part]
        return Sequence(len(inside), self._names, inside.start)

    def __add__(self, other: Sized) -> Sequence:
        """What a trace does not tell of, such as an answer, is like nothing that any other request has."""
        return Sequence(len(self) + len(other), self._names, self._start)

    def __repr__(self) -> str:
        return f"Sequence({len(self)})"

    def page_hashes(self, page_size: int, salt: str) -> tuple[PageHash, ...]:
        """None where nothing is known of its tokens. A trace has no salts."""
        assert not salt, salt
        return () if self._names is None else self._names.of_pages(self._start, self._stop, page_size)


class NamedPrompts:
    """Prompts of one trace, by the ids of their blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._numbers: dict[tuple[int, int], int] = {}  # of a block, by the number of that before it (-1) and its id
        self._requests = count()

    def prompt(self, tokens: int, ids: Ids[int]) -> Sequence:
        """Equal beginnings of `ids` are equal beginnings of prompts. Tokens beyond them are like no other's."""
        numbers, before, blocks = self._numbers, -1, list[int]()
        for each in ids:
            before = numbers.setdefault((before, each), len(numbers))
            blocks.append(before)
        named = min(tokens, len(blocks) * self.block_tokens)
        return Sequence(tokens, Names(np.array(blocks, np.int64), self.block_tokens, named, next(self._requests)))
