"""KV on its way: pages packed into few arrays cut in head atoms, put shard by shard, joined and scattered on arrival.

Three steps, all asynchronous: a pack (program of the source), one put of all shards and atoms (no reshard in flight),
and an insert (donated program of the destination). Page counts are padded to buckets with the null page. A digest of
every page, layer and head travels beside them, and the destination compares before it inserts; numbers that were
quantised for the way bring what that lost, and are refused over a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.kv_layout import NULL_PAGE, KVLayout
from jdisagg.core.reshard import HeadPlan, PageGroup, Route, Span, StageShape, narrower, plan_routes, plan_spans
from jdisagg.core.worker_config import RAW, Digests
from jdisagg.kv.guard import Guard
from jdisagg.kv.packing import are_intact, insert_shard, pack_shard, sorted_atoms
from jdisagg.kv.pools import POOL_SPEC, StagePages, pool_format
from jdisagg.parallel.submesh import AXIS, WHOLE, Device, Program, Submesh

ATOM_SPEC = PartitionSpec(None, None, AXIS)  # see `packing.py` for what atoms are


@dataclass(frozen=True)
class Move:
    """Some pages of some layers, landed or about to: atoms as the destination holds them, cut on heads."""

    stage: int  # of the destination
    layers: range  # of the model
    atoms: list[Array]
    pages: np.ndarray  # i32[n], destination pages, 0 where padded


class Dock:
    """One submesh's programs for sending and taking pages; stages that share a submesh share its dock."""

    def __init__(self, submesh: Submesh, digests: Digests = Digests.FULL, error_bound: float = 1.0) -> None:
        """error_bound: the relative error of a layer over which what was quantised for the way is not intact."""
        self.submesh, self.digests = submesh, digests
        self._packs: dict[tuple[int, str, str], Program] = {}
        formats = pool_format(submesh), None
        self.insert_program = submesh.program(
            insert_pages, (POOL_SPEC, WHOLE, ATOM_SPEC), (POOL_SPEC, WHOLE), donate=(0,), out_formats=formats
        )
        self.check_program = submesh.program(
            partial(are_intact, error_bound=error_bound), (ATOM_SPEC,), PartitionSpec(AXIS)
        )

    def pack(
        self, pools: Sequence[Array], pages: np.ndarray, atom_heads: int, wire: str, dtype: str
    ) -> tuple[Array, ...]:
        """Pools of some layers, i32[n] -> one array an atom of a shard and kind."""
        return self.pack_program(atom_heads, wire, dtype)(list(pools), self.submesh.put(pages))

    def pack_program(self, atom_heads: int, wire: str, dtype: str) -> Program:
        key = atom_heads, wire, dtype
        if key not in self._packs:
            pack = partial(pack_shard, atom_heads=atom_heads, wire=wire, dtype=dtype, digests=self.digests)
            self._packs[key] = self.submesh.program(pack, (POOL_SPEC, WHOLE), ATOM_SPEC)
        return self._packs[key]

    def insert(self, pools: Sequence[Array], move: Move) -> list[Array]:
        """The pools of `move.layers`, donated -> the same with the pages written."""
        atoms = sorted_atoms(move.atoms)
        return self.insert_program(list(pools), self.submesh.put(move.pages), [*atoms.values, *atoms.scales])[0]

    def check(self, move: Move) -> Array | None:
        """bool[tp]: whether what landed on each shard may be taken; None where nothing came to tell it by."""
        atoms = sorted_atoms(move.atoms)
        return self.check_program(move.atoms) if atoms.digests or atoms.errors else None

    @property
    def programs(self) -> list[Program]:
        return [self.insert_program, self.check_program, *self._packs.values()]


def insert_pages(pools: list[Array], pages: Array, atoms: list[Array]) -> tuple[list[Array], Array]:
    """Joins the atoms of a shard and writes them; the second result only says that it is done."""
    found = sorted_atoms(atoms)
    return insert_shard(pools, pages, found.values, found.scales), pages[:1]


@dataclass(frozen=True)
class Departure:
    """Some pages of some layers, packed and still at the source."""

    stage: int  # of the destination
    layers: range  # of the model
    packed: tuple[Array, ...]  # an array an atom of a source shard and kind, cut on heads
    heads: HeadPlan
    pages: np.ndarray  # i32[n], destination pages, 0 where padded

    @property
    def kinds(self) -> int:
        """1 to 4: see `packing.py`."""
        return len(self.packed) // self.heads.atoms_per_source

    @property
    def width(self) -> int:
        """Pieces for each destination shard."""
        return self.heads.atoms_per_destination * self.kinds

    @property
    def pieces(self) -> list[Array]:
        """Arrays of one device each: those for destination shard 0, kind by kind, then those of shard 1, ..."""
        shards = [[array.addressable_data(shard) for shard in range(_num_shards(array))] for array in self.packed]
        starts = [kind * self.heads.atoms_per_source for kind in range(self.kinds)]
        return [shards[start + atom.index][atom.shard] for row in self.heads.pieces for start in starts for atom in row]


def shapes_of(stages: Sequence[StagePages]) -> tuple[StageShape, ...]:
    return tuple(StageShape(each.layers, each.submesh.tp, each.layout.page_size, each.layout.dtype) for each in stages)


def pack_pages(
    source: Sequence[StagePages],
    docks: dict[Submesh, Dock],
    shapes: Sequence[StageShape],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
    wire: str = RAW,
    guard: Guard | None = None,
) -> list[Departure]:
    """Packs the pages of `layers` (None: all), now in program order, for stages of these shapes; returns at once.

    The two sides may cut layers and heads differently, and `layers` as well; the page lists hold the same tokens in
    pages of their own ends' sizes. `docks` are the source's. Layers that `guard` does not allow go raw.
    """
    departures = []
    for route in routes_of(shapes_of(source), tuple(shapes), source[0].layout.num_kv_heads, layers):
        held = source[route.source_stage]
        kind = wire if guard is None or guard.allows(route.layers) else RAW
        for span in plan_spans(len(source_pages), len(destination_pages), route.group):
            packed = _pack(held, docks[held.submesh], route, span, source_pages, kind)
            if guard is not None and kind != RAW:
                guard.watch(route.layers, sorted_atoms(packed).errors)
            pages = padded(destination_pages[slice(*span.destination)], span.groups * route.group.destination)
            departures.append(Departure(route.destination_stage, route.layers, packed, route.heads, pages))
    return departures


def _pack(
    held: StagePages, dock: Dock, route: Route, span: Span, source_pages: Sequence[int], wire: str
) -> tuple[Array, ...]:
    pools = held.pools[route.layers.start - held.layers.start : route.layers.stop - held.layers.start]
    pages = padded(source_pages[slice(*span.source)], span.groups * route.group.source)
    return dock.pack(pools, pages, route.heads.atom_heads, wire, route.dtype)


@cache
def routes_of(
    source: tuple[StageShape, ...],
    destination: tuple[StageShape, ...],
    num_kv_heads: int,
    layers: tuple[int, int] | None,
) -> tuple[Route, ...]:
    """`plan_routes`, which depends on the two meshes alone, once for each pair."""
    return plan_routes(source, destination, num_kv_heads, None if layers is None else range(*layers))


def ship_pages(
    source: Sequence[StagePages],
    docks: dict[Submesh, Dock],
    destination: Sequence[StagePages],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
    wire: str = RAW,
    guard: Guard | None = None,
) -> tuple[list[Move], list[Array]]:
    """Packs as `pack_pages` and starts all on its way to stages of this process; the second result is at the source."""
    shapes = shapes_of(destination)
    departures = pack_pages(source, docks, shapes, source_pages, destination_pages, layers, wire, guard)
    moves = [send(departure, destination[departure.stage].submesh) for departure in departures]
    return moves, [array for departure in departures for array in departure.packed]


def null_lists(group: PageGroup, groups: int) -> tuple[list[int], list[int]]:
    """Page lists of both ends for a move of this size that touches nothing: to compile its programs by."""
    return [NULL_PAGE] * (groups * group.source), [NULL_PAGE] * (groups * group.destination)


def padded(pages: Sequence[int], size: int) -> np.ndarray:
    """i32[size]: the pages, then null pages."""
    filled = np.zeros(size, np.int32)
    filled[: len(pages)] = pages
    return filled


def piece_shapes(
    layout: KVLayout, dtype: str, layers: int, pages: int, heads: HeadPlan, digests: Digests, wire: str = RAW
) -> list[jax.ShapeDtypeStruct]:
    """Each piece for one destination shard, of a departure of `layers` layers and `pages` pages.

    layout: of the source; dtype: of the destination's pages.
    """
    shape = (2, heads.atom_heads, 2, layout.page_size, layout.head_dim)
    pools = [jax.ShapeDtypeStruct(shape, layout.dtype)] * layers
    ids = jax.ShapeDtypeStruct((pages,), jnp.int32)
    dtype = narrower(layout.dtype, dtype)
    pack = partial(pack_shard, atom_heads=heads.atom_heads, wire=wire, dtype=dtype, digests=digests)
    return [kind for kind in jax.eval_shape(pack, pools, ids) for _ in range(heads.atoms_per_destination)]


def check_moves(stages: Sequence[StagePages], docks: dict[Submesh, Dock], moves: Sequence[Move]) -> list[Array]:
    """Starts to compare digests and errors of what has landed: bool[tp] for every move that came with some."""
    verdicts = [docks[stages[move.stage].submesh].check(move) for move in moves]
    return [verdict for verdict in verdicts if verdict is not None]


def insert_moves(stages: Sequence[StagePages], docks: dict[Submesh, Dock], moves: Sequence[Move]) -> None:
    """Scatters what has landed into the pools of its stages, in place."""
    for move in moves:
        stage = stages[move.stage]
        layers = slice(move.layers.start - stage.layers.start, move.layers.stop - stage.layers.start)
        stage.pools[layers] = docks[stage.submesh].insert(stage.pools[layers], move)


def send(departure: Departure, submesh: Submesh) -> Move:
    """Starts every piece on its way to its destination device, shards as they are in one put; returns at once."""
    landed = jax.device_put(departure.pieces, devices_of(submesh, departure.width))
    return Move(departure.stage, departure.layers, joined(landed, submesh), departure.pages)


def devices_of(submesh: Submesh, atoms: int) -> list[Device]:
    """Where the pieces of a departure go, one by one, at a submesh whose shards take `atoms` each, digests included."""
    return [device for device in submesh.devices for _ in range(atoms)]


def joined(landed: Sequence[Array], submesh: Submesh) -> list[Array]:
    """Pieces on their devices -> the destination's atoms: atom j of all its shards as one array."""
    width = len(landed) // submesh.tp
    return [submesh.join(landed[j::width], ATOM_SPEC, axis=2) for j in range(width)]


def _num_shards(array: Array) -> int:
    return len(array.addressable_shards) if len(array.devices()) > 1 else 1
