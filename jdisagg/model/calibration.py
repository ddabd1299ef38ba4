"""Measures the accuracy loss of lower-precision matrices or KV pages on a sample text, layer by layer.

The exact f32 stream and the rounded stream pass through one layer at a time, so memory holds one layer whatever the
model's size. A matrix stays at full precision if rounding it alone changes what its layer adds to the residual stream
by more than `WORST_ERROR`. The loss is the KL divergence of the next-token distribution from the full model's, and the
share of positions with the same greedy token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jdisagg.core.model_config import AS_ACTIVATIONS, ModelConfig, WeightFormat
from jdisagg.model.experts import ExpertLayer
from jdisagg.model.names import LeafSpec, layer_leaves, stage_leaves
from jdisagg.model.network import Attend, Layer, OptionsOf, RMSNorm, Weight, dense_attend, scored, soft_capped
from jdisagg.model.params import dotted
from jdisagg.model.products import STORED, MatrixFormat, product, quantized
from jdisagg.model.rope import inverse_frequencies, rotations
from jdisagg.model.shards import shard_of_leaf
from jdisagg.model.sources import TensorSource
from pallas_kernels.quantized import quantize_rows

WORST_ERROR = 0.1  # relative change of what a layer adds to the residual stream, caused by one matrix
TEXT = (
    "The capital of France is Paris, a city on the river Seine. It has been a centre of finance, commerce, fashion and"
    " science since the seventeenth century. Question: how do plants make their food? Answer: by photosynthesis. Light"
    " is absorbed by chlorophyll in the leaves, water is taken up by the roots, and carbon dioxide enters through small"
    " openings. def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
)


@dataclass(frozen=True)
class AccuracyReport:
    """Loss of one weight format against the full model, on one text."""

    weights: WeightFormat
    kl: float  # nats per token
    agreement: float  # share of positions with the same greedy next token
    errors: dict[str, float]  # by matrix: relative change of its layer's output when rounded alone


def measure_loss(
    source: TensorSource, config: ModelConfig, dtype: str, tokens: Sequence[int], worst_error: float = WORST_ERROR
) -> AccuracyReport:
    """Measures the loss of weights in "bfloat16", "int8" or "fp8" on the default device. Raises what loading raises."""
    full = rounded = embedded(source, config, tokens)
    programs = dict[Any, LayerPrograms]()
    errors: dict[str, float] = {}
    for layer in range(config.num_layers):
        kind = config.window(layer), config.is_sparse(layer)
        if kind not in programs:
            programs[kind] = LayerPrograms(config, layer, _outline(config, layer, dtype), dtype)
        program = programs[kind]
        rules = program.outline.rules(config, layer)
        leaves = [jnp.asarray(shard_of_leaf(source, rule, 0, 1, np.float32)) for rule in rules]
        errors_found = program.errors(leaves, full) if WeightFormat(dtype).is_scaled else {}
        exact_paths = frozenset(path for path, error in errors_found.items() if not float(error) <= worst_error)
        full, rounded = program.run(leaves, full, None), program.run(leaves, rounded, exact_paths)
        errors |= {f"{layer}.{path}": float(error) for path, error in errors_found.items()}
    weights = WeightFormat(dtype, frozenset(path for path, error in errors.items() if not error <= worst_error))
    return AccuracyReport(weights, *_compared(*_logits(source, config, dtype, full, rounded)), errors)


def measure_kv_loss(
    source: TensorSource, config: ModelConfig, dtype: str, tokens: Sequence[int]
) -> tuple[float, float]:
    """Measures the loss of KV pages in "int8" or "float8_e4m3fn", with weights in f32. Returns (KL divergence in nats
    per token, greedy agreement)."""
    full = rounded = embedded(source, config, tokens)
    programs = dict[Any, tuple[LayerPrograms, LayerPrograms]]()
    for layer in range(config.num_layers):
        kind = config.window(layer), config.is_sparse(layer)
        if kind not in programs:
            outline = _outline(config, layer, AS_ACTIVATIONS)
            arguments = config, layer, outline, AS_ACTIVATIONS
            programs[kind] = LayerPrograms(*arguments), LayerPrograms(*arguments, partial(attend_to_rounded, dtype))
        exact_layer, rounded_layer = programs[kind]
        rules = exact_layer.outline.rules(config, layer)
        leaves = [jnp.asarray(shard_of_leaf(source, rule, 0, 1, np.float32)) for rule in rules]
        full = exact_layer.run(leaves, full, None)
        rounded = rounded_layer.run(leaves, rounded, None)
    return _compared(*_logits(source, config, "float32", full, rounded))


def attend_to_rounded(dtype: str, options_of: OptionsOf) -> Attend:
    """Returns `dense_attend` with keys and values rounded to `dtype` as in a KV page."""
    attend = dense_attend(options_of)

    def round_rows(rows: Array) -> Array:
        values, scales = quantize_rows(rows, jnp.dtype(dtype))
        return (values.astype(jnp.float32) * scales[..., None]).astype(rows.dtype)

    def rounded(layer: int, q: Any, k: Array, v: Array | None, sinks: Array | None = None) -> Array:
        assert v is not None, "latents are kept as they are"
        return attend(layer, q, round_rows(k), round_rows(v), sinks)

    return rounded


def embedded(source: TensorSource, config: ModelConfig, tokens: Sequence[int]) -> Array:
    """Returns the scaled embeddings of the tokens, f32[T, hidden]."""
    table = _leaf(source, config, range(1), "embed")
    return jnp.asarray(table[np.asarray(tokens)]) * np.float32(config.embedding_scale)


@dataclass(frozen=True)
class LayerTree:
    """The structure of one whole layer on one device: module graph, leaf paths and matrices to round."""

    graphdef: Any
    treedef: Any
    paths: list[str]
    matrices: frozenset[str]  # paths of the matrices to round

    def rules(self, config: ModelConfig, layer: int) -> list[LeafSpec]:
        table = layer_leaves(config, f"model.layers.{layer}")
        return [table[path] for path in self.paths]

    def merge(self, leaves: list[Array]) -> Layer:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def _outline(config: ModelConfig, number: int, dtype: str) -> LayerTree:
    layer = nnx.eval_shape(lambda: Layer(config, number, tp=1, axis=None, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(layer)
    flattened, treedef = jax.tree_util.tree_flatten_with_path(state)
    weights, paths = WeightFormat(dtype), [dotted(path) for path, _ in flattened]
    matrices = (path for path in _matrices(layer) if weights.of(f"{number}.{path}") == dtype)
    return LayerTree(graphdef, treedef, paths, frozenset(matrices))


def _matrices(layer: Layer) -> dict[str, Weight]:
    return {".".join(map(str, path)): each for path, each in nnx.iter_modules(layer) if isinstance(each, Weight)}


class LayerPrograms:
    """The compiled programs that all layers of one kind share."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        outline: LayerTree,
        dtype: str,
        attend_by: Callable[[OptionsOf], Attend] = dense_attend,
    ) -> None:
        self._config, self._layer, self.outline, self._dtype = config, layer, outline, dtype
        self._attend_by = attend_by
        self.run = jax.jit(self._run, static_argnums=2)
        self.errors = jax.jit(self._errors)

    def _run(self, leaves: list[Array], x: Array, exact_paths: frozenset[str] | None) -> Array:
        """Runs the layer over x [T, hidden] with all matrices rounded except those in `exact_paths`. None keeps every
        matrix exact, experts included."""
        config, layer = self._config, self.outline.merge(leaves)
        if exact_paths is not None:
            for path, weight in _matrices(layer).items():
                stays = path in exact_paths or path not in self.outline.matrices
                weight.become(MatrixFormat(False, AS_ACTIVATIONS if stays else self._dtype))
            if isinstance(layer.mlp, ExpertLayer):
                layer.mlp.become(MatrixFormat(False, WeightFormat(self._dtype).of_experts))
        factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
        local = config.window(self._layer) is not None and config.local_rope_theta is not None
        rotation = rotations(jnp.arange(x.shape[0]), inverse_frequencies(config, local=local), factor)
        return layer(x, rotation, 0, self._attend_by(lambda _: config.attention(self._layer)))

    def _errors(self, leaves: list[Array], x: Array) -> dict[str, Array]:
        """Returns for each matrix the relative change of what the layer adds to x when only that matrix is rounded."""
        matrices = self.outline.matrices
        exact = self._run(leaves, x, matrices)
        added = jnp.linalg.norm(exact - x)
        return {
            path: jnp.linalg.norm(self._run(leaves, x, matrices - {path}) - exact) / added for path in sorted(matrices)
        }


def _logits(source: TensorSource, config: ModelConfig, dtype: str, full: Array, rounded: Array) -> tuple[Array, Array]:
    """Returns the logits f32[T, V] of both streams; the rounded stream's head is rounded as in serving."""
    last = range(config.num_layers - 1, config.num_layers)
    norm, head = RMSNorm(config.hidden_size, config, jnp.float32), jnp.asarray(_leaf(source, config, last, "head"))
    norm.scale.set_value(jnp.asarray(_leaf(source, config, last, "norm.scale")))
    full, rounded = norm(full), norm(rounded)
    if WeightFormat(dtype).is_scaled:
        kernel, scale = quantized(head, dtype)
        rounded = product(rounded, kernel, scale[:, 0], MatrixFormat(True, dtype))
    else:
        rounded = scored(rounded, head.astype(STORED[dtype]))
    cap = config.final_soft_cap
    return soft_capped(scored(full, head), cap), soft_capped(rounded, cap)


def _leaf(source: TensorSource, config: ModelConfig, layers: range, path: str) -> np.ndarray:
    return shard_of_leaf(source, stage_leaves(config, layers, 1)[path], 0, 1, np.float32)


def _compared(full: Array, rounded: Array) -> tuple[float, float]:
    """Returns (KL divergence in nats per token, greedy agreement)."""
    ours, theirs = jax.nn.log_softmax(full), jax.nn.log_softmax(rounded)
    kl = jnp.mean(jnp.sum(jnp.exp(ours) * (ours - theirs), axis=-1))
    return float(kl), float(jnp.mean(jnp.argmax(full, axis=-1) == jnp.argmax(rounded, axis=-1)))
