"""A machine made of another on the same devices: its weights are cut anew in place, its pages are new and empty.

The old machine holds nothing by then and is of no use afterwards: its pages are given up first, so that there is room,
and each weight as soon as its successor is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.looped_params import load_held, whole_stage
from jdisagg.model.params import StageSpec
from jdisagg.model.reshard import HeldWeights


@dataclass(frozen=True, slots=True)
class Shape:
    """What a machine is to be: its sizes, how it holds KV, and the layers of its stages, or layer groups."""

    config: WorkerConfig
    layout: KVLayout
    layers: tuple[range, ...]


def shape_of(machine: MeshExecutor) -> Shape:
    return Shape(machine.config, machine.place.layout, machine.place.layers)


def reshaped(machine: MeshExecutor, shape: Shape) -> tuple[MeshExecutor, HeldWeights]:
    """Another machine on the same devices; what of the weights was moved, and what had to be read again."""
    held, place = HeldWeights(), machine.place
    for group in machine.layer_groups:
        group.kv.pools.clear()
    _give_up_draft(machine)
    for group in machine.layer_groups:
        spec = StageSpec(machine.model, group.layers, group.submesh.mesh, place.dtype, place.weights)
        held.add(whole_stage(group.given_up(), spec), spec)
    return _made(machine, shape, held), held


def read_anew(machine: MeshExecutor, shape: Shape) -> MeshExecutor:
    """As `reshaped`, where that went wrong half way: the weights come from where they came from at first."""
    for group in machine.layer_groups:
        group.params.leaves.clear()
        group.kv.pools.clear()
    _give_up_draft(machine)
    return _made(machine, shape, None)


def _give_up_draft(machine: MeshExecutor) -> None:
    """The model that guesses is small: it is read anew where the machine is to decode."""
    if machine.draft is not None:
        machine.draft.params.leaves.clear()
        machine.draft.kv.pools.clear()


def _made(machine: MeshExecutor, shape: Shape, held: HeldWeights | None) -> MeshExecutor:
    place = replace(machine.place, layout=shape.layout, layers=shape.layers)
    parts = place.source, place.layout, place.layers, place.devices, place.dtype, place.weights, place.grammars
    if held is None:
        return MeshExecutor(shape.config, machine.model, *parts, draft=place.draft)
    load = held.load if shape.config.max_loras else partial(load_held, held)
    return MeshExecutor(shape.config, machine.model, *parts, load=load, draft=place.draft)


Owned = tuple[MeshExecutor, DeclaredProgram]


def programs_with(machine: MeshExecutor, others: Sequence[MeshExecutor]) -> Iterator[Owned]:
    """Its own steps, and what it and the others need to ship KV to each other; each with the machine that runs it."""
    yield from ((machine, each) for each in [*machine.table.steps(), *machine.table.transfers.tier_moves()])
    for other in others:
        roles = machine.config.role, other.config.role
        if roles == (Role.PREFILL, Role.DECODE):
            yield from _between(machine, other)
        elif roles == (Role.DECODE, Role.PREFILL):
            yield from _between(other, machine)


def _between(source: MeshExecutor, destination: MeshExecutor) -> Iterator[Owned]:
    yield from ((source, each) for each in source.table.departures(destination.table.shapes))
    yield from ((destination, each) for each in destination.table.arrivals(source.table.shapes))


def compile_cold(programs: Sequence[Owned]) -> list[Owned]:
    """Compiles those that are not warm, from the cache of compiled programs where they are there; nothing runs.

    Returns them: a call of each is quick now.
    """
    cold = {each.key: (machine, each) for machine, each in programs if each.key not in machine.warmed}
    for _, each in cold.values():
        each.program.lower(*each.arguments).compile()
    return list(cold.values())
