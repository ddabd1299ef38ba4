"""Files of a model folder as they are found: regular ones of a sane size, JSON objects, and their fields typed.

A folder may be anybody's. What is not as it should be is a `CheckpointError` in one line: which file, which field, what
was found and what is needed.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jdisagg.core.errors import CheckpointError, UnsupportedModel

Json = Mapping[str, Any]
JSON_BYTES = 64 << 20  # of a file of JSON; the index of the largest public models has some 10 MiB
SHOWN_CHARS = 80  # of a value that was found
Value = TypeVar("Value")


def regular(path: Path, most_bytes: int | None = None) -> Path:
    """`path`, where it is a file that can be read without waiting: no pipe, device or folder, and not too long."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'special')}, not a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise CheckpointError(f"{path} has {found.st_size} bytes, at most {most_bytes} are read")
    return path


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: Path, most_bytes: int = JSON_BYTES) -> str:
    """A regular file's text, UTF-8."""
    try:
        return regular(path, most_bytes).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> Json:
    """A JSON object from a file of a checkpoint; `CheckpointError` if it is missing or is not one."""
    text = read_text(path, most_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def plain_name(name: Any, place: str) -> str:
    """`name`, where it is a file's in the same folder: a path, absolute or with "..", would lead out of it."""
    plain = isinstance(name, str) and 0 < len(name) < 256 and not set(name) & set("/\\\0")
    if not plain or name in (".", ".."):
        raise CheckpointError(f"{place} names {shown(name)}; needed: the name of a file in the same folder")
    return name


def shown(value: Any) -> str:
    """A found value, short enough for a line."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"


def first_line(error: BaseException) -> str:
    """What a library says of its error, without the pages it may add."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


class Fields:
    """A JSON object read field by field. An absent field and null are None; any other must be of its kind and range."""

    def __init__(self, raw: Json, place: str) -> None:
        self.raw, self.place = raw, place

    def wrong(self, key: str, needed: str) -> UnsupportedModel:
        """What to raise for a field of another kind or range."""
        return UnsupportedModel(f"{self.place} has {key} = {shown(self.raw.get(key))}; needed: {needed}")

    def whole(self, key: str, low: int, high: int) -> int | None:
        """An integer within [low, high]."""
        value = self.raw.get(key)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def needed(self, key: str, high: int) -> int:
        """An integer within [1, high] that no family has a default for."""
        value = self.whole(key, 1, high)
        if value is None:
            raise self.wrong(key, f"a whole number from 1 to {high}")
        return value

    def number(self, key: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        """A finite number within [low, high], or (low, high]."""
        value = self.raw.get(key)
        if value is None:
            return None
        good = type(value) in (int, float) and not math.isnan(value) and low <= value <= high
        if not good or (open_low and value == low):
            raise self.wrong(key, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where it is absent."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def part(self, key: str) -> Fields | None:
        """An object."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return None if value is None else Fields(value, f"{self.place}, {key},")

    def words(self, key: str) -> list[str] | None:
        """A list of texts."""
        value = self.raw.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.wrong(key, "a list of texts")
        return value

    def word(self, key: str) -> str | None:
        """A text."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def ids(self, key: str, most: int, num_tokens: int) -> tuple[int, ...] | None:
        """One token id, or a list of at most `most`, each under `num_tokens`."""
        value = self.raw.get(key)
        if value is None:
            return None
        listed = value if isinstance(value, list) else [value]
        if len(listed) > most or not all(type(each) is int and 0 <= each < num_tokens for each in listed):
            raise self.wrong(key, f"a token id from 0 to {num_tokens - 1}, or a list of at most {most}")
        return tuple(listed)
