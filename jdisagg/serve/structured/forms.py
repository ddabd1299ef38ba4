"""What form a client asks of an answer, in every spelling there is: OpenAI's, vLLM's old and new one, and SGLang's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import RequestError
from jdisagg.core.request import MAX_GRAMMAR
from jdisagg.model.grammars.grammars import GrammarCompiler, Whitespace
from jdisagg.serve.http.json_bounds import brief
from jdisagg.serve.structured.subschemas import as_the_standard_has_it, at_fault, too_wide

SCHEMA, REGEX, CHOICE, GRAMMAR = "schema", "regex", "choice", "grammar"
ANY_OBJECT = {"type": "object"}
# Fields of a body that say all by themselves.
PLAIN = {
    "guided_json": SCHEMA,
    "guided_regex": REGEX,
    "guided_choice": CHOICE,
    "guided_grammar": GRAMMAR,
    "json_schema": SCHEMA,
    "regex": REGEX,
    "ebnf": GRAMMAR,
}
STRUCTURED = {"json": SCHEMA, "regex": REGEX, "choice": CHOICE, "grammar": GRAMMAR}  # fields of structured_outputs
OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_fallback", "disable_additional_properties")
MAX_CHOICES = 4096
TOO_LARGE = "too large"  # in what llguidance says of a grammar over its limits
ORDINARY, COMPACT = Whitespace(), Whitespace("")


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer is to be: what a schema, a regular expression or a grammar takes, or one of some texts."""

    kind: str
    what: Any
    field: str  # of the body
    whitespace: Whitespace = ORDINARY


def form_of(body: Mapping[str, Any]) -> Form | None:
    """The one form that a body's fields ask for. Raises RequestError for several, or what is none."""
    found = [*_plain(body), *_response_format(body.get("response_format"))]
    found += _structured(body.get("structured_outputs"))
    if len(found) > 1:
        named = " and ".join(dict.fromkeys(each.field for each in found))
        raise RequestError(f"{named} are given, an answer has one form", param=found[1].field)
    return found[0] if found else None


def _plain(body: Mapping[str, Any]) -> Iterator[Form]:
    pattern = body.get("guided_whitespace_pattern")
    for name, kind in PLAIN.items():
        if body.get(name) is not None:
            yield Form(kind, body[name], name, ORDINARY if pattern is None else Whitespace(pattern))


def _response_format(asked: Mapping[str, Any] | None) -> Iterator[Form]:
    field = "response_format"
    match None if asked is None else asked.get("type"):
        case None if not asked:
            return
        case "text":
            return
        case "json_object":
            yield Form(SCHEMA, ANY_OBJECT, field)
        case "json_schema":
            held = asked.get("json_schema") if asked else None
            schema = held.get("schema") if isinstance(held, Mapping) else None
            if schema is None:
                raise RequestError("response_format has no json_schema.schema", param="response_format.json_schema")
            yield Form(SCHEMA, schema, "response_format.json_schema.schema")
        case other:
            known = "text, json_object or json_schema"
            raise RequestError(f"response_format.type is {brief(other)}, must be {known}", param=field)


def _structured(asked: Mapping[str, Any] | None) -> Iterator[Form]:
    """vLLM's `structured_outputs`; its other fields are refused by name."""
    given = {name: value for name, value in (asked or {}).items() if value not in (None, False)}
    unknown = sorted(given.keys() - {*STRUCTURED, *OPTIONS, "json_object"})
    if unknown:
        raise RequestError(f"structured_outputs.{unknown[0]} is not supported", f"structured_outputs.{unknown[0]}")
    if given.get("disable_additional_properties"):
        raise RequestError(
            "disable_additional_properties is not supported: write additionalProperties: false in the schema",
            param="structured_outputs.disable_additional_properties",
        )
    whitespace = COMPACT if given.get("disable_any_whitespace") else ORDINARY
    if "whitespace_pattern" in given:
        whitespace = Whitespace(_text(given["whitespace_pattern"], "structured_outputs.whitespace_pattern"))
    for name, kind in STRUCTURED.items():
        if name in given:
            yield Form(kind, given[name], f"structured_outputs.{name}", whitespace)
    if given.get("json_object"):
        yield Form(SCHEMA, ANY_OBJECT, "structured_outputs.json_object", whitespace)


def grammar_of(form: Form, compiler: GrammarCompiler) -> str:
    """The form as a grammar that compiles. Raises RequestError where it does not, which says why; may take long."""
    writers: dict[str, Callable[[], str]] = {
        SCHEMA: lambda: compiler.of_schema(_schema(form), form.whitespace),
        REGEX: lambda: compiler.of_regex(_text(form.what, form.field)),
        CHOICE: lambda: compiler.of_choices(_choices(form)),
        GRAMMAR: lambda: compiler.of_grammar(_text(form.what, form.field)),
    }
    try:
        grammar = writers[form.kind]()
    except ValueError as error:
        raise RequestError(f"{form.field}: {' '.join(str(error).split())[:400]}", param=form.field) from error
    if len(grammar) > MAX_GRAMMAR:
        said = f"{form.field} makes a grammar of {len(grammar)} characters, at most {MAX_GRAMMAR} are allowed"
        raise RequestError(said, param=form.field)
    why = compiler.why_not(grammar)
    if why:
        raise RequestError(f"{form.field}{_where(form, why, compiler)} cannot be compiled: {why}", param=form.field)
    return grammar


def _where(form: Form, why: str, compiler: GrammarCompiler) -> str:
    """At which pointer of a schema, where a part of it alone is at fault; not asked where to compile takes long."""
    if form.kind != SCHEMA or TOO_LARGE in why:
        return ""
    found = at_fault(_schema(form), why, lambda part: compiler.why_not(compiler.of_schema(part, form.whitespace)))
    return found and f" at #{found}"


def _schema(form: Form) -> Any:
    if isinstance(form.what, str | dict | bool):
        try:
            schema = as_the_standard_has_it(json.loads(form.what) if isinstance(form.what, str) else form.what)
        except json.JSONDecodeError:
            return form.what  # the compiler says what is wrong with it
        except RecursionError as error:
            raise RequestError(f"{form.field} is nested too deeply", param=form.field) from error
        if said := too_wide(schema):
            raise RequestError(f"{form.field} has {said}", param=form.field)
        return schema
    raise RequestError(f"{form.field} is {brief(form.what)}, must be a JSON schema", param=form.field)


def _text(value: Any, field: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise RequestError(f"{field} is {brief(value)}, must be a text", param=field)


def _choices(form: Form) -> list[str]:
    given = form.what
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_CHOICES:
        raise RequestError(f"{form.field} is {brief(given)}, must be 1 to {MAX_CHOICES} texts", param=form.field)
    wrong = next((each for each in given if not isinstance(each, str)), None)
    if wrong is not None:
        raise RequestError(f"{form.field} has {brief(wrong)}, must hold texts", param=form.field)
    return given
