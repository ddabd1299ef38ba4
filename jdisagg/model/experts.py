"""A mixture of experts (MoE) layer: each token is routed on the device to `per_token` gated MLPs.

The experts are spread over the shards. Each shard computes its own experts for all tokens, plus its part of the shared
MLP; one psum adds the results. Shapes depend only on the number of tokens, never on the routing, and a token's output
does not depend on other rows of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.errors import MissingTensor, WrongShape
from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.model.families import EXPERT_NAMES
from jdisagg.model.names import Index
from jdisagg.model.products import MatrixFormat
from jdisagg.model.sources import ScaledSource, StoredChannels, TensorSource
from pallas_kernels import grouped_product

Gate = Callable[[Array, Array], Array]  # (gate channels, up channels) -> input of the down projection
Routed = Callable[[Array], None]  # receives the experts of each token, i32[T, per_token]
ALPHA, LIMIT = 1.702, 7.0  # constants of gpt-oss' gate
MATRICES = ("gate_up", "down")
TINY = 1e-20  # added to the sum of a token's expert weights, which can be 0 with a sigmoid router


def route(experts: Experts, logits: Array, correction: Array | None = None) -> tuple[Array, Array]:
    """Returns the experts of each token i32[T, per_token] and their weights f32, from router logits f32[T, E]. Ties go
    to the lower expert index."""
    if experts.router == "chosen":
        values, chosen = jax.lax.top_k(logits, experts.per_token)
        return chosen, jax.nn.softmax(values, axis=-1)
    scores = jax.nn.sigmoid(logits) if experts.router == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    wanted = scores if correction is None else scores + correction[None, :]
    _, chosen = jax.lax.top_k(_within_groups(experts, wanted), experts.per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalised:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + TINY)
    return chosen, weights * experts.scale


def _within_groups(experts: Experts, wanted: Array) -> Array:
    """Returns f32[T, E] with -inf for experts outside the best groups (DeepSeek-V2, 2024, section 2.2.2)."""
    if experts.groups == 1:
        return wanted
    grouped = wanted.reshape(len(wanted), experts.groups, -1)
    best, _ = jax.lax.top_k(grouped, experts.group_top)
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), experts.kept_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(experts.groups)[None, None, :], axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(wanted.shape)


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """Computes gpt-oss' gate: clamped inputs, a steeper sigmoid, and 1 added to the up channels."""
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


class ExpertLayer(nnx.Module):
    """One shard's experts, with gate channels before up channels; every shard has the whole router.

    Matrices are created as [experts, in, out] in the activation dtype; `become` converts them to a platform's layout.
    `gate` is the activation of experts that are not clamped. `shared` is this shard's part of the shared MLP; it has no
    axis of its own because its partial sum is reduced with the experts'.
    """

    def __init__(
        self,
        config: ModelConfig,
        gate: Gate,
        shared: nnx.Module | None,
        *,
        tp: int,
        axis: str | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        assert config.experts is not None, config.family
        self.experts, self.axis, self.shared = config.experts, axis, shared
        held, hidden, width = self.experts.held(tp), config.hidden_size, self.experts.width
        self.form = MatrixFormat()
        self.gate = clamped_swiglu if self.experts.clamped else gate

        def normal(scale: float, *shape: int, dtype: DTypeLike = dtype) -> nnx.Param:
            return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))

        def zeros(there: bool, *shape: int, dtype: DTypeLike = dtype) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, dtype)) if there else None

        # The choice of experts is a step function, so the router stays in f32 whatever dtype the other weights have.
        self.router = normal(hidden**-0.5, self.experts.number, hidden, dtype=jnp.float32)
        self.router_bias = zeros(self.experts.router_bias, self.experts.number, dtype=jnp.float32)
        self.correction = zeros(self.experts.router == "sigmoid", self.experts.number, dtype=jnp.float32)
        self.gate_up = normal(hidden**-0.5, held, hidden, 2 * width)
        self.gate_up_bias = zeros(self.experts.bias, held, 2 * width)
        self.down = normal((2 * config.num_layers * width) ** -0.5, held, width, hidden)
        self.down_bias = zeros(self.experts.bias, held, hidden)

    def become(self, form: MatrixFormat) -> None:
        """Converts the matrices in place to another form, which must not be quantised."""
        assert self.form == MatrixFormat() and not form.is_scaled, (self.form, form)
        for name in MATRICES:
            matrices = getattr(self, name)[...]
            matrices = matrices.astype(form.stored(matrices.dtype))
            setattr(self, name, nnx.Param(matrices.swapaxes(1, 2) if form.out_first else matrices))
        self.form = form

    def __call__(self, x: Array, routed: Routed | None = None) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = route(self.experts, self._logits(rows), _value(self.correction))
        if routed is not None:
            routed(chosen)
        y = self._routed(rows, chosen, weights)
        if self.shared is not None:
            y = y + self.shared(rows)
        y = y if self.axis is None else jax.lax.psum(y, self.axis)
        return y.reshape(x.shape)

    def _logits(self, x: Array) -> Array:
        logits = jnp.matmul(x.astype(jnp.float32), self.router[...].T)
        return logits if self.router_bias is None else logits + self.router_bias[...][None, :]

    def _routed(self, x: Array, chosen: Array, weights: Array) -> Array:
        """Returns the weighted sum of this shard's experts for x [T, hidden]; experts of other shards add nothing."""
        held = self.gate_up[...].shape[0]
        first = 0 if self.axis is None else jax.lax.axis_index(self.axis) * held
        local = (chosen - first).reshape(-1)
        local = jnp.where((local >= 0) & (local < held), local, held)  # experts of other shards sort last
        order = jnp.argsort(local, stable=True)
        sizes = jnp.sum(local[:, None] == jnp.arange(held)[None, :], axis=0, dtype=jnp.int32)
        y = self._expert_rows(x[order // self.experts.per_token], sizes, local[order])
        y = y[jnp.argsort(order)].reshape(*chosen.shape, -1)
        weights = jnp.where(local.reshape(chosen.shape) < held, weights, 0)[:, :, None]
        return jnp.sum(y.astype(jnp.float32) * weights, axis=1).astype(x.dtype)

    def _expert_rows(self, x: Array, sizes: Array, group: Array) -> Array:
        """Runs the experts over x [T * per_token, hidden], sorted by expert. Rows for other shards' experts give zeros
        or a bias; the caller masks them."""
        product = partial(grouped_product, sizes=sizes, out_first=self.form.out_first)
        gate, up = jnp.split(_biased(product(x, self.gate_up[...]), self.gate_up_bias, group), 2, axis=1)
        return _biased(product(self.gate(gate, up), self.down[...]), self.down_bias, group)


def _biased(y: Array, bias: nnx.Param | None, group: Array) -> Array:
    return y if bias is None else y + bias[...].at[group].get(mode="clip")


def _value(param: nnx.Param | None) -> Array | None:
    return None if param is None else param[...]


# Checkpoints that store all experts of a layer in one tensor per matrix.
#
# transformers 5 computes with `mlp.experts.gate_up_proj` [experts, 2 * width, hidden], gate rows before up rows, and
# `mlp.experts.down_proj` [experts, hidden, width]. On saving it splits them per expert unless configured otherwise.

BLOCK = "mlp"  # transformers' name of the block for every family
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class FusedExperts:
    """A source that presents fused expert tensors as one tensor per expert."""

    def __init__(self, source: TensorSource, config: ModelConfig):
        assert config.experts is not None, config
        names = EXPERT_NAMES[config.family]
        gate, up, down = names.matrices
        number, width, hidden = config.experts.number, config.experts.width, config.hidden_size
        matrices = "|".join(names.matrices)
        self._source, self._block = source, f".{names.block}."
        self._expert = re.compile(rf"(model\.layers\.\d+)\.{names.block}\.experts\.(\d+)\.({matrices})\.weight")
        self._rows = {
            gate: (GATE_UP, range(width)),
            up: (GATE_UP, range(width, 2 * width)),
            down: (DOWN, range(hidden)),
        }
        self._whole = {GATE_UP: (number, 2 * width, hidden), DOWN: (number, hidden, width)}

    @property
    def place(self) -> str:
        return self._source.place

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor. For an expert's matrix, raises `MissingTensor` or `WrongShape` about the fused
        tensor."""
        stored, expert, rows = self._stored(name)
        found = self._source.shape(stored)
        if expert is None:
            return found
        wanted = self._whole[stored.rpartition(".")[2]]
        if found is None:
            raise MissingTensor(f"tensor {stored} is not in {self.place}")
        if found != wanted:
            raise WrongShape(f"tensor {stored} in {self.place} has shape {found}; the config asks for {wanted}")
        return len(rows), wanted[2]

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._stored(name)[0])

    def read(self, name: str, index: Index) -> np.ndarray:
        stored, expert, rows = self._stored(name)
        if expert is None:
            return self._source.read(stored, index)
        first, *others = index
        within = slice(rows.start + first.start, rows.start + first.stop)
        return self._source.read(stored, (slice(expert, expert + 1), within, *others))[0]

    def channels(self, name: str) -> StoredChannels | None:
        stored, expert, _ = self._stored(name)
        return self._source.channels(stored) if expert is None and isinstance(self._source, ScaledSource) else None

    def _stored(self, name: str) -> tuple[str, int | None, range]:
        """Returns (stored name, expert index, rows); the index is None for tensors that are not an expert's."""
        found = self._expert.fullmatch(name)
        if found is None:
            return name.replace(self._block, f".{BLOCK}."), None, range(0)
        tensor, rows = self._rows[found[3]]
        return f"{found[1]}.{BLOCK}.experts.{tensor}", int(found[2]), rows


def with_split_experts(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Returns a source with one tensor per expert, whichever way `source` stores them."""
    sparse = [layer for layer in range(config.num_layers) if config.is_sparse(layer)]
    if not sparse or EXPERT_NAMES[config.family].fused:
        return source
    names = (f"model.layers.{layer}.{BLOCK}.experts.{name}" for layer, name in product(sparse, (GATE_UP, DOWN)))
    return FusedExperts(source, config) if any(source.shape(name) is not None for name in names) else source
