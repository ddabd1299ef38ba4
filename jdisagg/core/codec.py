"""Records that cross processes or are kept in files: frozen structs, tagged with their class's name under "is".

msgspec writes them (MessagePack between processes, where bytes and infinities need no escape) and reads them by their
declared types: a wrong type, a number out of range, an unknown field or class raises DecodeError, which names the path.
Journals hold the same records as JSON, written by `encode`, whose text depends on values alone: digests are made of it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import reprlib
import types
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast, overload

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from jdisagg.core.errors import DecodeError

TAG = "is"
WHOLE_BITS = 64
SHOWN = 60  # characters of a wrong value that a message repeats
LONGEST_REASON = 400
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHOWN

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # the widest bounds that msgspec takes
Number = float | Whole  # a whole number stays one, so that what is decided from a record read back is the same
Kind = TypeVar("Kind")

KINDS: dict[str, type[TaggedStruct]] = {}


class DataclassFields:
    """The fields of a struct class as `dataclasses` describes them: its `replace`, `fields` and `asdict` then work."""

    def __get__(self, instance: object, owner: type[Struct]) -> dict[str, dataclasses.Field[Any]]:
        return _dataclass_fields(owner)


class TaggedStruct(Struct, frozen=True, tag_field=TAG, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """A class of records. Every subclass is known by its name to `decode`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = cast(Any, DataclassFields())

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        KINDS[cls.__name__] = cls


@cache
def _dataclass_fields(kind: type[Struct]) -> dict[str, dataclasses.Field[Any]]:
    rows: list[Any] = []
    for each in msgspec.structs.fields(kind):
        has_factory = each.default_factory is not NODEFAULT
        default: dict[str, Any] = {} if each.default is NODEFAULT else {"default": each.default}
        given = {"default_factory": each.default_factory} if has_factory else default
        rows.append((each.name, each.type, dataclasses.field(**given)))
    return {each.name: each for each in dataclasses.fields(dataclasses.make_dataclass(kind.__name__, rows))}


# ------------------------------------------------------------------ out


def encode(value: Any) -> Any:
    """Returns a record, or a value records are made of, as JSON values; fields equal to their defaults are left out."""
    if isinstance(value, TaggedStruct):
        record: dict[str, Any] = {TAG: type(value).__name__}
        for name, default in _defaults(type(value)):
            one = getattr(value, name)
            if default is NODEFAULT or one != default:
                record[name] = encode(one)
        return record
    if isinstance(value, tuple | list):
        row = cast(list[Any], value)
        plain = {int}.issuperset(map(type, row))  # prompts are long
        return list(row) if plain else [encode(each) for each in row]
    if isinstance(value, Enum):
        return value.value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


@cache
def _defaults(kind: type[TaggedStruct]) -> tuple[tuple[str, Any], ...]:
    return tuple((each.name, each.default) for each in msgspec.structs.fields(kind))


# ------------------------------------------------------------------ in


def decode(value: Any) -> Any:
    """Returns the record of any class that `value` is, of JSON or MessagePack. Raises DecodeError."""
    record = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    name = record.get(TAG)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DecodeError(f"cannot read {shown(value)}: it names no record of this version")
    return convert(kind, value)


@overload
def decode_as(kind: type[Kind], value: Any) -> Kind: ...
@overload
def decode_as(kind: types.UnionType, value: Any) -> Any: ...
def decode_as(kind: Any, value: Any) -> Any:
    """Returns the record of class `kind`, or of one of a union of classes. Raises DecodeError."""
    if isinstance(value, kind):
        return value
    found = decode(value)
    if not isinstance(found, kind):
        wanted = getattr(kind, "__name__", "record that belongs here")
        raise DecodeError(f"cannot read {shown(value)}: it is a {type(found).__name__} and no {wanted}")
    return found


def convert(kind: type[Kind], value: Any) -> Kind:
    """Returns `value`, parsed JSON or MessagePack, as the declared type: a struct, a dataclass, or a container of any.

    Raises DecodeError with the path.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
        reason = reason if reason.isprintable() else reason.encode("unicode_escape").decode()
        name = getattr(kind, "__name__", "")
        raise DecodeError(f"cannot read {shown(value)}: {name}: {reason[:LONGEST_REASON]}") from None


def read_json(text: str) -> Any:
    """Returns the value of JSON text, infinities included. Raises ValueError at NaN and at half a character."""
    value = json.loads(text, parse_constant=_infinity)
    if "\\ud" in text.lower():  # a pair, or half of one
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a character is no text") from None
    return value


def _infinity(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)


def shown(value: Any) -> str:
    """Returns the beginning of a value in one short line, for a message."""
    if isinstance(value, int) and abs(value) > 1 << WHOLE_BITS:
        return "a huge number"
    return SHORT.repr(value)[: 2 * SHOWN]
