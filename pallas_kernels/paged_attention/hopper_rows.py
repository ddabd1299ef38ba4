"""The rows of a slot with a draft, side by side in one wgmma on Hopper GPUs: its pages are read once.

How a row's tokens are cut into parts follows from its own length. Rows of a slot that are cut alike, as nearly always
all are, go over the same tiles together; those that are cut in another way go over theirs in another run, in which the
others see nothing. A tile that a row sees nothing of leaves its sums as they were, to the bit, and so a row has the
same bits whatever is guessed beside it.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import BOX, ROWS, Chip, per_row, plgpu
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.gpu import Blocks


def side_by_side(q: Array, kv_heads: int, times: int, rows: int) -> Array:
    """[slots * times, Hq, D] -> [slots, kv_heads, rows, D]: a KV head's query heads of one token after another's."""
    _, heads, size = q.shape
    grouped = q.reshape(-1, times, kv_heads, heads // kv_heads, size).swapaxes(1, 2)
    grouped = grouped.reshape(-1, kv_heads, times * heads // kv_heads, size)
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - grouped.shape[2]), (0, 0)))


def rows_of(count: int) -> int:
    """Rows that so many take: whole boxes, and whole wgmmas where one is too few."""
    return pl.cdiv(count, ROWS) * ROWS if count > ROWS else pl.cdiv(count, BOX) * BOX


def visible_rows(lengths: Array, times: int, groups: int, window: int | None, blocks: Blocks) -> Array:
    """i32 [slots, 2, ROWS]: what each row of a wgmma sees, and of which of its slot's rows it shares the cut; of slots
    of one row, which nobody asks, nothing."""
    if times == 1:
        return jnp.zeros((1, 2, ROWS), jnp.int32)
    of_slots = lengths.reshape(-1, times)
    _, first, tiles, _ = gpu.cut(of_slots, window, blocks)
    first, tiles = (jnp.broadcast_to(each, of_slots.shape) for each in (first, tiles))
    alike = (first[:, 1:] == first[:, :-1]) & (tiles[:, 1:] == tiles[:, :-1])
    runs = jnp.where(jnp.pad(alike, ((0, 0), (1, 0))), 0, jnp.arange(times))
    told = jnp.stack([of_slots, lax.cummax(runs, axis=1)], axis=1).astype(jnp.int32)
    told = jnp.repeat(told, groups, axis=2)[:, :, :ROWS]
    return jnp.pad(told, ((0, 0), (0, 0), (0, ROWS - told.shape[2])))


class Walk(NamedTuple):
    """The tiles that a part of a slot goes over, run after run."""

    firsts: list[Any]  # tile of each run
    ends: list[Any]  # steps until each run's end
    longest: Any  # tokens of the slot
    start: Any  # the first token that a row sees; None where rows differ

    @staticmethod
    def of(lengths: list[Any], part: Array, window: int | None, blocks: Blocks) -> "Walk":
        cuts = [gpu.cut(length, window, blocks) for length in lengths]
        firsts = [first + part * tiles for _, first, tiles, _ in cuts]
        stops = [
            jnp.minimum(first + tiles, pl.cdiv(length, blocks.tile))
            for first, (_, _, tiles, _), length in zip(firsts, cuts, lengths, strict=True)
        ]
        alike = [jnp.bool_(False)]
        alike += [(one[1] == next_[1]) & (one[2] == next_[2]) for one, next_ in pairwise(cuts)]
        ends, longest, done = [], lengths[0], jnp.int32(0)
        for at in reversed(range(len(lengths) - 1)):
            stops[at] = jnp.where(alike[at + 1], jnp.maximum(stops[at], stops[at + 1]), stops[at])
        for length, first, stop, joined in zip(lengths, firsts, stops, alike, strict=True):
            longest = jnp.maximum(longest, length)
            done = done + jnp.where(joined, 0, jnp.maximum(stop - first, 0))
            ends.append(done)
        return Walk(firsts, ends, longest, cuts[0][0] if len(lengths) == 1 else None)

    @property
    def steps(self) -> Array:
        return self.ends[-1]

    def at(self, step: Array) -> tuple[Array, Array]:
        """The tile of a step, and whose run it is."""
        tile, run, begun = self.firsts[0] + step, jnp.int32(0), self.ends[0]
        for index in range(1, len(self.firsts)):
            later = step >= begun
            tile = jnp.where(later, self.firsts[index] + step - begun, tile)
            run, begun = jnp.where(later, index, run), self.ends[index]
        return tile, run

    def seen(self, token: Array, run: Array, told: Any, window: int | None, chip: type[Chip]) -> Array:
        """bool [rows, tokens]. told: i32 [2, ROWS] of `visible_rows`."""
        if len(self.firsts) == 1:
            return (token < self.longest) & (token >= self.start)
        lengths, runs = (chip.load(told.at[which], plgpu.Layout.WGMMA.reduce(1)) for which in range(2))
        seen = (token < per_row(lengths, token.shape)) & (per_row(runs, token.shape) == run)
        return seen if window is None else seen & (token >= per_row(lengths - window, token.shape))
