"""Adapters in a batch: each row of a step adds its own one's two small products to those of the model's matrices.

A matrix has room for so many adapters of so large a rank, side by side in one pair of arrays. All rows are multiplied
with all first halves, so that the product is of a fixed shape, written as the model's own are (`products.py`), and a
row has the same bits whatever the others ask for. Of its `slots * rank` channels each row needs `rank`. Accelerators
set the others to zero and multiply with all second halves too. A CPU's products cost more than they compute: there a
row's own channels weigh the rows of its own second half, one sum a number, which is a loop that XLA joins with what
comes after it. Eight rows of 1,280 outputs, eight slots of rank 8: 30 us as a product, and 9 beside it; 20 so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.adapters import AdapterWeights, adapted_leaves, target_of
from jdisagg.model.names import Part
from jdisagg.model.products import MatrixForm, product

VECTOR, VECTOR_PART = 16, 4  # numbers that the CPU's products add up side by side
TERMS = 32  # of a sum that one loop has: beyond, compilers take seconds and its rows are out of the cache
SKIPPING_ROWS = 64  # the most that skip what none of them asks for: a wider step's loops lose more by the branch
NONE, MISSING = -1, -2  # in the place of a row's slot: the model alone; one that could not be read


class LowRank(nnx.Module):
    """The adapters of one matrix, which is `parts` of the checkpoint's side by side.

    a [parts, slots, rank, in]; b of each part [slots, rank, out]. rows i32[rows]: each row's slot, which the program
    that runs it sets.
    """

    def __init__(self, a: Array, b: Sequence[Array]) -> None:
        self.a, self.b = nnx.Param(a), nnx.List([nnx.Param(each) for each in b])
        self.rows: Array | None = nnx.data(None)

    def __call__(self, x: Array, *, as_products: bool) -> Array:
        """What is added to the product of x [..., in] with the matrix; `as_products`: written as those of the CPU."""
        assert self.rows is not None, "the program sets each row's slot first"
        x, shape, made = x.reshape(-1, x.shape[-1]), x.shape[:-1], self._masked
        if as_products:
            made = self._where_asked if len(x) <= SKIPPING_ROWS else self._own
        y = made(x, self.rows)
        return y.reshape(*shape, y.shape[-1])

    def _where_asked(self, x: Array, rows: Array) -> Array:
        """As `_own`, or nothing at all where no row asks for any: a step then takes what it takes without room."""
        nothing = jax.eval_shape(self._own, x, rows)
        return jax.lax.cond(
            jnp.any(rows != NONE),
            lambda: self._own(x, rows),
            lambda: jnp.zeros(nothing.shape, nothing.dtype),
        )

    def _masked(self, x: Array, rows: Array) -> Array:
        """By products of all slots, what is not a row's own set to zero between them."""
        parts, slots, rank, inputs = self.a.shape
        inner = _contract(x, self.a[...].reshape(-1, inputs), 1).reshape(-1, parts, slots, rank)
        own = jnp.arange(slots, dtype=jnp.int32)[None, :] == rows[:, None]
        inner = jnp.where(own[:, None, :, None], inner, jnp.zeros_like(inner))
        inner = jnp.where((rows == MISSING)[:, None, None, None], jnp.full_like(inner, jnp.nan), inner)
        flat = [inner[:, part].reshape(-1, slots * rank) for part in range(parts)]
        return _joined(
            _contract(each, b[...].reshape(slots * rank, -1), 0) for each, b in zip(flat, self.b, strict=True)
        )

    def _own(self, x: Array, rows: Array) -> Array:
        """By a product of all slots, of which each row takes its own channels, and the rows of b that they weigh."""
        parts, slots, rank, inputs = self.a.shape
        inner = product(x, self.a[...].reshape(-1, inputs), None, MatrixForm(out_first=True))
        slot = jnp.maximum(rows, 0)
        own = inner.reshape(-1, parts, slots, rank).at[jnp.arange(len(rows)), :, slot].get(mode="promise_in_bounds")
        own = jnp.where((rows == NONE)[:, None, None], jnp.zeros_like(own), own)
        own = jnp.where((rows == MISSING)[:, None, None], jnp.full_like(own, jnp.nan), own)
        return _joined(_weighed(own[:, part], b[...], slot * rank) for part, b in enumerate(self.b))


def _joined(made: Iterable[Array]) -> Array:
    parts = list(made)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _contract(rows: Array, matrix: Array, dimension: int) -> Array:
    return jax.lax.dot_general(rows, matrix, (((1,), (dimension,)), ((), ()))).astype(rows.dtype)


def _weighed(weights: Array, b: Array, first: Array) -> Array:
    """[rows, rank] of b [slots, rank, out], each row's from row `first` of them all on -> [rows, out].

    Each number is one sum in one order. A loop's terms are written out, more than TERMS loop by loop.
    """
    rank, flat, weights = b.shape[1], b.reshape(-1, b.shape[2]), jax.lax.optimization_barrier(weights)
    size = rank if rank <= TERMS else gcd(rank, TERMS)

    def add(turn: int | Array, y: Array) -> Array:
        few = jax.lax.dynamic_slice_in_dim(weights, turn * size, size, 1).astype(jnp.float32)
        for term in range(size):
            row = flat.at[first + (turn * size + term)].get(mode="promise_in_bounds")
            y = y + few[:, term, None] * row.astype(jnp.float32)
        return y

    y = jnp.zeros((weights.shape[0], flat.shape[1]), jnp.float32)
    y = add(0, y) if size == rank else jax.lax.fori_loop(0, rank // size, add, y)
    return y.astype(weights.dtype)


def give_rows(module: nnx.Module, rows: Array | None) -> None:
    """Says which adapter each row asks for, i32[rows], to all within the module."""
    if rows is not None:
        for _, each in nnx.iter_modules(module):
            if isinstance(each, LowRank):
                each.rows = rows


@dataclass(frozen=True, slots=True)
class AdapterCapacity:
    """For how many adapters, of what rank at most, in numbers of what kind; see `room_for`."""

    slots: int
    rank: int
    dtype: DTypeLike


def room_for(adapters: int, rank: int, dtype: DTypeLike) -> AdapterCapacity:
    """Of whole vectors of channels: else a row's sums have another order, and other bits, in one slot than in another.

    Ranks are filled up to VECTOR_PART, and slots until all channels together are a multiple of VECTOR.
    """
    rank = -(-rank // VECTOR_PART) * VECTOR_PART
    every = VECTOR // gcd(rank, VECTOR)
    return AdapterCapacity(-(-adapters // every) * every, rank, dtype)


@dataclass(frozen=True, slots=True)
class Factor:
    """One array of `LowRank`: where it belongs in a stage, and what of an adapter a shard has in it."""

    place: int  # of the layer in its stage
    path: str  # of the matrix in the layer, as "attention.qkv"
    parts: tuple[Part, ...]  # all of the matrix's for `a`, one for a `b`
    is_a: bool
    room: AdapterCapacity

    @property
    def slot_axis(self) -> int:
        return 1 if self.is_a else 0

    @property
    def cut_axis(self) -> int | None:
        """The dimension that shards divide; None where each has all."""
        if self.parts[0].cut is None:
            return None
        if self.is_a:
            return 3 if self.parts[0].axis == 1 else None
        return 2 if self.parts[0].axis == 0 else None

    def shape(self, tp: int) -> tuple[int, ...]:
        """Of one shard."""
        part, room = self.parts[0], self.room
        size = part.shape[1] if self.is_a else len(part.rows) if part.rows is not None else part.shape[0]
        if self.cut_axis is not None:
            assert part.cut is not None
            size = part.cut.width(tp)
        return (len(self.parts), room.slots, room.rank, size) if self.is_a else (room.slots, room.rank, size)

    def new_shape(self, tp: int) -> tuple[int, ...]:
        """Of one adapter of it."""
        shape = self.shape(tp)
        return shape[: self.slot_axis] + shape[self.slot_axis + 1 :]

    def of(self, weights: AdapterWeights | None, layer: int | None, shard: int, tp: int) -> np.ndarray:
        """One adapter's numbers of this shard, f32 `new_shape`; zeros of none, or where it adds nothing."""
        found = np.zeros(self.new_shape(tp), np.float32)
        for index, part in enumerate(self.parts):
            pair = None if weights is None or layer is None else weights.pairs.get((layer, target_of(part)))
            if pair is None:
                continue
            side = self._cut(pair.a if self.is_a else pair.b, part, shard, tp)
            into = found[index] if self.is_a else found
            into[tuple(slice(0, size) for size in side.shape)] = side
        return found

    def _cut(self, side: np.ndarray, part: Part, shard: int, tp: int) -> np.ndarray:
        """The part's rows of [out, rank], or its columns of [rank, in]: those that the shard has of the matrix."""
        rows, columns = part.index(shard, tp)
        return side[:, columns] if self.is_a else side[rows].T


def factors_of(model: ModelConfig, numbers: Sequence[int], room: AdapterCapacity) -> list[Factor]:
    """Of a stage with these layers, in a fixed order: of each matrix a, then every b."""
    return [
        Factor(place, path, parts, is_a, room)
        for place, layer in enumerate(numbers)
        for path, leaf in sorted(adapted_leaves(model, layer).items())
        for parts, is_a in [(leaf.parts, True), *(((part,), False) for part in leaf.parts)]
    ]


def attached(stage: Any, factors: Sequence[Factor], leaves: Sequence[Array]) -> Any:
    """The stage, its matrices with their adapters."""
    grouped: dict[tuple[int, str], list[Array]] = {}
    for factor, leaf in zip(factors, leaves, strict=True):
        grouped.setdefault((factor.place, factor.path), []).append(leaf)
    for (place, path), (a, *b) in grouped.items():
        reduce(getattr, path.split("."), stage.layers[place]).low_rank = LowRank(a, b)
    return stage
