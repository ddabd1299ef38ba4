"""A prompt that only knows how long it is: simulated requests have lengths and no words."""

from __future__ import annotations

from collections.abc import Sized


class Sequence:
    """`len` tokens of nothing. Slicing and joining take no time: a prompt of a million is as cheap as one of one."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: int) -> None:
        assert tokens >= 0, tokens
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, part: slice) -> Sequence:
        return Sequence(len(range(*part.indices(self._tokens))))

    def __add__(self, other: Sized) -> Sequence:
        return Sequence(self._tokens + len(other))

    def __repr__(self) -> str:
        return f"Sequence({self._tokens})"
