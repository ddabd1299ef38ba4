"""Reads the collectives of a compiled program from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from jdisagg.core.hardware import KINDS, Collective, Groups

# Parses a compiled program's text as XLA prints it: computations, their instructions in execution order, and arrays.

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\((?P<operands>[^)]*)\)"
)
_OPERAND = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|\w+_computation)=\{?((?:%?[\w.-]+(?:, )?)+)"
)
_BODY = re.compile(r"\bbody=%?([\w.-]+)")


@dataclass(frozen=True, slots=True)
class InstructionInfo:
    """One instruction. `shape` is that of its result, perhaps of several arrays. `called` are the computations it runs,
    including a loop's condition and a reduction's operator. `body` is a loop's body; `line` is the whole text."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    body: str | None
    line: str


@dataclass(frozen=True)
class HloProgram:
    """A parsed program; `entry` names the computation that is run."""

    computations: dict[str, list[InstructionInfo]]
    entry: str


def parsed(hlo: str) -> HloProgram:
    """Parses the whole text of a compiled program."""
    found, entry, here = dict[str, list[InstructionInfo]](), "", list[InstructionInfo]()
    for line in hlo.splitlines():
        head = None if line.startswith(" ") else _COMPUTATION.match(line)
        if head is not None:
            here = found.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        else:
            here += _instructions(line)
    return HloProgram(found, entry)


def _instructions(line: str) -> Iterator[InstructionInfo]:
    match = _INSTRUCTION.match(line)
    if match is not None:
        # The called computations precede the backend's settings, which contain the whole code of a kernel.
        said = line[match.end() :].partition(", backend_config=")[0]
        called = (name.strip(" %") for group in _CALLED.findall(said) for name in group.split(","))
        body = _BODY.search(said)
        operands = tuple(_OPERAND.findall(match["operands"]))
        yield InstructionInfo(
            match["name"], match["opcode"], match["shape"], operands, tuple(called), body and body[1], line
        )


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Returns (dtype, dimensions) of each array of a shape, as ("bf16", [16, 8192])."""
    return [(dtype, [int(side) for side in sides.split(",") if side]) for dtype, sides in _ARRAY.findall(shape)]


def bytes_of(dtype: str, sides: list[int]) -> int:
    """Returns the bytes of an array, without padding."""
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return -(-bits * prod(sides) // 8)


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_CHAIN = re.compile(r'chain_id="\w+"')
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
STARTS = {kind + "-start": kind for kind in KINDS}


def read_collectives(module: HloProgram) -> tuple[Collective, ...]:
    """Returns the collectives of a compiled program."""
    depths = _depths(module)
    found, read = list[Collective](), set[str]()
    for name, body in module.computations.items():
        for each in body:
            one, chain = collective_of(each, depth=depths.get(name, 0)), _chain(each)
            if one is not None and chain not in read:
                found.append(one)
                read |= {chain} if chain else set()
    return tuple(found)


def chains(module: HloProgram, instruction: InstructionInfo) -> list[str]:
    """Returns the chains that a fusion runs a step of: the compiler splits a collective into steps and fuses them with
    products."""
    if instruction.opcode != "fusion":
        return []
    inner = (each for called in instruction.called for each in module.computations.get(called, []))
    return [chain for each in inner if (chain := _chain(each))]


def _chain(instruction: InstructionInfo) -> str:
    """Returns the name of the chain that the instruction is a step of; "" if it is none."""
    found = _CHAIN.search(instruction.line) if instruction.opcode in KINDS else None
    return "" if found is None else found[0]


def _depths(module: HloProgram) -> dict[str, int]:
    """Returns for each computation the number of nested loops in which it runs."""
    found, left = dict[str, int](), [(module.entry, 0)]
    while left:
        name, depth = left.pop()
        if name in module.computations and depth > found.get(name, -1):
            found[name] = depth
            for each in module.computations[name]:
                left += [(called, depth) for called in each.called if called != each.body]
                left += [] if each.body is None else [(each.body, depth + 1)]
    return found


def collective_of(instruction: InstructionInfo, *, depth: int) -> Collective | None:
    """Returns what the instruction sends; None if it is no collective, or only the end of one."""
    kind = STARTS.get(instruction.opcode, instruction.opcode)
    if kind not in KINDS:
        return None
    sizes = [bytes_of(*each) for each in arrays(instruction.shape)]
    if instruction.opcode == "all-gather-start":
        sizes = sizes[len(sizes) // 2 :]  # the results, which follow the operands
    if instruction.opcode == "collective-permute-start":
        sizes = sizes[:1]  # the others are the result and two words of context
    groups = _groups(instruction.line)
    whole = len(groups[0]) if kind == "reduce-scatter" and groups else 1  # the result is one shard
    return Collective(kind, sum(sizes) * whole, groups, depth)


def _groups(line: str) -> Groups:
    listed = _LISTED.search(line)
    if listed is not None:
        rows = re.findall(r"\{([\d, ]*)\}", listed[1])
        return tuple(tuple(int(place) for place in row.split(",")) for row in rows if row.strip())
    iota = _IOTA.search(line)
    return () if iota is None else _of_iota(int(iota[1]), int(iota[2]), iota[3], iota[4])


def _of_iota(number: int, size: int, sides: str, order: str | None) -> Groups:
    """Returns the groups of [number,size]<=[sides]T(order): device numbers 0, 1, ... as an array of these sides, its
    axes in this order."""
    shape = [int(side) for side in sides.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else list(range(len(shape)))
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    places = [0]
    for axis in axes:
        places = [place + index * steps[axis] for place in places for index in range(shape[axis])]
    assert len(places) == number * size, (number, size, sides)
    return tuple(tuple(places[group * size : (group + 1) * size]) for group in range(number))
