"""The model's own chat template: found in a folder, rendered in a sandbox with what `transformers` gives templates."""

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
    """`{% generation %}` marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
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
    """Templates by name: `chat_template.jinja` (and `additional_chat_templates/`), else the tokenizer's config."""
    templates = _listed(tokenizer_config.get("chat_template"), folder)
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    return templates | {name: read_text(path) for name, path in files.items() if path.exists()}


def _listed(found: Any, folder: Path) -> dict[str, str]:
    """Every spelling of the tokenizer config's field: one template, several by name, or a list of both."""
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    templates = {"default": found} if isinstance(found, str) else {} if found is None else found
    if not isinstance(templates, dict) or not all(isinstance(each, str) for each in (*templates, *templates.values())):
        place = folder / "tokenizer_config.json"
        raise CheckpointError(f"{place} has chat_template = {shown(found)}; needed: a text, or texts by name")
    return templates


class ChatTemplates:
    """Compiled templates of one model, with its special tokens as variables (`bos_token`, `eos_token`, ...)."""

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
        """Whether a template holds the text."""
        return any(text in each for each in self._texts)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """The prompt. Raises `RequestError` where there is no template, or where it refuses the messages."""
        wanted = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        if wanted not in self._templates:
            raise RequestError(f"{self._place} has no chat template; send a plain prompt to completions", "messages")
        known = {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": messages}
        try:
            return self._templates[wanted].render(known)
        except SecurityError as error:
            raise CheckpointError(f"the chat template in {self._place} leaves its sandbox: {error}") from error
        except Exception as error:  # a template is somebody's program, and what it was given a client's
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error


# What clients write stays text: special tokens are the template's to set, whatever a message says.
#
# A chat's prompt is one string in which the template's `<|im_end|>` and one that a client wrote look alike. So a mark
# that nobody can guess is put before each special token that a client wrote; the tokenizer then reads only the unmarked
# ones as special, and takes the marks away. A chat without such text has no marks, and is tokenized as it is.

EDGE = "\ufdd1"  # before a mark: nothing is special across this place, and what follows may be
SPACES = re.compile(r"\s*")
SLICE = 16_384  # characters looked through at once: the interpreter is held no longer


class Part(NamedTuple):
    """A piece of a prompt: a special token's id, or text in which nothing is special."""

    token: int | None
    text: str


def new_mark() -> str:
    """Begins with a character that Unicode reserves for such things; the rest keeps a client from writing it."""
    return "\ufdd0" + secrets.token_hex(8)


class SpecialText:
    """The special tokens of a tokenizer as texts to look for."""

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
        """Any of them."""
        return re.compile(self._any)

    def marked(self, value: Any, mark: str) -> Any:
        """`value` as JSON has them, with the mark before each special token in its texts, keys included."""
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
        cuts = [0, *self._places(text), len(text)]
        return mark.join(text[start:end] for start, end in itertools.pairwise(cuts))

    def _edged(self, text: str, mark: str) -> str:
        """With marks also where an edge of the text is part of a special token, which its neighbour might complete."""
        edges = range(1, min(self._longest, len(text) + 1))
        before = EDGE + mark if any(text[:k] in self._tails for k in edges) else ""
        after = EDGE + mark if any(text[-k:] in self._heads for k in edges) else ""
        return before + text + after

    def _places(self, text: str) -> Iterator[int]:
        """Where special tokens begin, overlapping ones included."""
        for start in range(0, len(text), SLICE):
            for found in self._begins.finditer(text, start, start + SLICE + self._longest):
                if found.start() < start + SLICE:
                    yield found.start()

    def parts(self, text: str, mark: str) -> list[Part]:
        """A marked prompt in pieces, marks taken away. Tokens that swallow white space beside them do so here too."""
        escaped, parts, plain, at = re.escape(mark), list[Part](), "", 0
        for found in re.finditer(f"{EDGE}{escaped}|{escaped}((?:{self._any})?)|({self._any})", text):
            plain += text[at : found.start()] + (found[1] or "")
            at = found.end()
            if found[2] is not None:
                number, token = self._tokens[found[2]]
                parts += [Part(None, plain.rstrip() if token.lstrip else plain), Part(number, found[2])]
                plain = ""
                if token.rstrip:
                    at = found.end() + len(SPACES.match(text, at)[0])  # pyright: ignore[reportOptionalSubscript]
        parts.append(Part(None, plain + text[at:]))
        return [part for part in parts if part.text]


def without_special(raw: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy to which special tokens are ordinary text, for parts that may stand in the middle of a prompt."""
    described = json.loads(raw.to_str())
    for each in _steps(described.get("pre_tokenizer")):
        if each.get("prepend_scheme") == "first":
            each["prepend_scheme"] = "never"
    copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    copy.encode_special_tokens = True
    return copy


def _steps(described: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of those it is made of."""
    if described is None:
        return []
    return described.get("pretokenizers") or described.get("normalizers") or [described]


LOSSLESS = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"}  # pre-tokenizers that drop no character
NORMALIZERS = {"Prepend": 1, "NFC": 3, "NFKC": 4, "Replace": 1}  # how many bytes of text become one at the most


def most_bytes_a_token(raw: tokenizers.Tokenizer) -> int | None:
    """Bytes of text that one token can stand for; None where that has no bound, as where unknown text is dropped."""
    described = json.loads(raw.to_str())
    model, shrink = described["model"], 1
    for each in _steps(described.get("normalizer")):
        if each["type"] not in NORMALIZERS or (each["type"] == "Replace" and not _keeps_length(each)):
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


def _keeps_length(replace: dict[str, Any]) -> bool:
    pattern = replace["pattern"].get("String")
    return pattern is not None and len(replace["content"].encode()) >= len(pattern.encode())
