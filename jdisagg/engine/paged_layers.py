"""The layers of a device program, each called over its own pages.

Layers that are alike are traced once: the first is a jitted function, which the others call with their own weights and
pages. Tracing and lowering thirty layers one by one is most of the time that a start takes whose programs are compiled
already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jdisagg.core.model_config import AttentionOptions, Experts
from jdisagg.engine.attention import ChunkRows, DecodeRows, paged_attend, shifted
from jdisagg.engine.expert_load import tokens_sent
from jdisagg.model.lora import give_rows
from jdisagg.model.network import Layer, OptionsOf
from jdisagg.model.rope import Rotation
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool


class PagedLayers:
    """Is called with each layer of one stage, once, while a program is traced (`network.CallLayer`).

    pools: of each layer by its place, or one of all of them, layer behind layer; replaced by what the layers leave.
    live: bool[T], the rows that count as tokens that experts are sent.
    """

    def __init__(
        self,
        pools: list[Pool],
        rows: DecodeRows | None,
        chunks: ChunkRows | None,
        options_of: OptionsOf,
        experts: Experts | None,
        live: Array,
        adapters: Array | None = None,
        joined: int = 0,
    ) -> None:
        """adapters: i32[T], the slot of each row's (`low_rank.py`), where rows may have any. joined: layers whose pages
        lie in the one pool; 0: each has its own."""
        self.pools, self.options_of, self.experts = list(pools), options_of, experts
        self._rows, self._inputs = (rows, chunks), (live, adapters)
        self._pages = stored(pools[0]).shape[0] // joined if joined else 0  # of one layer
        self._kinds: dict[Any, Callable[..., tuple[Array, Pool, list[Array]]]] = {}
        self._sent: list[Array] = []

    def __call__(self, layer: Layer, x: Array, rotation: Rotation, index: int) -> Array:
        graph, leaves = nnx.split(layer)
        kind = graph, self.options_of(index)
        if kind not in self._kinds:
            self._kinds[kind] = jax.jit(partial(run_layer, *kind, self.experts))
        held, inputs = index if self._pages == 0 else 0, (*self._rows_of(index), *self._inputs)
        x, self.pools[held], sent = self._kinds[kind](leaves, self.pools[held], x, rotation, *inputs)
        self._sent += sent
        return x

    def _rows_of(self, index: int) -> tuple[DecodeRows | None, ChunkRows | None]:
        rows, chunks = self._rows
        return (shifted(rows, index * self._pages), shifted(chunks, index * self._pages)) if self._pages else self._rows

    @property
    def counts(self) -> tuple[Array, ...]:
        """Tokens that each expert was sent, i32[layers with experts, experts], alone; nothing where none has any."""
        return (jnp.stack(self._sent),) if self._sent else ()


def run_layer(
    graph: nnx.GraphDef[Layer],
    options: AttentionOptions,
    experts: Experts | None,
    leaves: nnx.State[Any, Any],
    pool: Pool,
    x: Array,
    rotation: Rotation,
    rows: DecodeRows | None,
    chunks: ChunkRows | None,
    live: Array,
    adapters: Array | None,
) -> tuple[Array, Pool, list[Array]]:
    """Activations and pool after one layer, and of one with experts the tokens each was sent."""
    pools, sent = [pool], []

    def routed(chosen: Array) -> None:
        assert experts is not None
        sent.append(tokens_sent(experts, chosen, live))

    attend = paged_attend(pools, rows, chunks, lambda _: options)
    layer = nnx.merge(graph, leaves)
    give_rows(layer, adapters)
    x = layer(x, rotation, 0, attend, routed)
    return x, pools[0], sent
