"""The transformer as one Flax module tree, used for training, the reference forward pass and every device program.

A `Stage` is a run of consecutive layers, with the embedding if it has the first layer and the head if it has the last;
a whole model is a stage of all layers. Attention over the KV cache is passed in as `attend` (dense and causal below,
paged in `jdisagg/engine`). With tensor parallelism a `Stage` is the part of *one shard*: its heads, channels and
vocabulary rows, padded with zeros where needed; `axis` is the mesh axis of the reductions. Leading dimensions are free:
`x` is [..., hidden], so packed tokens [T] and batches [B, T] run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jdisagg.core.layout.tensor_cut import replicas_of
from jdisagg.core.model_config import AttentionOptions, ModelConfig, WeightFormat
from jdisagg.core.steps import Repeat
from jdisagg.model.experts import ExpertLayer, Routed
from jdisagg.model.latent_attention import LatentAttention, LatentQueries
from jdisagg.model.norms import RMSNorm, after, cut, halves, head_norm, in_turn, normed
from jdisagg.model.products import MatrixFormat, filled, product, quantized
from jdisagg.model.rope import RotaryTable, inverse_frequencies, rotate, rotations
from jdisagg.model.weight import Weight, begun, ended, over, summed
from jdisagg.parallel.compiler_flags import SENT_BESIDE_BYTES
from pallas_kernels.platforms import traced_platform

# Overlap of all-reduces with products in two column blocks, for steps with too few rows to split by rows.
#
# The time of such a step is that of reading its matrices, and two row halves would read them twice. With column blocks
# each matrix is read once: the first block's all-reduce overlaps the second block's product, and the second one's
# overlaps the part of the next matrix that multiplies the first block. The norm in between is applied after the
# product.

BLOCKS = 2  # more blocks would add the start-up time of a collective each
LANES = 128  # lanes of a tile: both blocks start at a tile boundary


def cuts(model: ModelConfig, shards: int, *weights: Weight) -> bool:
    """Returns True if a layer with these weights can be split by columns: a dense one with norms only before attention
    and MLP.

    A quantised product rounds whole rows, and adapter contributions are reduced as a whole, so both are excluded.
    """
    dense = model.experts is None and model.latent is None and model.norms == "before"
    plain = all(each.low_rank is None and not each.form.is_scaled and not each.form.out_first for each in weights)
    return shards > 1 and dense and plain and model.hidden_size % (BLOCKS * LANES) == 0


def pays(hidden_size: int, rows: int) -> bool:
    """Returns True if the all-reduce of a block of so many rows can overlap; very small ones finish before a product
    starts."""
    return rows * (hidden_size // BLOCKS) * 2 >= SENT_BESIDE_BYTES


def block(array: Array, number: int, axis: int) -> Array:
    """Returns one of the two blocks of an array. The start is hidden behind a barrier: as a constant it would be folded
    into a slice of a loop's matrix, which a TPU then copies out of its stack."""
    size = array.shape[axis] // BLOCKS
    start = jax.lax.optimization_barrier(jnp.int32(number * size))
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)


def summed_in_turn(
    weight: Weight,
    rows: Array,
    axis: str | None,
    use: Callable[[int, Array], Array | None] = lambda number, columns: None,
) -> list[Array]:
    """Returns both column blocks of a row-parallel product, reduced. `use` processes one block while the next is
    sent."""
    kernel, products, made = weight.kernel[...], list[Array](), list[Array]()
    for number in range(BLOCKS):
        products.append(
            _product(after(rows, products[-1] if products else None), block(kernel, number, 1)).astype(rows.dtype)
        )
    used: Array | None = products[-1]
    for number, part in enumerate(products):
        ready = after(part, made[-1] if made else None)  # keeps the compiler from joining both all-reduces
        total = after(ready if axis is None else jax.lax.psum(ready, axis), used)
        if weight.bias is not None:
            total = total + over(_columns(weight.bias[...], number), total)
        made.append(total)
        used = use(number, total)
    return made


class BlockedNorm:
    """A norm and the product after it, computed from column blocks as they arrive."""

    def __init__(self, norm: RMSNorm, weight: Weight) -> None:
        self.norm, self.weight = norm, weight
        self.sums: Array | float = 0.0  # f32[T, out], before the division by the row's root mean square
        self.squares: Array | float = 0.0  # f32[T, 1], sums of squares

    def add(self, number: int, x: Array) -> Array:
        """Adds the product of one column block."""
        rows = self.norm.scaled(x, _columns(self.norm.scale[...], number))
        self.sums = self.sums + _product(rows, block(self.weight.kernel[...], number, 0))
        self.squares = self.squares + jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return self.sums

    def whole(self, x: Array) -> Array:
        """Returns the normalised product; `x` gives the row length and the dtype."""
        y = (self.sums * self.norm.rate(jnp.asarray(self.squares) / x.shape[-1])).astype(x.dtype)
        return y if self.weight.bias is None else y + over(self.weight.bias[...], y)


def _columns(vector: Array, number: int) -> Array:
    size = vector.shape[0] // BLOCKS
    return vector[number * size : (number + 1) * size]


def _product(rows: Array, matrix: Array) -> Array:
    return jax.lax.dot_general(rows, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


# The LM head: the vocabulary may be cut over shards, and every shard gets the whole logits.
#
# Gathering the logits takes as long as the head's product. On accelerators each shard multiplies its rows in blocks,
# and the gather of one block overlaps the product of the next. The number of blocks does not depend on the number of
# batch rows, so a row's logits are the same in any batch.

# A CPU cannot overlap a gather. On a GPU each gather takes long to start.
HEAD_BLOCKS = {"gpu": 2, "tpu": 4}
LEAST_OUTPUTS = 1024  # fewest outputs of a block
Scores = Callable[[Array, slice], Array]  # (x [..., hidden], some of a shard's outputs) -> f32[..., outputs]


class VocabularyLayout(NamedTuple):
    """An even split of the vocabulary over mesh axes; rows beyond its end are padding."""

    axes: tuple[str, ...]
    shards: int

    def rows(self, vocab_size: int) -> int:
        """Returns the vocabulary rows of one shard."""
        return -(-vocab_size // self.shards)

    def whole(self, x: Array, outputs: int, scores: Scores) -> Array:
        """Returns f32[..., V] on every shard, from x [..., hidden]; `outputs` are one shard's rows."""
        if not self.axes or self.shards == 1:
            return scores(x, slice(None))
        blocks = blocks_of(outputs, traced_platform())
        if blocks == 1 or len(self.axes) > 1:  # a ring gathers in one collective
            y = scores(x, slice(None))
            return jax.lax.all_gather(y, self.axes, axis=y.ndim - 1, tiled=True)
        gathered = self._in_turn(x, slices(outputs, blocks), scores)
        return jnp.moveaxis(jnp.concatenate(gathered, axis=-1), 0, -2).reshape(*x.shape[:-1], -1)

    def _in_turn(self, x: Array, parts: list[slice], scores: Scores) -> list[Array]:
        """Returns each block gathered [shards, ..., outputs]; the gather of one overlaps the product of the next."""
        made, gathered = list[Array](), list[Array]()
        for part in parts:
            made.append(scores(after(x, made[-1] if made else None), part))
        for each in made:
            ready = after(each, gathered[-1] if gathered else None)  # keeps the compiler from joining the gathers
            gathered.append(jax.lax.all_gather(ready, self.axes))
        return gathered


def blocks_of(outputs: int, platform: str | None) -> int:
    """Returns the number of blocks in which a shard's outputs are multiplied and gathered."""
    most = HEAD_BLOCKS.get(platform or "cpu", 1)
    return most if outputs >= most * LEAST_OUTPUTS else 1


def slices(outputs: int, blocks: int) -> list[slice]:
    """Returns the blocks of `outputs`; the last may be shorter."""
    size = -(-outputs // (blocks * LANES)) * LANES
    return [slice(start, min(start + size, outputs)) for start in range(0, outputs, size)]


def soft_capped(logits: Array, cap: float | None) -> Array:
    """Returns logits soft-capped to (-cap, cap) (Gemma 2, section 2)."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def scored(x: Array, table: Array) -> Array:
    """Returns f32[..., V] from x [..., hidden] and a table [V, hidden].

    A few rows are computed as table times x transposed: otherwise XLA's CPU backend transposes the whole table at every
    call (1.3 of 25 CPU milliseconds of a decode step of 8 rows, V 8192). The barriers keep it from undoing that.
    """
    x = x.astype(table.dtype)
    if x.ndim != 2:
        return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=jnp.float32)
    if x.shape[0] == 1 and table.dtype != jnp.float32:
        return scored(jnp.concatenate([x, x]), table)[:1]  # see `products.py`
    rows = jax.lax.optimization_barrier(filled(x).T if x.shape[0] > 1 else x.T)
    scores = jax.lax.optimization_barrier(jnp.matmul(table, rows, preferred_element_type=jnp.float32))
    return scores.T[: x.shape[0]]


# (layer within the stage, q [..., Hq, D], k [..., Hkv, D], v [..., Hkv, D], sinks [Hq] or None) -> [..., Hq, D];
# with latents: (layer, queries, row [..., 1, R + rotated], None, None) -> [..., Hq, V]
Attend = Callable[[int, Array | LatentQueries, Array, Array | None, Array | None], Array]
OptionsOf = Callable[[int], AttentionOptions]  # by layer within the stage
CallLayer = Callable[["Layer", Array, RotaryTable, int], Array]  # (layer, x, rotation, index in the stage) -> x
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class Attention(nnx.Module):
    """Grouped-query attention; one fused matrix computes this shard's q heads, then k, then v."""

    def __init__(self, config: ModelConfig, *, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs):
        q_width, kv_width = config.q_cut.width(tp), config.kv_cut.width(tp)
        self.heads, self.kv_heads = q_width // config.head_dim, kv_width // config.head_dim
        self.head_dim, self.axis = config.head_dim, axis
        width = q_width + 2 * kv_width
        scale = config.hidden_size**-0.5
        self.qkv = Weight(config.hidden_size, width, bias=config.qkv_bias, scale=scale, dtype=dtype, rngs=rngs)
        out_scale = (2 * config.num_layers * config.q_size) ** -0.5
        self.out = Weight(q_width, config.hidden_size, bias=config.o_bias, scale=out_scale, dtype=dtype, rngs=rngs)
        copies = replicas_of(config.num_kv_heads, tp)
        self.q_norm = head_norm(config, self.heads, config.num_heads, 1, axis, dtype)
        self.k_norm = head_norm(config, self.kv_heads, config.num_kv_heads, copies, axis, dtype)
        self.sinks = nnx.Param(jnp.zeros((self.heads,), dtype)) if config.sinks else None
        self.looped = False

    def __call__(self, x: Array, rotation: RotaryTable, layer: int, attend: Attend) -> Array:
        return summed(self.out, self.mixed(self.qkv(x), rotation, layer, attend), self.axis)

    def mixed(self, rows: Array, rotation: RotaryTable, layer: int, attend: Attend) -> Array:
        """Returns the attention output [..., this shard's heads] from fused [..., q, k and v], before the output
        projection."""
        if self.looped:  # otherwise a TPU splits heads within the product and transposes the stacked matrix for it
            rows = jax.lax.optimization_barrier(rows)
        heads = rows.reshape(*rows.shape[:-1], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = jnp.split(heads, [self.heads, self.heads + self.kv_heads], axis=-2)
        q, k = rotate(normed(self.q_norm, q), rotation), rotate(normed(self.k_norm, k), rotation)
        mixed = attend(layer, q, k, v, None if self.sinks is None else self.sinks[...])
        return mixed.reshape(*rows.shape[:-1], self.heads * self.head_dim)


class MLP(nnx.Module):
    """A gated MLP (Shazeer 2020); one fused matrix computes this shard's gate channels, then its up channels."""

    def __init__(self, config: ModelConfig, *, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs):
        width, bias, self.axis = config.mlp_cut.width(tp), config.mlp_bias, axis
        self.activation = config.activation
        scale = config.hidden_size**-0.5
        self.gate_up = Weight(config.hidden_size, 2 * width, bias=bias, scale=scale, dtype=dtype, rngs=rngs)
        down_scale = (2 * config.num_layers * config.intermediate_size) ** -0.5
        self.down = Weight(width, config.hidden_size, bias=bias, scale=down_scale, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return summed(self.down, self.inner(x), self.axis)

    def inner(self, x: Array) -> Array:
        return self.gated(self.gate_up(x))

    def gated(self, both: Array) -> Array:
        """Applies the gate to fused gate and up channels."""
        gate, up = jnp.split(both, 2, axis=-1)
        return ACTIVATIONS[self.activation](gate) * up


def expert_mlp(config: ModelConfig, *, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs) -> ExpertLayer:
    """Builds the experts of a sparse layer, with the shared MLP if the model has one."""
    assert config.experts is not None, config.family
    activation, shared = ACTIVATIONS[config.activation], None
    if config.experts.shared_width:
        alike = replace(config, intermediate_size=config.experts.shared_width, mlp_bias=False)
        shared = MLP(alike, tp=tp, axis=None, dtype=dtype, rngs=rngs)
    return ExpertLayer(config, lambda gate, up: activation(gate) * up, shared, tp=tp, axis=axis, dtype=dtype, rngs=rngs)


class Layer(nnx.Module):
    """Attention and an MLP or experts with residual connections, and norms before, after or around them."""

    def __init__(
        self, config: ModelConfig, number: int, *, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        def norm(place: str) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config, dtype) if config.norms in (place, "both") else None

        self.attention_norm, self.attention_out_norm = norm("before"), norm("after")
        attention = LatentAttention if config.latent else Attention
        self.attention = attention(config, tp=tp, axis=axis, dtype=dtype, rngs=rngs)
        self.mlp_norm, self.mlp_out_norm = norm("before"), norm("after")
        mlp = expert_mlp if config.is_sparse(number) else MLP
        self.mlp = mlp(config, tp=tp, axis=axis, dtype=dtype, rngs=rngs)
        self.config, self.tp = config, tp

    def __call__(
        self, x: Array, rotation: RotaryTable, layer: int, attend: Attend, routed: Routed | None = None
    ) -> Array:
        cut = self._cut(x.shape[0]) if x.ndim == 2 else None
        if cut is not None:
            return cut(x, rotation, layer, attend)
        mixed = self.attention(normed(self.attention_norm, x), rotation, layer, attend)
        x = x + normed(self.attention_out_norm, mixed)
        inside = normed(self.mlp_norm, x)
        made = self.mlp(inside, routed) if isinstance(self.mlp, ExpertLayer) else self.mlp(inside)
        return x + normed(self.mlp_out_norm, made)

    def parts(self, rows: int) -> int:
        """Returns into how many parts each all-reduce of the layer is split."""
        return 1 if self._cut(rows) is None else 2

    def _cut(self, rows: int) -> Callable[[Array, RotaryTable, int, Attend], Array] | None:
        out = self.attention.out
        if halves(self.config, rows, self.tp, out_first=out.form.out_first, adapted=out.low_rank is not None) == 2:
            return self._in_halves
        return self._in_columns if self.cuts_columns and pays(self.config.hidden_size, rows) else None

    @property
    def cuts_columns(self) -> bool:
        """True if the layer splits by columns. It requires looped layers, hence TPUs; collectives on a GPU start too
        slowly."""
        attention, mlp = self.attention, self.mlp
        if not (isinstance(attention, Attention) and isinstance(mlp, MLP) and attention.looped):
            return False
        return cuts(self.config, self.tp, attention.out, mlp.gate_up, mlp.down)

    def _in_columns(self, x: Array, rotation: RotaryTable, layer: int, attend: Attend) -> Array:
        attention, mlp, norm = self.attention, self.mlp, self.mlp_norm
        assert isinstance(attention, Attention) and isinstance(mlp, MLP) and norm is not None, "others are not cut"
        mixed = attention.mixed(attention.qkv(normed(self.attention_norm, x)), rotation, layer, attend)
        inside, gate_up = list[Array](), BlockedNorm(norm, mlp.gate_up)

        def add(number: int, more: Array) -> Array:
            inside.append(block(x, number, 1) + more)
            return gate_up.add(number, inside[-1])

        summed_in_turn(attention.out, mixed, attention.axis, add)
        made = summed_in_turn(mlp.down, mlp.gated(gate_up.whole(x)), attention.axis)
        return jnp.concatenate([y + each for y, each in zip(inside, made, strict=True)], axis=-1)

    def _in_halves(self, x: Array, rotation: RotaryTable, layer: int, attend: Attend) -> Array:
        attention, mlp, axis, last = self.attention, self.mlp, self.attention.axis, None
        assert isinstance(attention, Attention) and isinstance(mlp, MLP), "others are not cut"
        parts, rows = cut(x), list[Array]()
        for part in parts:
            rows.append(last := attention.qkv(after(normed(self.attention_norm, part), last)))
        halves_mixed = cut(attention.mixed(jnp.concatenate(rows), rotation, layer, attend))
        mixed = in_turn(
            halves_mixed,
            partial(begun, attention.out, axis=axis),
            partial(ended, attention.out, axis=axis, dtype=x.dtype),
        )
        inside = [part + normed(self.attention_out_norm, each) for part, each in zip(parts, mixed, strict=True)]
        made = in_turn(
            inside,
            lambda y: begun(mlp.down, mlp.inner(normed(self.mlp_norm, y)), axis),
            partial(ended, mlp.down, axis=axis, dtype=x.dtype),
        )
        return jnp.concatenate([y + normed(self.mlp_out_norm, each) for y, each in zip(inside, made, strict=True)])


class Stage(nnx.Module):
    """The layers `layers.start` to `layers.stop` of one shard of `tp`, or the layers of one ring stage.

    The embedding [V, hidden] is whole on every shard; the head [V / tp, hidden] is cut if the shards divide the
    vocabulary. Tied weights are one leaf only if one shard holds both ends of the model; otherwise the head is a second
    leaf. In a ring both ends are spread over all shards, and tied they are one leaf.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[int],
        *,
        tp: int = 1,
        axis: str | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        spread: VocabularyLayout | None = None,
        repeat: Repeat | None = None,
    ):
        """Builds the stage.

        `layers` is a run of layers, or with `spread` the layers of a ring stage. With `repeat`, a loop within that run,
        the stage is compact: its loop layers hold weights that are stacked by iteration after loading.
        """
        first, last = spread is not None or layers[0] == 0, spread is not None or layers[-1] == config.num_layers - 1
        layers = layers if repeat is None else repeat.compact(layers)
        self.config, self.numbers, self.spread, self.repeat = config, tuple(layers), spread, repeat
        shards = tp if config.vocab_size % tp == 0 else 1
        self.head_cut = spread or VocabularyLayout(() if axis is None else (axis,), shards)
        has_head = last and not (config.tie_embeddings and first and (spread is not None or shards == 1))

        def table(shape: tuple[int, int]) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        rows = config.vocab_size if spread is None else spread.rows(config.vocab_size)
        self.embed = table((rows, config.hidden_size)) if first else None
        self.layers = nnx.List([Layer(config, each, tp=tp, axis=axis, dtype=dtype, rngs=rngs) for each in layers])
        for layer in self.layers:
            layer.attention.looped = repeat is not None
        self.norm = RMSNorm(config.hidden_size, config, dtype) if last else None
        self.head = table((self.head_cut.rows(config.vocab_size), config.hidden_size)) if has_head else None
        self.head_scale: nnx.Param | None = nnx.data(None)  # f32[V / tp], for int8 and fp8
        self.dtype, self.head_form = dtype, MatrixFormat(True)

    def become(self, weights: WeightFormat, out_first: bool) -> None:
        """Converts the matrices in place to a platform's form; each matrix at most once. Tables are both looked up and
        multiplied. bf16 serves both; a quantised head is a leaf of its own beside the embedding."""
        for path, weight in self.matrices().items():
            weight.become(MatrixFormat(out_first, weights.of(path)))
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertLayer):
                layer.mlp.become(MatrixFormat(out_first, weights.of_experts))
        head = self.embed if self.head is None else self.head
        self.head_form = MatrixFormat(True, weights.of("head"))
        if self.head_form.is_scaled and self.norm is not None and head is not None:
            rows, scale = quantized(head[...], self.head_form.dtype)
            self.head, self.head_scale = nnx.data(nnx.Param(rows)), nnx.Param(scale[:, 0])
        if not weights.is_scaled:
            self.embed, self.head = (self._table(each, weights) for each in (self.embed, self.head))

    def _table(self, table: nnx.Param | None, weights: WeightFormat) -> nnx.Param | None:
        return (
            None
            if table is None
            else nnx.Param(table[...].astype(MatrixFormat(True, weights.dtype).stored(self.dtype)))
        )

    def matrices(self) -> dict[str, Weight]:
        """Returns matrices by layer of the model and path, such as "11.attention.qkv"."""
        return {
            ".".join(map(str, (self.numbers[index], *path))): module
            for index, layer in enumerate(self.layers)
            for path, module in nnx.iter_modules(layer)
            if isinstance(module, Weight)
        }

    def attention(self, layer: int) -> AttentionOptions:
        return self.config.attention(self.numbers[layer])

    def embed_tokens(self, tokens: Array) -> Array:
        """Returns embeddings [..., hidden] of tokens i32[...]."""
        assert self.embed is not None, "only the first stage embeds"
        x = self._embedded(tokens).astype(self.dtype)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def _embedded(self, tokens: Array) -> Array:
        """Looks tokens up in the table. If it is spread, the shard with the row provides it and others add zeros."""
        assert self.embed is not None
        table = self.embed[...]
        if self.spread is None:
            return table[tokens]
        row = tokens - jax.lax.axis_index(self.spread.axes) * table.shape[0]
        here = (row >= 0) & (row < table.shape[0])
        rows = table[jnp.where(here, row, 0)]
        return jax.lax.psum(jnp.where(here[..., None], rows, jnp.zeros_like(rows)), self.spread.axes)

    def run_layers(self, x: Array, positions: Array, call: CallLayer, held: Array | None = None) -> Array:
        """Runs the layers over x [..., hidden] at `positions` i32[...]. `call` runs one layer, as `attending` does.
        `held` is bool[layers] for a ring: False for layers that are padding."""
        assert self.repeat is None, "a loop's layers are stacked: `engine/layer_group.py` runs them"
        rotation_of = self.rotations(positions)
        for index, layer in enumerate(self.layers):
            y = call(layer, x, rotation_of(index), index)
            x = y if held is None else jnp.where(held[index], y, x)
        return x

    def rotations(self, positions: Array) -> Callable[[int], RotaryTable]:
        """Returns a function from layer index in the stage to the rotation for `positions` i32[...]."""
        config = self.config
        factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
        full = local = rotations(positions, inverse_frequencies(config), factor)
        if config.local_rope_theta is not None:
            local = rotations(positions, inverse_frequencies(config, local=True))
        return lambda index: full if config.window(self.numbers[index]) is None else local

    def states(self, x: Array) -> Array:
        """Returns the normalised states [..., hidden] that the head takes."""
        assert self.norm is not None, "only the last stage has a head"
        return self.norm(x)

    def logits(self, x: Array) -> Array:
        """Returns f32[..., V], whole on every shard, from x [..., hidden]."""
        return self.scores(self.states(x))

    def scores(self, x: Array) -> Array:
        """Returns f32[..., V], whole on every shard, from normalised states [..., hidden]."""
        table = self.embed if self.head is None else self.head
        assert table is not None
        head, scale = table[...], None if self.head_scale is None else self.head_scale[...]

        def scores(x: Array, part: slice) -> Array:
            if scale is None:
                return scored(x, head[part])
            return product(x.astype(jnp.float32), head[part], scale[part], self.head_form)

        y = self.head_cut.whole(x, head.shape[0], scores)
        y = y if y.shape[-1] == self.config.vocab_size else y[..., : self.config.vocab_size]
        return soft_capped(y, self.config.final_soft_cap)


def dense_attend(options_of: OptionsOf) -> Attend:
    """Returns plain causal attention over the given tokens: q [..., T, Hq, D], no cache."""

    def attend(layer: int, q: Array | LatentQueries, k: Array, v: Array | None, sinks: Array | None = None) -> Array:
        if isinstance(q, LatentQueries):
            (k, v), q = q.expanded(k[..., 0, :]), q.whole
        assert v is not None
        options, length, groups = options_of(layer), q.shape[-3], q.shape[-2] // k.shape[-2]
        k, v = jnp.repeat(k, groups, axis=-2), jnp.repeat(v, groups, axis=-2)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=jnp.float32) * options.scale
        scores = soft_capped(scores, options.soft_cap)
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
        seen = (distance >= 0) & (distance < (length if options.window is None else options.window))
        scores = jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf)
        if sinks is not None:
            shape = (*scores.shape[:-1], 1)
            sink = jnp.broadcast_to(jnp.expand_dims(sinks.astype(jnp.float32)[:, None, None], _lead(shape)), shape)
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        return jnp.einsum("...hqk,...khd->...qhd", weights.astype(v.dtype), v)

    return attend


def _lead(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes before [H, Q, K]."""
    return tuple(range(len(shape) - 3))


def attending(attend: Attend) -> CallLayer:
    return lambda layer, x, rotation, index: layer(x, rotation, index, attend)


def forward(model: Stage, tokens: Array) -> Array:
    """Runs the whole model: i32[B, T] -> f32[B, T, V]. Tests compare every served token with this reference."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    call = attending(dense_attend(model.attention))
    return model.logits(model.run_layers(model.embed_tokens(tokens), positions, call))
