"""Tokens become text here: whole characters only, stop strings found and held back, how it ended in OpenAI's terms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jdisagg.core.events import Finish
from jdisagg.core.messages import NO_TOKENS, TokenDelta
from jdisagg.core.request import FinishReason, Sampled
from jdisagg.model.tokenizer import TextDecoder, Tokenizer
from jdisagg.serve.driver.service import Update
from jdisagg.serve.frontends.tools.parser import Call


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
        self._detokenizer = TextDecoder(tokenizer, options.skip_special_tokens)
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


# Tokens and their logarithmic probabilities as the two OpenAI interfaces show them.

FLOOR = -9999.0  # JSON has no infinity; this is what vLLM writes


class TokenNames:
    """How a single token is written, found once a token."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._names: dict[int, str] = {}

    def name(self, token: int) -> str:
        """The token's text; "bytes:\\\\xe4" where it is part of a character; "token_id:7" where ids were asked for."""
        if token not in self._names:
            self._names[token] = f"token_id:{token}" if self._as_ids else self._readable(token)
        return self._names[token]

    def _readable(self, token: int) -> str:
        text = self._tokenizer.token_text(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for, also where they are not whole characters."""
        vocabulary = self._tokenizer.vocabulary
        if vocabulary.is_byte_level:
            return vocabulary.bytes_of(token)
        if token in vocabulary.byte_ids:
            return bytes.fromhex(str(vocabulary.raw.id_to_token(token))[3:5])  # "<0xE4>"
        return self._tokenizer.token_text(token).encode()

    def length(self, token: int) -> int:
        """Characters that begin in the token, for offsets into a text without special tokens."""
        if token in self._tokenizer.vocabulary.special:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token))  # UTF-8: all but continuation bytes


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(FLOOR, logprob)


def completion_logprobs(
    names: TokenNames, sampled: Sequence[Sampled], offset: int, first: Sequence[int] = ()
) -> tuple[dict[str, Any], int]:
    """`logprobs` of /v1/completions, and the offset behind it. Tokens of `first` come before, with no probability."""
    shown: list[tuple[int, float | None, dict[str, float] | None]] = [(token, None, None) for token in first]
    shown += [(each.token, _finite(each.logprob), _top(names, each)) for each in sampled]
    offsets = []
    for token, _, _ in shown:
        offsets.append(offset)
        offset += names.length(token)
    fields = {
        "tokens": [names.name(token) for token, _, _ in shown],
        "token_logprobs": [logprob for _, logprob, _ in shown],
        "top_logprobs": [top for _, _, top in shown],
        "text_offset": offsets,
    }
    return fields, offset


def _top(names: TokenNames, each: Sampled) -> dict[str, float]:
    """The likeliest tokens, and the drawn one where it is not among them."""
    top = {names.name(token): max(FLOOR, logprob) for token, logprob in each.top}
    if each.logprob is not None:
        top.setdefault(names.name(each.token), max(FLOOR, each.logprob))
    return top


def chat_logprobs(names: TokenNames, sampled: Iterable[Sampled]) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""
    return {"content": [_chat_entry(names, each) for each in sampled], "refusal": None}


def _chat_entry(names: TokenNames, each: Sampled) -> dict[str, Any]:
    top = [_chat_token(names, token, logprob) for token, logprob in each.top]
    return {**_chat_token(names, each.token, each.logprob), "top_logprobs": top}


def _chat_token(names: TokenNames, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": _finite(logprob), "bytes": [*names.bytes_of(token)]}


def prompt_logprobs(names: TokenNames, prompt: Iterable[Sampled]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: nothing for the first token, then {id: {logprob, rank, decoded_token}} for each."""
    return [None, *(_ranked(names, each) for each in prompt)]


def _ranked(names: TokenNames, each: Sampled) -> dict[str, Any]:
    ranks: dict[int, tuple[int | None, float]] = {
        token: (rank, logprob) for rank, (token, logprob) in enumerate(each.top, start=1)
    }
    if each.logprob is not None and each.token not in ranks:
        ranks[each.token] = (None, each.logprob)
    return {
        str(token): {"logprob": max(FLOOR, logprob), "rank": rank, "decoded_token": names.name(token)}
        for token, (rank, logprob) in ranks.items()
    }


# Work on large inputs, away from the event loop, so that streams go on meanwhile.
#
# Reading JSON and rendering templates hold the interpreter while they work, so that they go one at a time: of
# several at once each would take its turn before the event loop's. Tokenizing lets go of it.

INLINE_CHARS = 4_000  # below this a task costs a millisecond or less, and a thread would cost more
SLICE = 64  # tokens whose names or logprobs are looked up at once: some milliseconds
LEAVES = 2048  # values written as JSON at once

T = TypeVar("T")
_reading = ThreadPoolExecutor(1, "reading")
_tokenizing = ThreadPoolExecutor(2, "tokenizing")
_compiling = ThreadPoolExecutor(1, "compiling")  # who waits for a grammar waits for other grammars alone


async def reading(size: int, work: Callable[[], T]) -> T:
    """What `work` gives; on the thread for JSON and templates where `size`, its characters, is large."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_reading, work)


async def tokenizing(size: int, work: Callable[[], T]) -> T:
    """As `reading`, for work that lets other threads run."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_tokenizing, work)


async def compiling(work: Callable[[], T]) -> T:
    """What `work` gives, which may take long however short it is, and lets other threads run."""
    return await asyncio.get_running_loop().run_in_executor(_compiling, work)


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


async def dump_slowly(value: Any) -> str:
    """`dump`, about a millisecond's worth at a time, with a look at the event loop after each."""
    if isinstance(value, dict):
        fields = [f"{dump(str(key))}:{await dump_slowly(each)}" for key, each in value.items()]
        return "{" + ",".join(fields) + "}"
    if not isinstance(value, list):
        return dump(value)
    parts, light, leaves = list[str](), [], 0
    for each in value:
        found = _leaves(each)
        if leaves + found > LEAVES:
            parts += [dump(light)[1:-1]] if light else []
            light, leaves = [], 0
            await asyncio.sleep(0)
        if found > LEAVES:
            parts.append(await dump_slowly(each))
        else:
            light.append(each)
            leaves += found
    parts += [dump(light)[1:-1]] if light else []
    return "[" + ",".join(parts) + "]"


def _leaves(value: Any) -> int:
    """Values in it; counted no further than LEAVES."""
    found, stack = 0, [value]
    while stack and found <= LEAVES:
        each = stack.pop()
        found += 1
        if isinstance(each, list | dict):
            stack.extend(each.values() if isinstance(each, dict) else each)
    return found
