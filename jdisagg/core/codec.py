"""Nouns as JSON values and back, exactly, floats to the last bit; what is read is of the types that are declared.

Every field is checked against its hint where it is read: a text for a number, a nested list, a NaN, an unknown field or
noun raises DecodeError, which names the field. So a number that came from another process, or from a file, is a number.
Fields at their defaults are not written.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from jdisagg.core import events, messages, steps, tiers
from jdisagg.core.errors import DecodeError
from jdisagg.core.labels import Labels
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import Adapter, Attempt, Request, Sampled, SamplingParams
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Ring, Stages, WorkerConfig

TAG = "is"
WHOLE_BITS = 64  # seeds are the widest numbers there are
SHOWN = 60  # characters of a wrong value that a message repeats
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHOWN

Reader = Callable[[Any], Any]
Noun = TypeVar("Noun")


def _dataclasses_of(module: types.ModuleType) -> list[type]:
    return [each for each in vars(module).values() if isinstance(each, type) and dataclasses.is_dataclass(each)]


NOUNS: dict[str, type] = {
    each.__name__: each
    for each in (
        *_dataclasses_of(steps),
        *_dataclasses_of(messages),
        *_dataclasses_of(events),
        *_dataclasses_of(tiers),
        *(Adapter, Attempt, Request, SamplingParams, Sampled, Ledger, Labels, WorkerConfig, Stages, Ring, RouterConfig),
    )
}

# ------------------------------------------------------------------ out


def encode(value: Any) -> Any:
    """A noun, or anything one is made of, as JSON values; dataclasses carry their names under "is"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in _fields(type(value))}
        defaults = _defaults(type(value))
        kept = {name: encode(one) for name, one in given.items() if name not in defaults or one != defaults[name]}
        return {TAG: type(value).__name__, **kept}
    if isinstance(value, tuple | list):
        row = cast(list[Any], value)
        plain = {int}.issuperset(map(type, row))  # prompts are long
        return list(row) if plain else [encode(each) for each in row]
    if isinstance(value, Enum):
        return value.value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


@cache
def _fields(noun: type) -> tuple[dataclasses.Field[Any], ...]:
    """Returns the fields that are sent; local ones keep their defaults elsewhere."""
    return tuple(each for each in dataclasses.fields(noun) if each.init and not each.metadata.get("is_local"))


@cache
def _defaults(noun: type) -> dict[str, Any]:
    return {each.name: each.default for each in _fields(noun) if each.default is not dataclasses.MISSING}


# ------------------------------------------------------------------ in


def decode(value: Any) -> Any:
    """The noun that `encode` was given. Raises DecodeError where it is none of this version's."""
    try:
        return _decode_noun(value)
    except DecodeError as error:
        raise DecodeError(f"cannot read {shown(value)}: {error}") from None


def decode_as(kind: type[Noun], value: Any) -> Noun:
    """As `decode`, of this class. Raises DecodeError where it is another's."""
    found = decode(value)
    if not isinstance(found, kind):
        raise DecodeError(f"cannot read {shown(value)}: it is a {type(found).__name__} and no {kind.__name__}")
    return found


def shown(value: Any) -> str:
    """The beginning of a value in one line, for a message: never long, whatever it is."""
    if isinstance(value, int) and abs(value) > 1 << WHOLE_BITS:
        return "a huge number"
    return SHORT.repr(value)[: 2 * SHOWN]


def _decode_noun(value: Any) -> Any:
    record = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    name = record.get(TAG)
    noun = NOUNS.get(name) if isinstance(name, str) else None
    if noun is None:
        raise DecodeError(f"{shown(value)} names no noun of this version")
    readers, given = _readers(noun), {}
    for key, one in record.items():
        if key != TAG:
            given[key] = _read_field(noun, readers, key, one)
    missing = readers.keys() - given.keys() - _optional(noun)
    if missing:
        raise DecodeError(f"{noun.__name__} lacks {', '.join(sorted(missing))}")
    return noun(**given)


def _read_field(noun: type, readers: dict[str, Reader], key: str, value: Any) -> Any:
    reader = readers.get(key)
    if reader is None:
        raise DecodeError(f"{noun.__name__} has no field {key[:SHOWN]!r}")
    try:
        return reader(value)
    except DecodeError as error:
        raise DecodeError(f"{noun.__name__}.{key}: {error}") from None


@cache
def _optional(noun: type) -> frozenset[str]:
    missing = dataclasses.MISSING
    some = (each for each in _fields(noun) if each.default is not missing or each.default_factory is not missing)
    return frozenset(each.name for each in some)


@cache
def _readers(noun: type) -> dict[str, Reader]:
    hints = typing.get_type_hints(noun)
    return {each.name: _reader(hints[each.name]) for each in _fields(noun)}


def _reader(hint: Any) -> Reader:
    """What steps the JSON of a value of type `hint` back into it, or raises DecodeError."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, typing.NewType):
        return _reader(hint.__supertype__)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(inside)
    if origin in (tuple, list):
        return _row_reader(origin, inside)
    if dataclasses.is_dataclass(hint):
        return _noun_reader((hint,))  # pyright: ignore[reportArgumentType]
    if issubclass(hint, Enum):
        return _enum_reader(hint)
    return PLAIN[hint]


def _union_reader(members: tuple[Any, ...]) -> Reader:
    """Unions here are of nouns, which name themselves, or of one plain type and None."""
    some = tuple(member for member in members if member is not types.NoneType)
    read = _noun_reader(some) if dataclasses.is_dataclass(some[0]) else _reader(some[0])
    if len(some) == len(members):
        return read
    return lambda value: None if value is None else read(value)


def _noun_reader(nouns: tuple[type, ...]) -> Reader:
    def read(value: Any) -> Any:
        found = _decode_noun(value)
        if not isinstance(found, nouns):
            raise DecodeError(f"{type(found).__name__} is not what belongs here")
        return found

    return read


def _row_reader(origin: type, inside: tuple[Any, ...]) -> Reader:
    if origin is list or inside[-1] is Ellipsis:
        read = _reader(inside[0])
        numbers, made = read is _whole, cast(Callable[[Any], Any], origin)

        def read_all(value: Any) -> Any:
            row: Any = _whole_row(value) if numbers else [read(each) for each in _row(value)]
            return made(row)

        return read_all
    reads = [_reader(each) for each in inside]

    def read_each(value: Any) -> Any:
        if len(_row(value)) != len(reads):
            raise DecodeError(f"{len(value)} values where {len(reads)} belong")
        return tuple(read(each) for read, each in zip(reads, value, strict=True))

    return read_each


def _row(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DecodeError(f"{shown(value)} is no list")
    return cast(list[Any], value)


def _whole_row(value: Any) -> list[int]:
    """Prompts are long: their numbers are checked all together."""
    row = _row(value)
    if row and (set(map(type, row)) != {int} or min(row) < -(1 << WHOLE_BITS) or max(row) > 1 << WHOLE_BITS):
        return [_whole(each) for each in row]
    return row


def _enum_reader(kind: type[Enum]) -> Reader:
    values = {each.value: each for each in kind}

    def read(value: Any) -> Enum:
        found = values.get(value) if isinstance(value, str) else None
        if found is None:
            raise DecodeError(f"{shown(value)} is no {kind.__name__}")
        return found

    return read


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > 1 << WHOLE_BITS:
        raise DecodeError(f"{shown(value)} is no whole number of at most {WHOLE_BITS} bits")
    return value


def _number(value: Any) -> float:
    if type(value) is float and not math.isnan(value):
        return value
    if type(value) is not int or abs(value) > 1 << WHOLE_BITS:
        raise DecodeError(f"{shown(value)} is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"{shown(value)} is no text")
    if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        raise DecodeError("half a character is no text")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise DecodeError(f"{shown(value)} is neither true nor false")
    return value


def _octets(value: Any) -> bytes:
    try:
        return base64.b64decode(_text(value).encode(), validate=True)
    except binascii.Error as error:
        raise DecodeError(f"{shown(value)} is no base64: {error}") from None


PLAIN: dict[Any, Reader] = {int: _whole, float: _number, str: _text, bool: _flag, bytes: _octets}
