"""The collectives of a compiled program, read off its text."""

from __future__ import annotations

import re
from math import prod

from jdisagg.core.hardware import KINDS, Collective, Groups
from jdisagg.engine.hlo_text import Instruction, Module, arrays, bytes_of

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_CHAIN = re.compile(r'chain_id="\w+"')
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
STARTS = {kind + "-start": kind for kind in KINDS}


def read_collectives(module: Module) -> tuple[Collective, ...]:
    """Of a compiled program."""
    depths = _depths(module)
    found, read = list[Collective](), set[str]()
    for name, body in module.computations.items():
        for each in body:
            one, chain = collective_of(each, depth=depths.get(name, 0)), _chain(each)
            if one is not None and chain not in read:
                found.append(one)
                read |= {chain} if chain else set()
    return tuple(found)


def chains(module: Module, instruction: Instruction) -> list[str]:
    """Those that a fusion runs a step of: its compiler cut a collective into steps, and fused products with them."""
    if instruction.opcode != "fusion":
        return []
    inner = (each for called in instruction.called for each in module.computations.get(called, []))
    return [chain for each in inner if (chain := _chain(each))]


def _chain(instruction: Instruction) -> str:
    """The name of the collective that it is a step of, if it is."""
    found = _CHAIN.search(instruction.line) if instruction.opcode in KINDS else None
    return "" if found is None else found[0]


def _depths(module: Module) -> dict[str, int]:
    """Of each computation, how many loops it is run in, one within the other."""
    found, left = dict[str, int](), [(module.entry, 0)]
    while left:
        name, depth = left.pop()
        if name in module.computations and depth > found.get(name, -1):
            found[name] = depth
            for each in module.computations[name]:
                left += [(called, depth) for called in each.called if called != each.body]
                left += [] if each.body is None else [(each.body, depth + 1)]
    return found


def collective_of(instruction: Instruction, *, depth: int) -> Collective | None:
    """What it sends; None where it is no collective, or only the end of one."""
    kind = STARTS.get(instruction.opcode, instruction.opcode)
    if kind not in KINDS:
        return None
    sizes = [bytes_of(*each) for each in arrays(instruction.shape)]
    if instruction.opcode == "all-gather-start":
        sizes = sizes[len(sizes) // 2 :]  # behind the operands, the results
    if instruction.opcode == "collective-permute-start":
        sizes = sizes[:1]  # operand, result, and two words of context
    groups = _groups(instruction.line)
    whole = len(groups[0]) if kind == "reduce-scatter" and groups else 1  # its result is a shard
    return Collective(kind, sum(sizes) * whole, groups, depth)


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
