"""What form a client asks of an answer, in every spelling there is: OpenAI's, vLLM's old and new one, and SGLang's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError, RequestError
from jdisagg.core.request import MAX_GRAMMAR, FinishReason, Request
from jdisagg.model.grammars.grammars import GrammarBuilder, WhitespaceFormat, open_grammars
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends import text
from jdisagg.serve.frontends.http.schema import brief
from jdisagg.serve.frontends.text import Piece

# JSON schemas as clients write them: read as the standard has it, and searched for the part that is at fault.

# Formats that an answer is held to. The standard has all others say something of a value and ask nothing of it.
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
DEFINED = ("$defs", "definitions")
NAMED = (*DEFINED, "properties", "patternProperties", "dependentSchemas")  # schemas by a name
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
MOST_PROPERTIES = 1000  # of one object: to compile them takes the square of their number
MOST_OPTIONAL = 480  # of those: more is over the limit of one step of the parser, which only the answer would find out
MOST_TRIED = 300_000  # characters of all schemas that a search for what is at fault compiles

Steps = tuple[str, ...]  # names and numbers on the way to a part


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """The schemas right within this one, definitions first, and where."""
    for key in NAMED:
        held = schema.get(key)
        if isinstance(held, dict):
            yield from (((key, name), part) for name, part in held.items())
    for key in LISTED:
        held = schema.get(key)
        if isinstance(held, list):
            yield from (((key, str(index)), part) for index, part in enumerate(held))
    for key in SINGLE:
        if isinstance(schema.get(key), dict):
            yield (key,), schema[key]


def as_the_standard_has_it(schema: Any) -> Any:
    """A schema that takes the same, as the compiler reads it: `true` is {}, 2.0 is 2 where things are counted, and a
    format that it does not know is left out. Raises RecursionError."""
    return {} if schema is True else _read(schema)


def _read(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    read = dict(schema)
    for key, held in schema.items():
        if key in NAMED and isinstance(held, dict):
            read[key] = {name: _read(part) for name, part in held.items()}
        elif key in LISTED and isinstance(held, list):
            read[key] = [_read(part) for part in held]
        elif key in SINGLE:
            read[key] = _read(held)
        elif key in COUNTS and isinstance(held, float) and held.is_integer():
            read[key] = int(held)
        elif key == "format" and isinstance(held, str) and held not in FORMATS:
            del read[key]
    return read


def at_fault(schema: Any, why: str, why_not: Callable[[Any], str]) -> str:
    """The JSON pointer of the smallest part that is refused for the same reason; "" where that is the whole.

    why_not: why a schema does not compile. A part is tried with the definitions of the whole.
    """
    if not isinstance(schema, dict):
        return ""
    given, found, tried = {key: schema[key] for key in DEFINED if key in schema}, list[str](), 0
    part: Any = schema
    while part is not None:
        within, part = parts_of(part), None
        for steps, each in within:
            if not isinstance(each, dict):
                continue
            alone = {**given, **each}
            tried += len(json.dumps(alone))
            if tried > MOST_TRIED:
                break
            if why_not(alone) == why:
                part, found = each, [*found, *steps]
                break
    return pointer(found)


def too_wide(schema: Any) -> str:
    """Why an object of the schema has too many properties, with both numbers; "" where none has."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            own, required = part.get("properties"), part.get("required")
            names = set(own) if isinstance(own, dict) else set[str]()
            needed = required if isinstance(required, list) else ()
            optional = names.difference(each for each in needed if isinstance(each, str))
            if len(names) > MOST_PROPERTIES:
                return f"an object of {len(names)} properties, at most {MOST_PROPERTIES} are allowed"
            if len(optional) > MOST_OPTIONAL:
                return f"an object of {len(optional)} optional properties, at most {MOST_OPTIONAL} are allowed"
            left += [each for _, each in parts_of(part)]
    return ""


def pointer(steps: list[str]) -> str:
    """As RFC 6901 writes it."""
    return "".join("/" + each.replace("~", "~0").replace("/", "~1") for each in steps)


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
ORDINARY, COMPACT = WhitespaceFormat(), WhitespaceFormat("")


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer is to be: what a schema, a regular expression or a grammar takes, or one of some texts."""

    kind: str
    what: Any
    field: str  # of the body
    whitespace: WhitespaceFormat = ORDINARY


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
            yield Form(kind, body[name], name, ORDINARY if pattern is None else WhitespaceFormat(pattern))


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
        whitespace = WhitespaceFormat(_text(given["whitespace_pattern"], "structured_outputs.whitespace_pattern"))
    for name, kind in STRUCTURED.items():
        if name in given:
            yield Form(kind, given[name], f"structured_outputs.{name}", whitespace)
    if given.get("json_object"):
        yield Form(SCHEMA, ANY_OBJECT, "structured_outputs.json_object", whitespace)


def grammar_of(form: Form, compiler: GrammarBuilder) -> str:
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


def _where(form: Form, why: str, compiler: GrammarBuilder) -> str:
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


# Whether an answer that ended as an error did so by its grammar: where it stands is a function of its tokens, so
# that it can be asked again. A worker sees tokens, and cannot tell a grammar that allows none from logits that
# are no numbers.


async def explain(piece: Piece, grammar: str, tokens: Sequence[int], service: Service) -> None:
    """Says so in the last piece of an answer of these tokens."""
    if piece.finish is None or piece.finish.reason is not FinishReason.ERROR:
        return
    place, vocab_size = service.tokenizer.place, service.model_config.vocab_size
    if await text.compiling(lambda: nothing_follows(grammar, tokens, place, vocab_size)):
        said = f"the answer's grammar went over its limits after {len(tokens)} tokens: it is too ambiguous or too large"
        piece.finish, piece.by_grammar = replace(piece.finish, detail=f"{said} to be followed"), True


def nothing_follows(grammar: str, tokens: Sequence[int], place: Path, vocab_size: int) -> bool:
    """Whether it allows no token behind these; False where there is nobody here who knows grammars."""
    try:
        grammars = open_grammars(place, vocab_size)
    except ConfigError:
        return False
    matcher, mask = grammars.start(grammar), np.zeros(grammars.words, np.uint32)
    matcher.take(tokens)
    matcher.fill(mask)
    return not mask.any()


# What a grammar forces before anything is drawn: it is computed with the prompt, in the same chunks.


async def with_beginning(request: Request, service: Service) -> Request:
    """The request with the tokens that its grammar leaves no choice about; where log-probabilities of them are wanted,
    they are drawn."""
    sampling = request.sampling
    if not sampling.grammar or sampling.logprobs is not None or sampling.whole_prompt:
        return request
    place, vocab_size = service.tokenizer.place, service.model_config.vocab_size
    return replace(request, forced=await text.compiling(lambda: forced_first(sampling.grammar, place, vocab_size)))


def forced_first(grammar: str, place: Path, vocab_size: int) -> tuple[int, ...]:
    """None where there is nobody here who knows grammars."""
    try:
        grammars = open_grammars(place, vocab_size)
    except ConfigError:
        return ()
    return tuple(grammars.start(grammar).forced())
