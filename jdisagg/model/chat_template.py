"""The model's own chat template: found in a folder, rendered in a sandbox with what `transformers` gives templates."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

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
