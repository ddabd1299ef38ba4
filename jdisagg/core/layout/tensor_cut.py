"""How a model is cut for `tp` shards, whatever `tp` is: KV heads, their query heads and channels, padded where needed.

Every shard holds as many places; the last places of some shards may be *padding*: zero weights, nothing in the
checkpoint. KV heads are spread in whole heads, as few a shard as can be, because pages are what a worker runs out of
first: `ceil(Hkv / tp)`, in order, so that only the tail is padding. Where there are at least twice as many shards as
KV heads, each head is held by `tp // Hkv` shards, and those split its query heads. Query heads stay with their KV
head; they and the MLP's channels have padding at their shard's end. So what exists on a shard is always one run.

| Hq / Hkv | tp | a shard's query / KV heads | shards                                      |
|----------|----|----------------------------|---------------------------------------------|
| 9 / 3    | 2  | 6 / 2                      | KV heads 0 and 1, 2 and padding             |
| 9 / 3    | 4  | 3 / 1                      | KV heads 0, 1, 2, padding                   |
| 9 / 3    | 8  | 2 / 1                      | 0, 0, 1, 1, 2, 2 (1 and 2 queries), padding |
| 8 / 2    | 4  | 2 / 1                      | 0, 0, 1, 1                                  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def heads_per_shard(num_kv_heads: int, tp: int) -> int:
    """KV heads a shard has places for."""
    return -(-num_kv_heads // tp)


def kv_heads_of_shard(num_kv_heads: int, tp: int, shard: int) -> range:
    """The KV heads that `shard` of `tp` holds, in its first places; the places after them are padding."""
    held, replicas = heads_per_shard(num_kv_heads, tp), replicas_of(num_kv_heads, tp)
    start = min(shard // replicas * held, num_kv_heads)
    return range(start, min(start + held, num_kv_heads))


def replicas_of(num_kv_heads: int, tp: int) -> int:
    """Shards that hold the same KV head."""
    return max(1, tp // num_kv_heads)


@dataclass(frozen=True, slots=True)
class Channels:
    """Rows of an MLP: even shares, padded to the next multiple of the shards."""

    size: int

    def width(self, tp: int) -> int:
        """Rows that each shard holds, padding included."""
        return -(-self.size // tp)

    def held(self, tp: int, shard: int) -> range:
        """Rows of the checkpoint that `shard` holds first; padding follows."""
        width = self.width(tp)
        return range(min(shard * width, self.size), min((shard + 1) * width, self.size))


@dataclass(frozen=True, slots=True)
class KVHeads:
    """Rows of keys or values, `head_dim` a KV head."""

    num_kv_heads: int
    head_dim: int = 1

    def width(self, tp: int) -> int:
        return heads_per_shard(self.num_kv_heads, tp) * self.head_dim

    def held(self, tp: int, shard: int) -> range:
        return _rows(kv_heads_of_shard(self.num_kv_heads, tp, shard), self.head_dim)


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """Rows of queries, or inputs of the output projection: `head_dim` a query head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 1

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    def width(self, tp: int) -> int:
        held, replicas = heads_per_shard(self.num_kv_heads, tp), replicas_of(self.num_kv_heads, tp)
        return held * -(-self.group // replicas) * self.head_dim

    def held(self, tp: int, shard: int) -> range:
        """Those of the shard's KV heads; its part of them where others hold the same KV head."""
        kv, replicas = kv_heads_of_shard(self.num_kv_heads, tp, shard), replicas_of(self.num_kv_heads, tp)
        if replicas == 1 or not kv:
            return _rows(kv, self.group * self.head_dim)
        first, part = kv.start * self.group, shard % replicas
        heads = range(first + part * self.group // replicas, first + (part + 1) * self.group // replicas)
        return _rows(heads, self.head_dim)


Cut = Channels | KVHeads | QueryHeads


def _rows(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)


# How weights change their cut between two meshes: which run of which source shard goes where in which other.
#
# The sibling of `reshard.py`, for tensors that are cut along one dimension of whatever unit (heads, channels,
# experts): a shard is a row of *runs*, each of one part of the tensor (q, k and v of a fused matrix are three),
# with padding behind it. Two cuts meet in their common runs, and nothing else moves.


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `rows` of part `part`, which the shard holds from `offset` on."""

    part: int
    rows: range
    offset: int


@dataclass(frozen=True, slots=True)
class ShardCut:
    """One shard: its runs in order, and how long it is with its padding."""

    runs: tuple[Run, ...]
    length: int


@dataclass(frozen=True, slots=True)
class WeightMove:
    """`length` rows of the source shard, from `start` on, to `offset` of the destination shard."""

    shard: int
    start: int
    offset: int
    length: int


def shard_cut(held: Sequence[tuple[range, int]]) -> ShardCut:
    """Of parts in order: the rows that the shard holds of each, and its places for them, padding included."""
    ends = list(accumulate((width for _, width in held), initial=0))
    runs = (Run(part, rows, ends[part]) for part, (rows, _) in enumerate(held))
    return ShardCut(tuple(run for run in runs if run.rows), ends[-1])


def plan_weight_moves(
    source: Sequence[ShardCut], destination: ShardCut, near: int | None = None
) -> tuple[WeightMove, ...]:
    """The moves that fill one destination shard, in the order of its rows; what they leave out is padding.

    `near`: the source shard on the destination's own device, from which whatever it holds is taken.
    """
    order = sorted(range(len(source)), key=lambda shard: shard != near)
    moves: list[WeightMove] = []
    for run in destination.runs:
        done = run.rows.start
        while done < run.rows.stop:
            move = _next_move(source, order, run, done)
            moves.append(move)
            done += move.length
    return tuple(moves)


def _next_move(source: Sequence[ShardCut], order: Sequence[int], run: Run, start: int) -> WeightMove:
    """From row `start` of the run on, of the first shard in `order` that holds it."""
    for shard in order:
        for held in source[shard].runs:
            if held.part == run.part and start in held.rows:
                length = min(held.rows.stop, run.rows.stop) - start
                offset = run.offset + start - run.rows.start
                return WeightMove(shard, held.offset + start - held.rows.start, offset, length)
    raise AssertionError(f"no shard holds row {start} of part {run.part}")
