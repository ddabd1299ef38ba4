"""How KV changes its cut between two meshes: which heads of which shard go where, which layers, in what page counts.

Heads: source shards hold runs of `heads_per_shard` heads, destination shards hold other runs. Both are multiples of
their greatest common divisor, the *atom*: the source cuts its shard into atoms, each travels whole, and a destination
shard is a row of atoms. Nothing is ever cut in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import gcd

from jdisagg.core.kv_layout import heads_per_shard, kv_head_of_shard


@dataclass(frozen=True, slots=True)
class Atom:
    """One piece: atom `index` of source shard `shard`."""

    shard: int
    index: int


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """`pieces[d]` are the atoms of destination shard d in order; every one is `atom_heads` heads."""

    atom_heads: int
    atoms_per_source: int
    pieces: tuple[tuple[Atom, ...], ...]

    @property
    def atoms_per_destination(self) -> int:
        return len(self.pieces[0])


def plan_heads(num_kv_heads: int, source_tp: int, destination_tp: int) -> HeadPlan:
    """TP `source_tp` to TP `destination_tp`; where there are more shards than heads, replicas share the sending."""
    held, wanted = heads_per_shard(num_kv_heads, source_tp), heads_per_shard(num_kv_heads, destination_tp)
    atom = gcd(held, wanted)
    pieces = []
    for destination in range(destination_tp):
        first = kv_head_of_shard(num_kv_heads, destination_tp, destination)
        pieces.append(
            tuple(
                _atom_of_head(head, num_kv_heads, source_tp, destination, atom)
                for head in range(first, first + wanted, atom)
            )
        )
    return HeadPlan(atom, held // atom, tuple(pieces))


def _atom_of_head(head: int, num_kv_heads: int, source_tp: int, destination: int, atom: int) -> Atom:
    held = heads_per_shard(num_kv_heads, source_tp)
    holders = [
        shard
        for shard in range(source_tp)
        if kv_head_of_shard(num_kv_heads, source_tp, shard)
        <= head
        < kv_head_of_shard(num_kv_heads, source_tp, shard) + held
    ]
    shard = holders[destination % len(holders)]
    return Atom(shard, (head - kv_head_of_shard(num_kv_heads, source_tp, shard)) // atom)


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers that one source stage and one destination stage both hold, numbered over the model."""

    source_stage: int
    destination_stage: int
    layers: range


def plan_layers(source: tuple[range, ...], destination: tuple[range, ...]) -> tuple[LayerRun, ...]:
    """Every non-empty meeting of the two cuts, in layer order."""
    runs = []
    for s, held in enumerate(source):
        for d, wanted in enumerate(destination):
            shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            if shared:
                runs.append(LayerRun(s, d, shared))
    return tuple(runs)


TRANSFER_BUCKETS = (4, 16, 64)  # pages that one pack and one insert move


def plan_moves(pages: int, buckets: tuple[int, ...] = TRANSFER_BUCKETS) -> tuple[tuple[int, int, int], ...]:
    """(start, stop, bucket) of each move of a transfer of `pages` pages: full largest buckets, then the rest's own."""
    moves, start = [], 0
    while start < pages:
        stop = min(start + buckets[-1], pages)
        moves.append((start, stop, buckets[bisect_left(buckets, stop - start)]))
        start = stop
    return tuple(moves)
