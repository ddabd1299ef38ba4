"""A compiled program's text, as XLA prints it: computations, their instructions in the order they run, and arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

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
class Instruction:
    """`shape`: of its result, perhaps of several arrays; `called`: computations that it runs, a loop's condition and a
    sum's operator among them; `body`: a loop's; `line` is all of it."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    body: str | None
    line: str


@dataclass(frozen=True)
class Module:
    """`entry` is the computation that is run."""

    computations: dict[str, list[Instruction]]
    entry: str


def parsed(hlo: str) -> Module:
    """Of a program's whole text."""
    found, entry, here = dict[str, list[Instruction]](), "", list[Instruction]()
    for line in hlo.splitlines():
        head = None if line.startswith(" ") else _COMPUTATION.match(line)
        if head is not None:
            here = found.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        else:
            here += _instructions(line)
    return Module(found, entry)


def _instructions(line: str) -> Iterator[Instruction]:
    match = _INSTRUCTION.match(line)
    if match is not None:
        # What it calls stands before its backend's settings, which hold all of a kernel where it is one.
        said = line[match.end() :].partition(", backend_config=")[0]
        called = (name.strip(" %") for group in _CALLED.findall(said) for name in group.split(","))
        body = _BODY.search(said)
        operands = tuple(_OPERAND.findall(match["operands"]))
        yield Instruction(
            match["name"], match["opcode"], match["shape"], operands, tuple(called), body and body[1], line
        )


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """(dtype, sides) of each, as ("bf16", [16, 8192])."""
    return [(dtype, [int(side) for side in sides.split(",") if side]) for dtype, sides in _ARRAY.findall(shape)]


def bytes_of(dtype: str, sides: list[int]) -> int:
    """Of an array, without padding."""
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return -(-bits * prod(sides) // 8)
