"""A chunk's rows in two halves, so that one's sums over the shards go on while the other's products run.

A row's layer needs nothing of another's but in attention, whose keys and values are written before. Halves take turns:
a product of the second begins when the first one's has ended, and only then is the first one's sum waited for. The
compiler would otherwise join both halves' products into one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import Array

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.products import Partial

# Of one half: with fewer rows a device reads its matrices for longer than it multiplies, and each half reads them.
# Balance of FLOPs and bytes in bf16: v5p 166 rows, v5e 240, H100 295, v6e 560.
FEWEST_ROWS = 512
TILE = 128  # rows of a matrix unit: the first half ends at a multiple


def halves(model: ModelConfig, rows: int, shards: int, *, out_first: bool, adapted: bool) -> int:
    """Parts that a chunk's rows go in: 2 or 1. Matrices that lie [out, in] are a CPU's, which sends nothing by itself.

    Experts and latents have collectives of their own, and rows' adapters are told for all rows at once.
    """
    dense = model.experts is None and model.latent is None
    return 2 if shards > 1 and dense and not out_first and not adapted and rows >= 2 * FEWEST_ROWS else 1


def cut(rows: Array) -> tuple[Array, Array]:
    """Both halves of [T, ...], the first no shorter."""
    middle = -(-rows.shape[0] // (2 * TILE)) * TILE
    return rows[:middle], rows[middle:]


def in_turn(
    parts: Sequence[Array], begin: Callable[[Array], Partial], end: Callable[[Partial], Array]
) -> tuple[Array, ...]:
    """Of each part its product summed over the shards: while one is summed, the next one is multiplied."""
    begun, ended, product, summed = list[Partial](), list[Array](), None, None
    for part in parts:
        begun.append(begin(after(part, product)))
        product = begun[-1].sums
    for each in begun:
        # A scheduler that may choose puts the second product, or both sums, where nothing is beside them.
        summed = end(each._replace(sums=after(each.sums, summed)))
        ended.append(after(summed, product))
    return tuple(ended)


def after(array: Array, before: Array | None) -> Array:
    """The same, not before `before` is there."""
    return array if before is None else jax.lax.optimization_barrier((array, before))[0]
