"""SLURM's lists of nodes as text: `node[01-03,7],login` is node01, node02, node03, node7 and login."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jdisagg.core.errors import ConfigError

MOST_NODES = 65536  # more are a mistake, or an attack
_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_PART = re.compile(r"(?:[^\[\],\s]|\[[\d,-]+\])+")
_BRACKET = re.compile(r"\[([\d,-]+)\]")


def expand(text: str) -> list[str]:
    """Every node in the list's order. Raises ConfigError where it cannot be read."""
    found: list[str] = []
    for part in _parts(text):
        for node in _nodes(part, text):
            found.append(node)
            if len(found) > MOST_NODES:
                raise ConfigError(f"the list of nodes {text[:80]!r} has more than {MOST_NODES}")
    return found


def _parts(text: str) -> list[str]:
    """At its commas outside brackets."""
    parts, end = list[str](), -1
    for match in _PART.finditer(text):
        if match.start() != end + 1 or (end >= 0 and text[end] != ","):
            break
        parts.append(match[0])
        end = match.end()
    if end != len(text):
        raise ConfigError(f"cannot read the list of nodes {text[:80]!r}; one is as node[01-03,7],login")
    return parts


def _nodes(part: str, text: str) -> Iterator[str]:
    match = _BRACKET.search(part)
    if match is None:
        yield part
        return
    for number in _numbers(match[1], text):
        for rest in _nodes(part[match.end() :], text):
            yield f"{part[: match.start()]}{number}{rest}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Of `01-03,7`, as wide as their first."""
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"cannot read {each!r} in the list of nodes {text[:80]!r}")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield str(number).zfill(len(match[1]))
