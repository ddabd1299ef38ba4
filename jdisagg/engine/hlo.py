"""The collectives of a compiled program, read off its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from jdisagg.core.collectives import KINDS, Collective, Groups

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) .*\{\s*$")
_COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|\w+_computation)=\{?((?:%?[\w.-]+(?:, )?)+)"
)
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def read_collectives(hlo: str) -> tuple[Collective, ...]:
    """Of a compiled program's text."""
    bodies = dict(_computations(hlo))
    looped = _reached(bodies)
    return tuple(each for name, lines in bodies.items() for line in lines for each in _read(line, name in looped))


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in hlo.splitlines():
        head = None if line.startswith(" ") else _COMPUTATION.match(line)
        if head is not None:
            yield name, lines
            name, lines = head["name"], []
        else:
            lines.append(line)
    yield name, lines


def _reached(computations: Mapping[str, Sequence[str]]) -> set[str]:
    """The bodies of loops, and whatever they call."""
    found: set[str] = set()
    left = [name for lines in computations.values() for line in lines for name in _BODY.findall(line)]
    while left:
        name = left.pop()
        if name not in found and name in computations:
            found.add(name)
            calls = [called for line in computations[name] for called in _CALLED.findall(line)]
            left += [each.strip(" %") for called in calls for each in called.split(",")]
    return found


def _read(line: str, looped: bool) -> Iterator[Collective]:
    match = _COLLECTIVE.search(line)
    if match is None:
        return
    kind, arrays = match["kind"], [_bytes(*each) for each in _ARRAY.findall(match["shape"])]
    if match["start"] and kind == "all-gather":
        arrays = arrays[len(arrays) // 2 :]  # behind the operands, the results
    if match["start"] and kind == "collective-permute":
        arrays = arrays[:1]  # operand, result, and two words of context
    groups = _groups(line)
    whole = len(groups[0]) if kind == "reduce-scatter" and groups else 1  # its result is a shard
    yield Collective(kind, sum(arrays) * whole, groups, looped)


def _bytes(dtype: str, sides: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return -(-bits * prod(int(side) for side in sides.split(",") if side) // 8)


def _groups(line: str) -> Groups:
    listed = _LISTED.search(line)
    if listed is not None:
        rows = re.findall(r"\{([\d, ]*)\}", listed[1])
        return tuple(tuple(int(place) for place in row.split(",")) for row in rows if row.strip())
    iota = _IOTA.search(line)
    return () if iota is None else _of_iota(int(iota[1]), int(iota[2]), iota[3], iota[4])


def _of_iota(number: int, size: int, sides: str, order: str | None) -> Groups:
    """[number,size]<=[sides]T(order): the places 0, 1, ... as an array of these sides, its axes in this order."""
    shape = [int(side) for side in sides.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else list(range(len(shape)))
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    places = [0]
    for axis in axes:
        places = [place + index * steps[axis] for place in places for index in range(shape[axis])]
    assert len(places) == number * size, (number, size, sides)
    return tuple(tuple(places[group * size : (group + 1) * size]) for group in range(number))
