"""Converts text to tokens and back with the checkpoint's tokenizer, and chat messages to text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from jdisagg.core.errors import CheckpointError, RequestError, TooLong
from jdisagg.model.chat_template import (
    ChatTemplates,
    Message,
    SpecialTokens,
    find_templates,
    most_bytes_a_token,
    without_special,
)
from jdisagg.model.files import Json, JsonFields, first_line, read_json, shown
from jdisagg.model.gguf.config import generation_defaults
from jdisagg.model.gguf.file import is_gguf, read_gguf
from jdisagg.model.gguf.source import build_tokenizer, chat_templates, named_tokens
from jdisagg.model.hf_config import read_generation_config

# Incremental detokenization: emitted text is never revised and never ends within a character.
#
# Byte-level BPE (Llama 3, Qwen) maps every token to bytes, so an incremental UTF-8 decoder is exact. SentencePiece-like
# decoders (Llama 2, Mistral) depend on neighbouring tokens: a run of byte tokens is decoded only when it has ended, and
# other tokens are decoded after their predecessor, which determines the spacing. In both cases the emitted pieces join
# to the decoding of the whole.

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextPieces(Protocol):
    """The incremental detokenization of one text."""

    def push(self, ids: list[int]) -> str:
        """Returns the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Returns the remaining text; nothing is pushed afterwards."""
        ...


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each printable stand-in of a byte-level vocabulary (GPT-2's table)."""
    unchanged = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in unchanged]
    return {chr(byte): byte for byte in unchanged} | {chr(256 + offset): byte for offset, byte in enumerate(moved)}


class VocabularyTable:
    """The tokenizer's properties that decoding needs, computed once and shared by all texts."""

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
        """Returns the bytes of one token of a byte-level vocabulary; none for an unknown id."""
        if token_id not in self._bytes:
            token = self.raw.id_to_token(token_id) or ""
            known = all(char in self._alphabet for char in token)
            self._bytes[token_id] = bytes(self._alphabet[char] for char in token) if known else token.encode()
        return self._bytes[token_id]


class BytePieces:
    """Detokenization of byte-level vocabularies by an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: VocabularyTable, skip: set[int]):
        self._vocabulary, self._skip = vocabulary, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        bytes_of = self._vocabulary.bytes_of
        return self._utf8.decode(b"".join(bytes_of(i) for i in ids if i not in self._skip))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowPieces:
    """Detokenization of other vocabularies: new tokens are decoded after those emitted last, whose text is cut off."""

    def __init__(self, vocabulary: VocabularyTable, skip: set[int]):
        self._vocabulary, self._skip = vocabulary, skip
        self._shown: list[int] = []  # tokens of the last emitted piece
        self._shown_text = ""
        self._ready: list[int] = []  # tokens to decode after it
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


def pieces(vocabulary: VocabularyTable, skip_special_tokens: bool) -> TextPieces:
    """Returns the detokenization of a new text of this vocabulary."""
    skip = vocabulary.special if skip_special_tokens else set()
    return BytePieces(vocabulary, skip) if vocabulary.is_byte_level else WindowPieces(vocabulary, skip)


# Reading of a tokenizer from a Hugging Face folder or a GGUF file.

TOKENIZER_BYTES = 512 << 20  # largest tokenizer.json; the largest public ones have some 35 MB


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of one model's tokenizer files."""

    raw: tokenizers.Tokenizer
    named: Mapping[str, str]  # `bos_token`, `eos_token` and the like
    templates: Mapping[str, str]
    end_ids: tuple[int, ...]  # end tokens of the generation config, beside `eos_token`


def read_tokenizer(place: Path) -> TokenizerFiles:
    """Reads the tokenizer of a folder (`tokenizer.json`; other files are optional) or GGUF file. Raises
    `CheckpointError`."""
    if is_gguf(place):
        file = read_gguf(place)
        ends = generation_defaults(file).eos_ids
        return TokenizerFiles(build_tokenizer(file), named_tokens(file), chat_templates(file), ends)
    raw = _read_json_tokenizer(place / "tokenizer.json")
    config = _optional(place / "tokenizer_config.json")
    named = _special_tokens(_optional(place / "special_tokens_map.json")) | _special_tokens(config)
    ends = read_generation_config(place).eos_ids if (place / "config.json").exists() else ()
    return TokenizerFiles(raw, named, find_templates(place, config), ends)


def _optional(path: Path) -> Json:
    return read_json(path) if path.exists() else {}


def _read_json_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise CheckpointError(f"no {path.name} in {path.parent}")
    _refuse_broken_merges(path)
    try:
        raw = tokenizers.Tokenizer.from_file(str(path))
        raw.no_truncation()
        raw.no_padding()
        raw.encode_batch_fast(["a"])  # some errors appear only in use
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Rust side raises bare Exception, and BaseException on panics
        raise CheckpointError(f"cannot read {path}: {first_line(error)}") from error
    return raw


def _refuse_broken_merges(path: Path) -> None:
    """Refuses a prefix that merged tokens lack: it makes `tokenizers` 0.23 read out of bounds and end the process."""
    model = JsonFields(read_json(path, TOKENIZER_BYTES), str(path)).part("model")
    prefix = model.word("continuing_subword_prefix") if model is not None else None
    if model is None or not prefix:
        return
    merges = model.raw.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and str(parts[-1:][0] if parts else "").startswith(prefix)):
            raise model.wrong("continuing_subword_prefix", f"what all second parts begin with; {shown(merge)} does not")


def _special_tokens(config: Json) -> dict[str, str]:
    """Returns `bos_token`, `eos_token` and so on, each stored as a string or as {"content": ...}."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and value}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


class Tokenizer:
    """The tokenizer of a Hugging Face folder or of a GGUF file."""

    def __init__(self, place: str | Path):
        self.place = Path(place)
        found = read_tokenizer(self.place)
        raw, named = found.raw, found.named
        self._raw, self.vocabulary = raw, VocabularyTable(raw)
        self.bos_id = raw.token_to_id(named["bos_token"]) if "bos_token" in named else None
        own = raw.token_to_id(named["eos_token"]) if "eos_token" in named else None
        ends: list[int] = [*found.end_ids, *([] if own is None else [own])]
        self.eos_ids = tuple(dict.fromkeys(ends))
        self._chat = ChatTemplates(found.templates, named, str(self.place))
        self.special_text, self._bytes_a_token = SpecialTokens(raw), most_bytes_a_token(raw)
        self._plain = without_special(raw) if self._chat.exists else raw

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def as_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, whatever it was read from."""
        return self._raw.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`, by default with the special tokens that surround a prompt."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of each text. Unlike `tokenizers`' own `encode`, it releases the interpreter lock."""
        return _ids(self._raw, texts, add_special_tokens)

    def encode_chat(self, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a prompt that `chat` rendered from marked messages, with clients' text never read as
        special."""
        parts = self.special_text.parts(text, mark)
        around = _ids(self._raw, [""], add_special_tokens)[0]
        ids = _ids(self._raw, [text], add_special_tokens)[0] if mark not in text else []
        set_here = sum(part.token is not None for part in parts) + len(around)
        if ids and sum(token in self.vocabulary.special for token in ids) <= set_here:
            return ids
        texts = _ids(self._plain, [part.text for part in parts], False)
        inner = [
            i for part, ids in zip(parts, texts, strict=True) for i in (ids if part.token is None else [part.token])
        ]
        ends = tuple(self.eos_ids)
        before = [token for token in around if token not in ends]
        return [*before, *inner, *around[len(before) :]]

    def check_size(self, texts: Sequence[str], max_tokens: int) -> None:
        """Raises TooLong if a text has more bytes than `max_tokens` tokens can hold, without tokenizing it."""
        if self._bytes_a_token is None:
            return
        most = max_tokens * self._bytes_a_token
        for text in texts:
            size = len(text) if len(text) > most else len(text.encode(errors="replace"))
            if size > most:
                raise TooLong(
                    f"the prompt has {size} bytes or more, over the {most} that {max_tokens} tokens can hold"
                    f" ({self._bytes_a_token} bytes a token at the most)",
                    param="prompt",
                )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; unknown ids give nothing, broken characters give U+FFFD."""
        try:
            return self._raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            raise RequestError(f"token ids are integers from 0 to 4294967295: {error}", "tokens") from error

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token, special ones by name, for logprobs and inspection."""
        return self._raw.decode([token_id], skip_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return self._chat.exists

    def holds(self, text: str) -> bool:
        """Returns True if the text is a single token or occurs in the chat template."""
        return self._raw.token_to_id(text) is not None or self._chat.speaks_of(text)

    @property
    def takes_tools(self) -> bool:
        return self._chat.speaks_of("tools")

    def chat(self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Renders messages as one prompt with the model's template, which also gets `kwargs` (`tools`, ...).

        The template writes the special tokens itself: encode the result with `add_special_tokens=False`, or with
        `encode_chat` if the messages come from a client.
        """
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


class TextDecoder:
    """The streamed text of one answer: the pieces join to `Tokenizer.decode` of all ids, however they are grouped."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._pieces = pieces(tokenizer.vocabulary, skip_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` complete; "" while a character is incomplete. Linear in the tokens of the
        answer."""
        return self._pieces.push(list(ids))

    def flush(self) -> str:
        """Returns the remaining text when the answer ends; an unfinished character becomes U+FFFD."""
        return self._pieces.flush()


def _ids(raw: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    try:
        found = raw.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError(f"text that is not Unicode cannot be tokenized: {error}", "prompt") from error
    return [each.ids for each in found]
