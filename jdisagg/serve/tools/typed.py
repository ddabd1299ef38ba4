"""What an argument is whose text stands between marks: its tool's schema says whether it is a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jdisagg.serve.tools.said import json_value

TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
WORDS = {"True": True, "False": False, "None": None}  # as Python has them
NO_JSON, MOST_NESTED = object(), 8


def typed(text: str, schema: Any) -> Any:
    """The value that the text is by its schema; where that says nothing, what it is as JSON, or the text itself."""
    said = types_of(schema)
    if said == {"string"}:
        return text
    value = _value(text.strip())
    if value is NO_JSON:
        return text
    if not said or (value is None and "null" in said):
        return value
    allowed = tuple(kind for name in said for kind in TYPES.get(name, ()))
    fits = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
    return value if fits or "string" not in said else text


def types_of(schema: Any, depth: int = 0) -> set[str]:
    """Names of the types that it may take; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > MOST_NESTED:
        return set()
    said = schema.get("type")
    listed = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    found = {each for each in listed if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = found.union(*(types_of(each, depth + 1) for each in schema[key]))
    return found


def _value(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    value = json_value(text)
    endless = isinstance(value, float) and not math.isfinite(value)  # no number of JSON, though Python reads it
    return NO_JSON if endless or (value is None and text != "null") else value


def properties_of(schemas: Mapping[str, Any], tool: str) -> Mapping[str, Any]:
    """The schemas of a tool's arguments, by name; none where nobody offered it."""
    parameters = schemas.get(tool)
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}
