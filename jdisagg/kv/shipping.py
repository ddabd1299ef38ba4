"""KV on its way: pages packed into few arrays cut in head atoms, put shard by shard, joined and scattered on arrival.

Three steps, all asynchronous: a pack (program of the source), one put of all shards and atoms (no reshard in flight),
and an insert (donated program of the destination). Page counts are padded to buckets with the null page. A digest of
every page, layer and head travels beside them, and the destination compares before it inserts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.worker_config import Digests
from jdisagg.kv.pools import POOL_SPEC, StagePages, pool_format
from jdisagg.parallel.place import AXIS, WHOLE, Device, Place, Program
from jdisagg.policy.reshard import TRANSFER_BUCKETS, HeadPlan, plan_heads, plan_layers, plan_moves
from pallas_kernels import PackedPages, pack_kv_pages, unpack_kv_pages
from pallas_kernels.pack_kv_pages.reference import digest_pages

# Atoms are [L, n pages, heads, 2, page_size, D] of KV, and u32 [L, n pages that have one, heads] of digests.
ATOM_SPEC = PartitionSpec(None, None, AXIS)
VALUE_AXES = 6
SAMPLE = 8  # pages a digest, where they are sampled


@dataclass(frozen=True)
class Move:
    """Some pages of some layers, landed or about to: atoms as the destination holds them, cut on heads."""

    stage: int  # of the destination
    layers: range  # of the model
    atoms: list[Array]  # those of KV, then as many of digests or none
    pages: np.ndarray  # i32[n], destination pages, 0 where padded

    @property
    def values(self) -> list[Array]:
        return [atom for atom in self.atoms if atom.ndim == VALUE_AXES]

    @property
    def digests(self) -> list[Array]:
        return [atom for atom in self.atoms if atom.ndim != VALUE_AXES]


class Dock:
    """One place's programs for sending and taking pages; stages that share a place share its dock."""

    def __init__(self, place: Place, digests: Digests = Digests.FULL) -> None:
        self.place, self.digests = place, digests
        self._packs: dict[int, Program] = {}
        formats = pool_format(place), None
        self.insert_program = place.program(
            insert_pages, (POOL_SPEC, WHOLE, ATOM_SPEC), (POOL_SPEC, WHOLE), donate=(0,), out_formats=formats
        )
        self.check_program = place.program(are_intact, (ATOM_SPEC, ATOM_SPEC), PartitionSpec(AXIS))

    def pack(self, pools: Sequence[Array], pages: np.ndarray, atom_heads: int) -> tuple[Array, ...]:
        """Pools of some layers, i32[n] -> one array an atom of a shard, KV first, then digests."""
        return self.pack_program(atom_heads)(list(pools), self.place.put(pages))

    def pack_program(self, atom_heads: int) -> Program:
        if atom_heads not in self._packs:

            def pack_shard(pools: list[Array], pages: Array) -> tuple[Array, ...]:
                packed = pack_kv_pages(pools, pages, digests=self.digests is Digests.FULL)
                whole, digests = [packed.values], packed.digests
                if self.digests is Digests.SAMPLED:
                    digests = pack_kv_pages(pools, pages[::SAMPLE]).digests
                if digests is not None:
                    whole.append(digests)
                return tuple(atom for each in whole for atom in jnp.split(each, each.shape[2] // atom_heads, axis=2))

            self._packs[atom_heads] = self.place.program(pack_shard, (POOL_SPEC, WHOLE), ATOM_SPEC)
        return self._packs[atom_heads]

    def insert(self, pools: Sequence[Array], move: Move) -> list[Array]:
        """The pools of `move.layers`, donated -> the same with the pages written."""
        return self.insert_program(list(pools), self.place.put(move.pages), move.values)[0]

    def check(self, move: Move) -> Array | None:
        """bool[tp]: whether what landed on each shard is what was sent; None where no digest came with it."""
        return self.check_program(move.values, move.digests) if move.digests else None

    @property
    def programs(self) -> list[Program]:
        return [self.insert_program, self.check_program, *self._packs.values()]


def insert_pages(pools: list[Array], pages: Array, atoms: list[Array]) -> tuple[list[Array], Array]:
    """Joins the atoms of a shard and writes them; the second result only says that it is done."""
    blocks = atoms[0] if len(atoms) == 1 else jnp.concatenate(atoms, axis=2)
    written, _ = unpack_kv_pages(pools, PackedPages(blocks, None, None), pages, digests=False)
    return written, pages[:1]


def are_intact(values: list[Array], digests: list[Array]) -> Array:
    """bool[1] of one shard: every digest is that of its page. Fewer digests than pages: of every `SAMPLE`th."""
    good = jnp.bool_(True)
    for atom, sent in zip(values, digests, strict=True):
        step = 1 if sent.shape[1] == atom.shape[1] else SAMPLE
        good &= jnp.all(digest_pages(atom[:, ::step], None) == sent)
    return good[None]


@dataclass(frozen=True, slots=True)
class StageShape:
    """What a source must know of a stage that it ships to: its layers, and into how many shards its heads are cut."""

    layers: range
    tp: int


@dataclass(frozen=True)
class Departure:
    """Some pages of some layers, packed and still at the source."""

    stage: int  # of the destination
    layers: range  # of the model
    packed: tuple[Array, ...]  # an array an atom of a source shard, cut on heads: KV, then digests
    heads: HeadPlan
    pages: np.ndarray  # i32[n], destination pages, 0 where padded

    @property
    def kinds(self) -> int:
        """1, or 2 where digests travel too."""
        return len(self.packed) // self.heads.atoms_per_source

    @property
    def width(self) -> int:
        """Pieces for each destination shard."""
        return self.heads.atoms_per_destination * self.kinds

    @property
    def pieces(self) -> list[Array]:
        """Arrays of one device each: those for destination shard 0 in order, KV first, then those of shard 1, ..."""
        shards = [[array.addressable_data(shard) for shard in range(_num_shards(array))] for array in self.packed]
        starts = [kind * self.heads.atoms_per_source for kind in range(self.kinds)]
        return [shards[start + atom.index][atom.shard] for row in self.heads.pieces for start in starts for atom in row]


def shapes_of(stages: Sequence[StagePages]) -> list[StageShape]:
    return [StageShape(stage.layers, stage.place.tp) for stage in stages]


def pack_pages(
    source: Sequence[StagePages],
    docks: dict[Place, Dock],
    shapes: Sequence[StageShape],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
) -> list[Departure]:
    """Packs the pages of `layers` (None: all), now in program order, for stages of these shapes; returns at once.

    The two sides may cut layers and heads differently, and `layers` as well. `docks` are the source's.
    """
    assert len(source_pages) == len(destination_pages), (len(source_pages), len(destination_pages))
    departures = []
    first, stop = layers or (0, shapes[-1].layers.stop)
    for run in plan_layers(tuple(_within(s.layers, first, stop) for s in source), tuple(d.layers for d in shapes)):
        held, wanted = source[run.source_stage], shapes[run.destination_stage]
        heads = plan_heads(held.layout.num_kv_heads, held.place.tp, wanted.tp)
        pools = held.pools[run.layers.start - held.layers.start : run.layers.stop - held.layers.start]
        for begin, end, bucket in plan_moves(len(source_pages), TRANSFER_BUCKETS):
            packed = docks[held.place].pack(pools, padded(source_pages[begin:end], bucket), heads.atom_heads)
            pages = padded(destination_pages[begin:end], bucket)
            departures.append(Departure(run.destination_stage, run.layers, packed, heads, pages))
    return departures


def ship_pages(
    source: Sequence[StagePages],
    docks: dict[Place, Dock],
    destination: Sequence[StagePages],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
) -> tuple[list[Move], list[Array]]:
    """Packs as `pack_pages` and starts all on its way to stages of this process; the second result is at the source."""
    departures = pack_pages(source, docks, shapes_of(destination), source_pages, destination_pages, layers)
    moves = [send(departure, destination[departure.stage].place) for departure in departures]
    return moves, [array for departure in departures for array in departure.packed]


def _within(layers: range, first: int, stop: int) -> range:
    return range(max(layers.start, first), min(layers.stop, stop))


def padded(pages: Sequence[int], size: int) -> np.ndarray:
    """i32[size]: the pages, then null pages."""
    filled = np.zeros(size, np.int32)
    filled[: len(pages)] = pages
    return filled


def piece_shapes(
    layout: KVLayout, layers: int, pages: int, heads: HeadPlan, digests: Digests
) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of each piece for one destination shard, of a departure of `layers` layers and `pages` pages."""
    _, *page = layout.page_shape()
    values = (layers, pages, heads.atom_heads, *page), layout.dtype
    checked = {Digests.FULL: pages, Digests.SAMPLED: -(-pages // SAMPLE), Digests.OFF: 0}[digests]
    sums = (layers, checked, heads.atom_heads), "uint32"
    return [values] * heads.atoms_per_destination + [sums] * (heads.atoms_per_destination if checked else 0)


def check_moves(stages: Sequence[StagePages], docks: dict[Place, Dock], moves: Sequence[Move]) -> list[Array]:
    """Starts to compare the digests of what has landed: bool[tp] for every move that came with some."""
    verdicts = [docks[stages[move.stage].place].check(move) for move in moves]
    return [verdict for verdict in verdicts if verdict is not None]


def insert_moves(stages: Sequence[StagePages], docks: dict[Place, Dock], moves: Sequence[Move]) -> None:
    """Scatters what has landed into the pools of its stages, in place."""
    for move in moves:
        stage = stages[move.stage]
        layers = slice(move.layers.start - stage.layers.start, move.layers.stop - stage.layers.start)
        stage.pools[layers] = docks[stage.place].insert(stage.pools[layers], move)


def send(departure: Departure, place: Place) -> Move:
    """Starts every piece on its way to its destination device, shards as they are in one put; returns at once."""
    landed = jax.device_put(departure.pieces, devices_of(place, departure.width))
    return Move(departure.stage, departure.layers, joined(landed, place), departure.pages)


def devices_of(place: Place, atoms: int) -> list[Device]:
    """Where the pieces of a departure go, one by one, at a place whose shards take `atoms` each, digests included."""
    return [device for device in place.devices for _ in range(atoms)]


def joined(landed: Sequence[Array], place: Place) -> list[Array]:
    """Pieces on their devices -> the destination's atoms: atom j of all its shards as one array."""
    width = len(landed) // place.tp
    return [place.join(landed[j::width], ATOM_SPEC, axis=2) for j in range(width)]


def _num_shards(array: Array) -> int:
    return len(array.addressable_shards) if len(array.devices()) > 1 else 1
