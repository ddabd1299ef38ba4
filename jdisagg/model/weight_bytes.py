"""Computes the bytes of weights on one device in every weight format, for the budget of KV pages.

One layer of each kind is built without memory and multiplied by its count, because building a tree of hundreds of
layers takes minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jdisagg.core.layout.stages import RingCut
from jdisagg.core.model_config import ModelConfig, WeightFormat
from jdisagg.core.request import adapter_sizes
from jdisagg.core.settings import Settings
from jdisagg.model.lora import factors_of, room_for
from jdisagg.model.network import Stage, VocabularyLayout
from jdisagg.model.products import MatrixFormat
from jdisagg.model.ring_params import alike

SCALE_BYTES = 4  # one f32 scale per output channel


def shard_bytes(config: ModelConfig, layers: range, tp: int, dtype: DTypeLike, weights: WeightFormat) -> int:
    """Returns the weight bytes of one of `tp` shards of the stage of `layers`; activations are in `dtype`."""
    table, norm = _table_bytes(config, dtype, weights), jnp.dtype(dtype).itemsize * config.hidden_size
    embedding = table if layers.start == 0 else 0
    found = _layers_bytes(config, layers, tp, dtype, weights) + embedding
    if layers.stop < config.num_layers:
        return found
    head = 0 if embedding and _is_embedding(config, tp, weights) else _head_bytes(config, tp, dtype, weights)
    return found + norm + head


def ring_shard_bytes(config: ModelConfig, cut: RingCut, tp: int, dtype: DTypeLike, weights: WeightFormat) -> int:
    """Returns the weight bytes of one device of a ring: its layers, padding included, and its share of both tables."""
    rows = VocabularyLayout((), cut.num_stages * tp).rows(config.vocab_size)
    share = replace(config, vocab_size=rows)
    tables = _table_bytes(share, dtype, weights)
    if not _is_embedding(config, 1, weights):
        tables += _head_bytes(share, 1, dtype, weights)
    norm = jnp.dtype(dtype).itemsize * config.hidden_size
    return _layers_bytes(config, cut.numbers, tp, dtype, alike(weights, cut)) + tables + norm


def adapter_bytes(settings: Settings, config: ModelConfig, layers: Sequence[int], tp: int, dtype: DTypeLike) -> int:
    """Returns the bytes of the adapter slots on one of `tp` shards of these layers; 0 without adapters."""
    sizes = adapter_sizes(settings)
    if not sizes:
        return 0
    room = room_for(sizes["max_loras"], sizes["max_lora_rank"], jnp.dtype(dtype))
    return sum(prod(each.shape(tp)) for each in factors_of(config, layers, room)) * jnp.dtype(dtype).itemsize


def number_bytes(config: ModelConfig, layers: range, tp: int, dtype: DTypeLike, weights: WeightFormat) -> float:
    """Returns the mean bytes of a multiplied weight in the layers, and in the head if they include the last layer."""
    total_bytes = _layers_bytes(config, layers, tp, dtype, weights)
    numbers = sum(config.layer_params(tp, layer) * count for layer, count in config.layer_kinds(layers))
    if layers.stop == config.num_layers:
        total_bytes, numbers = total_bytes + _head_bytes(config, tp, dtype, weights), numbers + config.head_params(tp)
    return total_bytes / numbers


def _layers_bytes(config: ModelConfig, layers: Sequence[int], tp: int, dtype: DTypeLike, weights: WeightFormat) -> int:
    kinds = Counter((config.is_sparse(layer), _full_paths(weights, layer)) for layer in layers)
    first = {(config.is_sparse(layer), _full_paths(weights, layer)): layer for layer in reversed(layers)}
    return sum(count * _layer_bytes(config, first[kind], tp, dtype, weights) for kind, count in kinds.items())


def _full_paths(weights: WeightFormat, layer: int) -> frozenset[str]:
    prefix = f"{layer}."
    return frozenset(path.removeprefix(prefix) for path in weights.full if path.startswith(prefix))


def _layer_bytes(config: ModelConfig, layer: int, tp: int, dtype: DTypeLike, weights: WeightFormat) -> int:
    def formed() -> Stage:
        stage = Stage(config, range(layer, layer + 1), tp=tp, dtype=dtype, rngs=nnx.Rngs(0))
        stage.become(weights, out_first=False)
        return stage

    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(formed).layers))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _is_embedding(config: ModelConfig, tp: int, weights: WeightFormat) -> bool:
    """Returns True if the head shares the embedding's leaf on a device with both ends."""
    whole = config.head_params(tp) == config.embedding_params
    return config.tie_embeddings and whole and not MatrixFormat(True, weights.of("head")).is_scaled


def _head_bytes(config: ModelConfig, tp: int, dtype: DTypeLike, weights: WeightFormat) -> int:
    form = MatrixFormat(True, weights.of("head"))
    if not form.is_scaled:
        return config.head_params(tp) * _table_bytes(config, dtype, weights) // config.embedding_params
    rows = config.head_params(tp) // config.hidden_size
    return config.head_params(tp) * jnp.dtype(form.stored(dtype)).itemsize + rows * SCALE_BYTES


def _table_bytes(config: ModelConfig, dtype: DTypeLike, weights: WeightFormat) -> int:
    """Returns the bytes of the embedding, which quantised formats store in the activation dtype."""
    stored = dtype if weights.is_scaled else MatrixFormat(True, weights.dtype).stored(dtype)
    return config.embedding_params * jnp.dtype(stored).itemsize
