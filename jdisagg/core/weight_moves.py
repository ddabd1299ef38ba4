"""How weights change their cut between two meshes: which run of which source shard goes where in which other.

The sibling of `reshard.py`, for tensors that are cut along one dimension of whatever unit (heads, channels, experts):
a shard is a row of *runs*, each of one part of the tensor (q, k and v of a fused matrix are three), with padding behind
it. Two cuts meet in their common runs, and nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


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
