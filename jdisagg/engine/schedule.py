"""The order in which a compiled program multiplies and sends, read off its text (`core/schedule.py`).

A TPU's collective may be spread as a chain over fusions that multiply meanwhile, its first and last step among them.
A product counts the operands it reads, cut out of their stacks, and its result; other instructions count what they
write. Of kernels nothing is known: they count as no time at all, so that nothing is taken to hide behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from jdisagg.core.hardware import KINDS, Collective, Work
from jdisagg.core.schedule import End, Events, Start, Turns
from jdisagg.engine.hlo import chains, collective_of
from jdisagg.engine.hlo_text import Instruction, Module, arrays, bytes_of

PRODUCTS = ("dot", "convolution")
NAMES_ONLY = frozenset(("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"))
FREE = NAMES_ONLY | {"custom-call", "iota", "partition-id"}
Event = Work | Start | End | Turns


def read_schedule(module: Module) -> Events:
    """Of a compiled program, whose text is scheduled."""
    return tuple(_events(module, module.entry, depth=0))


def _events(module: Module, name: str, *, depth: int) -> Iterator[Event]:
    body = module.computations.get(name, [])
    reader = _Reader(module, {each.name: each.shape for each in body}, depth)
    steps = [step for each in body for step in chains(module, each)]
    for each in body:
        if each.opcode == "while":
            assert each.body is not None, each.line
            yield Turns(tuple(_events(module, each.body, depth=depth + 1)))
        elif each.opcode == "conditional":
            for called in each.called[:1]:
                yield from _events(module, called, depth=depth)
        elif each.opcode.endswith("-done"):
            yield from (End(operand) for operand in each.operands if operand in reader.started)
        elif found := chains(module, each):
            yield from reader.step_of_chain(each, found[0], steps)
        else:
            yield from reader.whole(each)


@dataclass
class _Reader:
    """Of one computation."""

    module: Module
    shapes: dict[str, str]
    depth: int
    started: set[str] = field(default_factory=set)

    def whole(self, each: Instruction) -> Iterator[Event]:
        """An instruction that is no step of a chain: what it sends, and what it does beside that."""
        sent = list(_sent(self.module, each, depth=self.depth))
        names = [each.name if number == 0 else f"{each.name}/{number}" for number in range(len(sent))]
        yield from map(Start, names, sent)
        if sent and each.opcode.endswith("-start"):
            self.started.update(names)
            return
        if each.opcode not in FREE and not each.opcode.endswith("-start") and each.opcode not in KINDS:
            yield _work(self.module, each, self.shapes)
        yield from map(End, names)

    def step_of_chain(self, each: Instruction, chain: str, left: list[str]) -> Iterator[Event]:
        """`left`: of each chain one for each step that is not read yet."""
        if chain not in self.started:
            self.started.add(chain)
            yield Start(chain, next(_sent(self.module, each, depth=self.depth)))
        yield from _products(self.module, each, self.shapes)
        left.remove(chain)
        if chain not in left:
            yield End(chain)


def _sent(module: Module, each: Instruction, *, depth: int) -> Iterator[Collective]:
    """By it, or by what it runs: a collective on cores of its own, or one within a fusion."""
    own = collective_of(each, depth=depth)
    if own is not None:
        yield own
        return
    for called in each.called:
        for inner in module.computations.get(called, []):
            yield from _sent(module, inner, depth=depth)


def _work(module: Module, each: Instruction, shapes: dict[str, str]) -> Work:
    made = Work(weight_bytes=sum(bytes_of(*array) for array in arrays(each.shape)))
    return sum(_products(module, each, shapes), made)


def _products(module: Module, each: Instruction, shapes: dict[str, str]) -> Iterator[Work]:
    """Its own or those fused into it, without their results."""
    if each.opcode in PRODUCTS:
        (_, left), (dtype, right) = (arrays(shapes[operand])[0] for operand in each.operands[:2])
        (_, result), *_ = arrays(each.shape)
        # The sides of the three arrays are rows, columns and what is summed, each of them in two arrays.
        summed = round((prod(left) * prod(right) / max(prod(result), 1)) ** 0.5)
        yield Work(bytes_of(dtype, left) + bytes_of(dtype, right), 0.0, 2.0 * prod(result) * summed)
        return
    for called in each.called if each.opcode == "fusion" else ():
        inner = module.computations.get(called, [])
        within = {one.name: one.shape for one in inner}
        for one in inner:
            yield from _products(module, one, within)
