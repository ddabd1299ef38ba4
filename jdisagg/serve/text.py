"""Tokens become text here: whole characters only, stop strings found and held back, how it ended in OpenAI's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jdisagg.core.events import Finish
from jdisagg.core.messages import NO_TOKENS, TokenDelta
from jdisagg.core.request import FinishReason, Sampled
from jdisagg.model.tokenizer import Detokenizer, Tokenizer
from jdisagg.serve.service import Update
from jdisagg.serve.tools.said import Call


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How one answer's tokens are to be read."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # those of the request's SamplingParams, end tokens included
    eos_ids: frozenset[int] = frozenset()  # the model's own: stopping there has no `stop_reason`
    min_tokens: int = 0  # stop strings count only in text after this many tokens
    include_stop: bool = False  # leave the stop string or token in the text
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Piece:
    """What one update adds to an answer. The last piece has `finish_reason`, and `finish` where the driver sent it."""

    text: str = ""
    delta: TokenDelta = NO_TOKENS  # counted as output, the stop token included
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: str | int | None = None  # the stop string, or the id of a stop token the client named
    finish: Finish | None = None
    reasoning: str = ""  # where the text was read for it, as for calls
    calls: tuple[Call, ...] = ()
    by_grammar: bool = False  # it ended because its grammar allowed no token any more
    choice: int = 0  # which of several answers it is of, where they come in one stream


def _borders(stop: str) -> list[int]:
    """boundaries[i]: length of the longest proper prefix of stop[: i + 1] that also ends it (Knuth, Morris, Pratt)."""
    table, length = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table


@dataclass(slots=True)
class _Stop:
    """One stop string and how much of it the text so far ends with."""

    text: str
    boundaries: list[int]
    matched: int = 0

    def step(self, char: str) -> bool:
        """Reads one character; True when the whole string has just been read."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self.boundaries[self.matched - 1]
        self.matched += self.text[self.matched] == char
        return self.matched == len(self.text)


@dataclass(slots=True)
class StopStrings:
    """Lets text through except a tail that may yet become a stop string; a few steps a character."""

    stops: Sequence[str]
    include: bool = False
    found: str | None = None
    _held: str = ""
    _stops: list[_Stop] = field(default_factory=list)
    _heads: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        longest_first = sorted(self.stops, key=len, reverse=True)  # of two that end together the longer one counts
        self._stops = [_Stop(stop, _borders(stop)) for stop in longest_first]
        self._heads = frozenset(stop[0] for stop in self.stops)

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Once `found` is set the answer is over: feed no more."""
        if not self._held and self._heads.isdisjoint(text):
            return text
        start, text = len(self._held), self._held + text
        for i in range(start, len(text)):
            for stop in self._stops:
                if stop.step(text[i]):
                    return self._cut(text, i + 1, stop.text)
        keep = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def _cut(self, text: str, end: int, stop: str) -> str:
        self.found, self._held = stop, ""
        return text[: end if self.include else end - len(stop)]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held


FINISH_WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}  # all others are "abort": never "length"


class Transcript:
    """One answer as it grows: updates in, pieces out."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._stops = StopStrings(options.stop, options.include_stop) if options.stop else None
        self._stop_token: int | None = None
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: whatever the driver still sends is not part of the answer."""
        return self._stops is not None and self._stops.found is not None

    def take(self, update: Update) -> Piece:
        """The text, tokens and end that one update brings."""
        delta = update.delta
        if self._stops is None:
            text = self._push(delta.sampled)
        else:
            text, sampled = self._push_watching(self._stops, delta.sampled)
            delta = replace(delta, sampled=sampled)
        piece = Piece(text, delta, finish=update.finish)
        if update.finish is not None or self.stopped:
            self._end(piece, update.finish)
        return piece

    def _push(self, sampled: Sequence[Sampled]) -> str:
        ids = [each.token for each in sampled]
        if ids and ids[-1] in self._options.stop_token_ids:
            self._stop_token = ids[-1]
            if not self._options.include_stop:
                ids.pop()
        return self._detokenizer.push(ids) if ids else ""

    def _push_watching(self, stops: StopStrings, sampled: tuple[Sampled, ...]) -> tuple[str, tuple[Sampled, ...]]:
        """Token by token, so that the count of tokens ends with the one that completed the stop string."""
        shown = ""
        for i, each in enumerate(sampled):
            self._num_tokens += 1
            text = self._push((each,))
            shown += text if self._num_tokens <= self._options.min_tokens else stops.feed(text)
            if stops.found is not None:
                return shown, sampled[: i + 1]
        return shown, sampled

    def _end(self, piece: Piece, finish: Finish | None) -> None:
        if not self.stopped:
            rest = self._detokenizer.flush()
            piece.text += rest if self._stops is None else self._stops.feed(rest) + self._stops.flush()
        if self._stops is not None and self._stops.found is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._stops.found
        elif finish is not None:
            piece.finish_reason = FINISH_WORDS.get(finish.reason, "abort")
            if finish.reason is FinishReason.STOP and self._stop_token not in self._options.eos_ids:
                piece.stop_reason = self._stop_token
