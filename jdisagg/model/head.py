"""The head: logits of a vocabulary that may be cut over shards, whole on every one of them.

A step's logits take as long to gather as the head takes to be multiplied. On accelerators each shard multiplies its
table in blocks, and one block is gathered beside the next one's product. How many they are does not depend on the rows,
so that those of a row are the same in any company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jdisagg.model.halves import after
from jdisagg.model.products import filled
from pallas_kernels.platforms import traced_platform

# A CPU gathers nothing by itself. On GPUs each gather takes long to start.
BLOCKS = {"gpu": 2, "tpu": 4}
LEAST_OUTPUTS = 1024  # of a block
LANES = 128  # of a tile: blocks begin at one
Scores = Callable[[Array, slice], Array]  # (x [..., hidden], some of a shard's outputs) -> f32[..., outputs]


class Vocabulary(NamedTuple):
    """The vocabulary cut evenly over axes of a mesh, rows behind its end being padding."""

    axes: tuple[str, ...]
    shards: int

    def rows(self, vocab_size: int) -> int:
        """Of one shard."""
        return -(-vocab_size // self.shards)

    def whole(self, x: Array, outputs: int, scores: Scores) -> Array:
        """f32[..., V] of rows x [..., hidden], on every shard, which has so many outputs."""
        if not self.axes or self.shards == 1:
            return scores(x, slice(None))
        blocks = blocks_of(outputs, traced_platform())
        if blocks == 1 or len(self.axes) > 1:  # a ring's is gathered at once
            y = scores(x, slice(None))
            return jax.lax.all_gather(y, self.axes, axis=y.ndim - 1, tiled=True)
        gathered = self._in_turn(x, slices(outputs, blocks), scores)
        return jnp.moveaxis(jnp.concatenate(gathered, axis=-1), 0, -2).reshape(*x.shape[:-1], -1)

    def _in_turn(self, x: Array, parts: list[slice], scores: Scores) -> list[Array]:
        """Of each part [shards, ..., outputs]: while one is gathered, the next one is multiplied."""
        made, gathered = list[Array](), list[Array]()
        for part in parts:
            made.append(scores(after(x, made[-1] if made else None), part))
        for each in made:
            ready = after(each, gathered[-1] if gathered else None)  # or the compiler would join the gathers
            gathered.append(jax.lax.all_gather(ready, self.axes))
        return gathered


def blocks_of(outputs: int, platform: str | None) -> int:
    """That so many outputs of a shard are multiplied and gathered in."""
    most = BLOCKS.get(platform or "cpu", 1)
    return most if outputs >= most * LEAST_OUTPUTS else 1


def slices(outputs: int, blocks: int) -> list[slice]:
    """The last is no longer than the others."""
    size = -(-outputs // (blocks * LANES)) * LANES
    return [slice(start, min(start + size, outputs)) for start in range(0, outputs, size)]


def soft_capped(logits: Array, cap: float | None) -> Array:
    """Within (-cap, cap) (Gemma 2, section 2)."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def scored(x: Array, table: Array) -> Array:
    """[..., hidden] against [V, hidden] -> f32[..., V].

    A few rows go as a product *of* the table: any other way XLA's CPU backend transposes the whole table at every call
    (1.3 of 25 CPU milliseconds of a decode turn of 8 rows, V 8192), and the barriers keep it from folding that away.
    """
    x = x.astype(table.dtype)
    if x.ndim != 2:
        return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=jnp.float32)
    if x.shape[0] == 1 and table.dtype != jnp.float32:
        return scored(jnp.concatenate([x, x]), table)[:1]  # see `products.py`
    rows = jax.lax.optimization_barrier(filled(x).T if x.shape[0] > 1 else x.T)
    scores = jax.lax.optimization_barrier(jnp.matmul(table, rows, preferred_element_type=jnp.float32))
    return scores.T[: x.shape[0]]
