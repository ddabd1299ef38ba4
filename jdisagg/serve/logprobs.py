"""Tokens and their logarithmic probabilities as the two OpenAI interfaces show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jdisagg.core.request import Sampled
from jdisagg.model.tokenizer import Tokenizer

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
