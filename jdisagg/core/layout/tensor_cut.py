"""The split of a model over `tp` shards, for any `tp`: KV heads, their query heads and channels, padded where needed.

Every shard has the same size; the end of some shards may be padding: zero weights that are not in the checkpoint. KV
heads are spread whole, as few per shard as possible, because pages are the first thing a worker runs out of:
`ceil(Hkv / tp)`, in order, so that only the tail is padding. If there are at least twice as many shards as KV heads,
each head is held by `tp // Hkv` shards, which split its query heads. Query heads stay with their KV head. Query heads
and the MLP's channels are padded at their shard's end, so a shard's real part is always one run.

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
    """Returns the KV heads per shard, padding included."""
    return -(-num_kv_heads // tp)


def kv_heads_of_shard(num_kv_heads: int, tp: int, shard: int) -> range:
    """Returns the KV heads that `shard` of `tp` holds first; the rest of the shard is padding."""
    held, replicas = heads_per_shard(num_kv_heads, tp), replicas_of(num_kv_heads, tp)
    start = min(shard // replicas * held, num_kv_heads)
    return range(start, min(start + held, num_kv_heads))


def replicas_of(num_kv_heads: int, tp: int) -> int:
    """Returns the number of shards that hold the same KV head."""
    return max(1, tp // num_kv_heads)


@dataclass(frozen=True, slots=True)
class Channels:
    """The rows of an MLP: even shares, padded to the next multiple of the shards."""

    size: int

    def width(self, tp: int) -> int:
        """Returns the rows of each shard, padding included."""
        return -(-self.size // tp)

    def held(self, tp: int, shard: int) -> range:
        """Returns the rows of the checkpoint that are the first of `shard`; padding follows."""
        width = self.width(tp)
        return range(min(shard * width, self.size), min((shard + 1) * width, self.size))


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The rows of keys or values, `head_dim` per KV head."""

    num_kv_heads: int
    head_dim: int = 1

    def width(self, tp: int) -> int:
        return heads_per_shard(self.num_kv_heads, tp) * self.head_dim

    def held(self, tp: int, shard: int) -> range:
        return _rows(kv_heads_of_shard(self.num_kv_heads, tp, shard), self.head_dim)


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """The rows of queries, or the inputs of the output projection: `head_dim` per query head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 1

    @property
    def group(self) -> int:
        """Returns the query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def width(self, tp: int) -> int:
        held, replicas = heads_per_shard(self.num_kv_heads, tp), replicas_of(self.num_kv_heads, tp)
        return held * -(-self.group // replicas) * self.head_dim

    def held(self, tp: int, shard: int) -> range:
        """Returns the query heads of the shard's KV heads; only its part of them if other shards hold the same KV
        head."""
        kv, replicas = kv_heads_of_shard(self.num_kv_heads, tp, shard), replicas_of(self.num_kv_heads, tp)
        if replicas == 1 or not kv:
            return _rows(kv, self.group * self.head_dim)
        first, part = kv.start * self.group, shard % replicas
        heads = range(first + part * self.group // replicas, first + (part + 1) * self.group // replicas)
        return _rows(heads, self.head_dim)


Cut = Channels | KVHeads | QueryHeads


def _rows(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)


# Resharding of weights between two meshes: which run of which source shard becomes which run of another.
#
# The counterpart of `reshard.py` for tensors that are split along one dimension of any unit (heads, channels, experts).
# A shard is a row of runs, each of one part of the tensor (q, k and v of a fused matrix are three), followed by
# padding. Only the common runs of two splits are moved.


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `rows` of part `part`, at `offset` of the shard."""

    part: int
    rows: range
    offset: int


@dataclass(frozen=True, slots=True)
class ShardCut:
    """One shard: its runs in order, and its length with padding."""

    runs: tuple[Run, ...]
    length: int


@dataclass(frozen=True, slots=True)
class WeightMove:
    """A copy of `length` rows of the source shard, from `start` on, to `offset` of the destination shard."""

    shard: int
    start: int
    offset: int
    length: int


def shard_cut(held: Sequence[tuple[range, int]]) -> ShardCut:
    """Returns the shard of parts in order; held: the rows of each part on the shard and its length, padding
    included."""
    ends = list(accumulate((width for _, width in held), initial=0))
    runs = (Run(part, rows, ends[part]) for part, (rows, _) in enumerate(held))
    return ShardCut(tuple(run for run in runs if run.rows), ends[-1])


def plan_weight_moves(
    source: Sequence[ShardCut], destination: ShardCut, near: int | None = None
) -> tuple[WeightMove, ...]:
    """Returns the moves that fill one destination shard, in the order of its rows; rows without a move are padding.
    `near`: the source shard on the destination's own device, which is preferred as source."""
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
    """Returns the move from row `start` of the run on, of the first shard in `order` that holds it."""
    for shard in order:
        for held in source[shard].runs:
            if held.part == run.part and start in held.rows:
                length = min(held.rows.stop, run.rows.stop) - start
                offset = run.offset + start - run.rows.start
                return WeightMove(shard, held.offset + start - held.rows.start, offset, length)
    raise AssertionError(f"no shard holds row {start} of part {run.part}")
