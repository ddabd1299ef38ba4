"""How large a JSON body may be in the number of its values, found by counting bytes before any value is made.

A body of four megabytes may hold 1.4 million empty objects. To make them, and to find each of them wrong, holds the
interpreter for seconds, and every other client waits; to count their commas takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pydantic_core

from jdisagg.core.errors import RequestError

COMMA, QUOTE = ord(","), ord('"')
NESTING = b"[{:"  # what makes a list, an object, or a field of one
SHOWN = 100  # characters of a value that an error repeats


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one body: values in all (about ten million a second), and lists, objects and fields (a million a second)."""

    values: int = 131_072
    nested: int = 16_384

    def with_room_for(self, tokens: int) -> Limits:
        """So many values more, for a model whose longest prompt has more token ids."""
        return replace(self, values=self.values + tokens)


LIMITS = Limits()


def read_object(raw: bytes, limits: Limits = LIMITS) -> dict[str, Any]:
    """The fields of a JSON object within `limits`. Raises RequestError."""
    check_counts(raw, limits)
    try:
        fields = pydantic_core.from_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"the body is a JSON {type(fields).__name__}, not an object")
    return fields


def check_counts(raw: bytes, limits: Limits) -> None:
    """Raises RequestError with both numbers where `raw` has more values than `limits` let by."""
    values, nested = raw.count(b","), _count(raw, NESTING)
    if values <= limits.values and nested <= limits.nested:
        return
    outside = _outside_strings(raw)
    values = int(np.count_nonzero(outside == COMMA)) + 1
    nested = sum(int(np.count_nonzero(outside == each)) for each in NESTING)
    if values > limits.values:
        raise RequestError(f"the body has {values} values, at most {limits.values} are allowed")
    if nested > limits.nested:
        raise RequestError(f"the body has {nested} lists, objects and fields, at most {limits.nested} are allowed")


def _count(raw: bytes, which: bytes) -> int:
    return sum(raw.count(bytes([each])) for each in which)


def _outside_strings(raw: bytes) -> np.ndarray:
    """uint8 of the bytes that are in no JSON string; the quotes that open them are among them."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left escaped ends no string
    text = np.frombuffer(raw, np.uint8)
    return text[np.cumsum(text == QUOTE, dtype=np.uint8) % 2 == 0]  # wraps at 256, which is even


def brief(value: Any) -> str:
    """What a client sent, as an error may repeat it: never longer than a line, never slow to write."""
    if isinstance(value, str):
        return repr(value[:SHOWN])
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python writes no number of more than 4,300 digits
    return repr(value)[:SHOWN]
