"""Finds a model's chat templates and renders them in a Jinja sandbox with the helpers that `transformers` provides."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jdisagg.core.errors import CheckpointError, RequestError
from jdisagg.model.files import read_text, shown

Message = Mapping[str, Any]


class GenerationBlock(Extension):
    """Jinja's `{% generation %}` block, which marks assistant text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Replaces Jinja's `tojson` filter, which escapes HTML and would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns templates by name: `chat_template.jinja`, `additional_chat_templates/`, else the tokenizer config's."""
    templates = _listed(tokenizer_config.get("chat_template"), folder)
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    return templates | {name: read_text(path) for name, path in files.items() if path.exists()}


def _listed(found: Any, folder: Path) -> dict[str, str]:
    """Returns the templates of the tokenizer config by name. The field is one template, a mapping or a list of {name,
    template}."""
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    templates = {"default": found} if isinstance(found, str) else {} if found is None else found
    if not isinstance(templates, dict) or not all(isinstance(each, str) for each in (*templates, *templates.values())):
        place = folder / "tokenizer_config.json"
        raise CheckpointError(f"{place} has chat_template = {shown(found)}; needed: a text, or texts by name")
    return templates


class ChatTemplates:
    """The compiled templates of one model, with its special tokens as variables (`bos_token`, `eos_token`, ...)."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], place: str):
        self._place, self._special_tokens = place, dict(special_tokens)
        self._texts = tuple(templates.values())
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
        except (TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template in {place} does not compile: {error}") from error

    @property
    def exists(self) -> bool:
        return "default" in self._templates

    def speaks_of(self, text: str) -> bool:
        return any(text in each for each in self._texts)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Returns the rendered prompt. Raises `RequestError` if the model has no template or the template rejects the
        messages."""
        wanted = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        if wanted not in self._templates:
            raise RequestError(f"{self._place} has no chat template; send a plain prompt to completions", "messages")
        known = {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": messages}
        try:
            return self._templates[wanted].render(known)
        except SecurityError as error:
            raise CheckpointError(f"the chat template in {self._place} leaves its sandbox: {error}") from error
        except Exception as error:  # template code may raise anything for a client's messages
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error


# Escaping of special tokens in client messages.
#
# In a rendered prompt the template's `<|im_end|>` and a client's look alike. An unguessable random mark is put before
# each special token in a client's text. The tokenizer treats only unmarked ones as special and removes the marks.
# A chat without such text has no marks and is tokenized unchanged.

EDGE = "\ufdd1"  # before a mark: no special token spans this position, but one may start after it
SPACES = re.compile(r"\s*")
SLICE = 16_384  # characters searched per regex call, which bounds how long the interpreter lock is held


class PromptSegment(NamedTuple):
    """A segment of a prompt: a special token's id, or plain text."""

    token: int | None
    text: str


def new_mark() -> str:
    """Returns a random mark. The first character is a Unicode noncharacter; the random rest cannot be guessed by a
    client."""
    return "\ufdd0" + secrets.token_hex(8)


class SpecialTokens:
    """The special tokens of a tokenizer, searchable in text."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        special = {each.content: (i, each) for i, each in raw.get_added_tokens_decoder().items() if each.special}
        self._tokens = {text: found for text, found in special.items() if text}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._any = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._begins = re.compile(f"(?={self._any})")
        self._starts = {text[:2] for text in self._tokens}
        self._longest = len(longest_first[0]) if longest_first else 0
        self._heads = {text[:k] for text in self._tokens for k in range(1, len(text))}
        self._tails = {text[k:] for text in self._tokens for k in range(1, len(text))}

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self._any)

    def marked(self, value: Any, mark: str) -> Any:
        """Returns the JSON value with the mark before each special token in its strings, keys included."""
        match value:
            case str():
                return self._edged(self._marked_text(value, mark), mark)
            case list():
                return [self.marked(each, mark) for each in value]
            case dict():
                return {self._marked_text(key, mark): self.marked(each, mark) for key, each in value.items()}
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        if not any(start in text for start in self._starts):
            return text
        cuts = [0, *self._token_offsets(text), len(text)]
        return mark.join(text[start:end] for start, end in itertools.pairwise(cuts))

    def _edged(self, text: str, mark: str) -> str:
        """Returns the text with marks at its ends where a special token could be completed by adjacent text."""
        edges = range(1, min(self._longest, len(text) + 1))
        before = EDGE + mark if any(text[:k] in self._tails for k in edges) else ""
        after = EDGE + mark if any(text[-k:] in self._heads for k in edges) else ""
        return before + text + after

    def _token_offsets(self, text: str) -> Iterator[int]:
        """Yields the offsets where special tokens start, overlapping ones included."""
        for start in range(0, len(text), SLICE):
            for found in self._begins.finditer(text, start, start + SLICE + self._longest):
                if found.start() < start + SLICE:
                    yield found.start()

    def parts(self, text: str, mark: str) -> list[PromptSegment]:
        """Splits a marked prompt into segments without marks. Special tokens with lstrip or rstrip remove adjacent
        white space."""
        escaped, parts, plain, at = re.escape(mark), list[PromptSegment](), "", 0
        for found in re.finditer(f"{EDGE}{escaped}|{escaped}((?:{self._any})?)|({self._any})", text):
            plain += text[at : found.start()] + (found[1] or "")
            at = found.end()
            if found[2] is not None:
                number, token = self._tokens[found[2]]
                parts += [
                    PromptSegment(None, plain.rstrip() if token.lstrip else plain),
                    PromptSegment(number, found[2]),
                ]
                plain = ""
                if token.rstrip:
                    at = found.end() + len(SPACES.match(text, at)[0])  # pyright: ignore[reportOptionalSubscript]
        parts.append(PromptSegment(None, plain + text[at:]))
        return [part for part in parts if part.text]


def without_special(raw: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a copy of the tokenizer that reads special tokens as plain text and adds no prefix space to a segment."""
    described = json.loads(raw.to_str())
    for each in _steps(described.get("pre_tokenizer")):
        if each.get("prepend_scheme") == "first":
            each["prepend_scheme"] = "never"
    copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    copy.encode_special_tokens = True
    return copy


def _steps(described: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
    """Returns a normalizer or pre-tokenizer as the list of its steps."""
    if described is None:
        return []
    return described.get("pretokenizers") or described.get("normalizers") or [described]


LOSSLESS = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"}  # pre-tokenizers that drop no character
NORMALIZERS = {"Prepend": 1, "NFC": 3, "NFKC": 4, "Replace": 1}  # maximum bytes of text that become one byte


def most_bytes_a_token(raw: tokenizers.Tokenizer) -> int | None:
    """Returns the maximum bytes of text for one token; None if unbounded, as when unknown text is dropped."""
    described = json.loads(raw.to_str())
    model, shrink = described["model"], 1
    for each in _steps(described.get("normalizer")):
        if each["type"] not in NORMALIZERS or (each["type"] == "Replace" and not _keeps_byte_length(each)):
            return None
        shrink *= NORMALIZERS[each["type"]]
    for each in _steps(described.get("pre_tokenizer")):
        if each["type"] not in LOSSLESS or each.get("behavior") == "Removed":
            return None
    strips = any(each.lstrip or each.rstrip for each in raw.get_added_tokens_decoder().values())
    byte_level = any(each["type"] == "ByteLevel" for each in _steps(described.get("pre_tokenizer")))
    if strips or not (byte_level or model.get("byte_fallback")):
        return None
    return shrink * max(len(token.encode()) for token in raw.get_vocab())


def _keeps_byte_length(replace: dict[str, Any]) -> bool:
    pattern = replace["pattern"].get("String")
    return pattern is not None and len(replace["content"].encode()) >= len(pattern.encode())
