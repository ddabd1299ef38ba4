"""The layers of a device program as a loop: one period of them is written out, and goes round with each turn's weights.

The stage's pages lie in one pool, layer behind layer. It is carried through the loop and written in place, never cut:
a layer finds its pages by page numbers that begin where its own do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jdisagg.core.model_config import Experts
from jdisagg.engine.attention import ChunkRows, DecodeRows, shifted
from jdisagg.engine.paged_layers import run_layer
from jdisagg.model.network import Layer, Stage
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool


class LoopedLayers:
    """Of one stage, run once while a program is traced; pool and counts are then what the layers leave.

    pool: [layers * pages of one, ...]. live: bool[T], the rows that count as tokens that experts are sent.
    """

    def __init__(
        self,
        pool: Pool,
        rows: DecodeRows | None,
        chunks: ChunkRows | None,
        num_layers: int,
        experts: Experts | None,
        live: Array,
    ) -> None:
        self.pool, self.experts = pool, experts
        self._rows, self._chunks, self._live = rows, chunks, live
        self._pages = stored(pool).shape[0] // num_layers  # of one layer
        self._sent: list[Array] = []  # i32[layers, experts]

    @property
    def pools(self) -> list[Pool]:
        return [self.pool]

    @property
    def counts(self) -> tuple[Array, ...]:
        """Tokens that each expert was sent, i32[layers with experts, experts], alone; nothing where none has any."""
        return (jnp.concatenate(self._sent),) if self._sent else ()

    def run(self, stage: Stage, x: Array, positions: Array) -> Array:
        """[..., hidden] -> [..., hidden], as `Stage.run_layers`."""
        assert stage.repeat is not None
        repeat, rotation_of = stage.repeat, stage.rotations(positions)

        def one(place: int, layer: Layer, number: Array | int, x: Array, pool: Pool) -> tuple[Array, Pool, Any]:
            graph, leaves = nnx.split(layer)
            rows, chunks = shifted(self._rows, number * self._pages), shifted(self._chunks, number * self._pages)
            kind = graph, stage.attention(place), self.experts
            return run_layer(*kind, leaves, pool, x, rotation_of(place), rows, chunks, self._live, None)

        def turn(carry: tuple[Array, Pool], inputs: tuple[list[Any], Array]) -> tuple[tuple[Array, Pool], Any]:
            (x, pool), (leaves, number), sent = carry, inputs, []
            for offset in range(repeat.period):
                layer = nnx.merge(graphs[offset], leaves[offset])
                x, pool, counts = one(repeat.first + offset, layer, number + offset, x, pool)
                sent += counts
            return (x, pool), jnp.stack(sent) if sent else None

        def alone(place: int) -> None:
            nonlocal x
            (number,) = repeat.places(place)
            x, self.pool, counts = one(place, stage.layers[place], number, x, self.pool)
            self._sent += [each[None] for each in counts]

        for place in range(repeat.first):
            alone(place)
        period = stage.layers[repeat.first : repeat.first + repeat.period]
        graphs, leaves = zip(*(nnx.split(layer) for layer in period), strict=True)
        numbers = repeat.first + repeat.period * jnp.arange(repeat.turns, dtype=jnp.int32)
        (x, self.pool), sent = jax.lax.scan(turn, (x, self.pool), (list(leaves), numbers))
        if sent is not None:
            self._sent.append(sent.reshape(-1, sent.shape[-1]))
        for place in range(repeat.first + repeat.period, len(stage.layers)):
            alone(place)
        return x
