"""JSON schemas as clients write them: read as the standard has it, and searched for the part that is at fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

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
