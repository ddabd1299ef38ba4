"""Tokens back to text, piece by piece: what is shown is never taken back, and never holds half a character.

Two kinds of vocabulary need two ways. Byte-level BPE (Llama 3, Qwen) maps every token to bytes, so a UTF-8 decoder
that remembers an open character is exact. Sentencepiece-like decoders (Llama 2, Mistral) look at neighbours: a run of
byte tokens is one character string or none, so it waits until the run ends; the rest is decoded next to its
predecessor, which carries the spacing. Either way the pieces joined are the decoding of the whole.
"""

import codecs
import json
import re
from typing import Protocol

import tokenizers

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Pieces(Protocol):
    """One text under way."""

    def push(self, ids: list[int]) -> str:
        """The text that these tokens make certain."""
        ...

    def flush(self) -> str:
        """What was held back; nothing is pushed afterwards."""
        ...


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary (GPT-2's table), reversed."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + place): byte for place, byte in enumerate(moved)}


class Vocabulary:
    """What decoding needs to know of a tokenizer, found once and shared by all texts."""

    def __init__(self, raw: tokenizers.Tokenizer):
        self.raw = raw
        self.special = {i for i, token in raw.get_added_tokens_decoder().items() if token.special}
        decoder = json.loads(raw.to_str()).get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        self.may_break_characters = "ByteLevel" in json.dumps(decoder)
        has_fallback = "ByteFallback" in json.dumps(decoder)
        tokens = raw.get_vocab().items() if has_fallback else ()
        self.byte_ids = {i for token, i in tokens if BYTE_TOKEN.fullmatch(token)}
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level vocabulary; none for an id that it does not have."""
        if token_id not in self._bytes:
            token = self.raw.id_to_token(token_id) or ""
            known = all(char in self._alphabet for char in token)
            self._bytes[token_id] = bytes(self._alphabet[char] for char in token) if known else token.encode()
        return self._bytes[token_id]


class BytePieces:
    """Byte-level vocabularies: bytes into an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: Vocabulary, skip: set[int]):
        self._vocabulary, self._skip = vocabulary, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        bytes_of = self._vocabulary.bytes_of
        return self._utf8.decode(b"".join(bytes_of(i) for i in ids if i not in self._skip))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowPieces:
    """All other vocabularies: the newest tokens are decoded behind those shown last, whose text is then cut off."""

    def __init__(self, vocabulary: Vocabulary, skip: set[int]):
        self._vocabulary, self._skip = vocabulary, skip
        self._shown: list[int] = []  # tokens of the last piece
        self._shown_text = ""
        self._ready: list[int] = []  # tokens behind it that wait to be decoded
        self._run: list[int] = []  # byte tokens whose run has not ended

    def push(self, ids: list[int]) -> str:
        before = len(self._ready)
        for token_id in ids:
            if token_id in self._vocabulary.byte_ids:
                self._run.append(token_id)
            elif token_id not in self._skip and self._vocabulary.raw.id_to_token(token_id) is not None:
                self._ready += [*self._run, token_id]
                self._run = []
        return self._advance(final=False) if len(self._ready) > before else ""

    def flush(self) -> str:
        self._ready += self._run
        self._run = []
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text = self._decode(self._shown + self._ready)[len(self._shown_text) :]
        unfinished = self._vocabulary.may_break_characters and text.endswith("\ufffd")
        if not text or (unfinished and not final):
            return ""
        self._shown, self._ready = self._ready, []
        self._shown_text = self._decode(self._shown)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.raw.decode(ids, skip_special_tokens=False)


def pieces(vocabulary: Vocabulary, skip_special_tokens: bool) -> Pieces:
    """A fresh text of this vocabulary."""
    skip = vocabulary.special if skip_special_tokens else set()
    return BytePieces(vocabulary, skip) if vocabulary.is_byte_level else WindowPieces(vocabulary, skip)
