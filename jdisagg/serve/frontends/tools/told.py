"""Answers as they come, read: each piece gets what its text says, thinks and calls."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace

from jdisagg.serve.driver.local_service import Batch
from jdisagg.serve.frontends.text import Piece
from jdisagg.serve.frontends.tools.parser import Reader

TOOL_CALLS = "tool_calls"


class Told:
    """One answer under way."""

    def __init__(self, reader: Reader, special: re.Pattern[str] | None, *, stop_word: str) -> None:
        """special: texts of special tokens that are not to be shown. stop_word: how an answer with calls ends."""
        self._reader, self._special, self._stop_word = reader, special, stop_word
        self._called = False

    def take(self, piece: Piece) -> Piece:
        said = [self._reader.feed(piece.text)]
        if piece.finish_reason is not None:
            said.append(self._reader.end(piece.finish_reason == "stop"))
        content, reasoning = (
            self._plain(parts) for parts in zip(*((s.content, s.reasoning) for s in said), strict=True)
        )
        calls = tuple(call for each in said for call in each.calls)
        self._called = self._called or bool(calls)
        reason = self._stop_word if self._called and piece.finish_reason == "stop" else piece.finish_reason
        return replace(piece, text=content, reasoning=reasoning, calls=calls, finish_reason=reason)

    def _plain(self, parts: Iterable[str]) -> str:
        text = "".join(parts)
        return text if self._special is None else self._special.sub("", text)


async def told(batches: AsyncGenerator[Batch], begin: Callable[[], Told]) -> AsyncGenerator[Batch]:
    """The batches, each answer of them read by one of its own."""
    answers: dict[int, Told] = {}
    async with aclosing(batches):
        async for batch in batches:
            yield [(index, answers.setdefault(index, begin()).take(piece)) for index, piece in batch]
