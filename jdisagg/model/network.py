"""The network: one Flax module tree for training, for the full forward, and for every device program.

A `Stage` is a run of consecutive layers, with the embedding if it holds the first and the head if it holds the last;
the whole model is the stage of all layers. What attention reads is not the network's business: `attend` is passed in
(dense and causal here below, paged in `jdisagg/engine`). Under tensor parallelism a `Stage` is what *one shard* sees:
its matrices hold that shard's heads, channels and vocabulary, some of them perhaps zeros that fill it up, and `axis`
names the mesh axis that sums them.
Leading dimensions are free: `x` is [..., hidden], so packed tokens [T] and batches [B, T] run the same code.
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
from jdisagg.model.experts import ExpertMLP, Routed
from jdisagg.model.latent_attention import LatentAttention, LatentQueries
from jdisagg.model.norms import RMSNorm, after, cut, halves, head_norm, in_turn, normed
from jdisagg.model.products import MatrixForm, filled, product, quantized
from jdisagg.model.rope import Rotation, inverse_frequencies, rotate, rotations
from jdisagg.model.weight import Weight, begun, ended, over, summed
from jdisagg.parallel.compiler_flags import SENT_BESIDE_BYTES
from pallas_kernels.platforms import traced_platform

# Sums over the shards in two blocks of columns, one sent while the other is multiplied: for rows too few for
# halves.
#
# A step of few rows takes as long as its matrices take to be read, and halves of its rows would read them twice.
# Cut by columns each matrix is read once: the first block's sum goes on beside the product of the second, and the
# second one's beside that part of the next matrix which multiplies the first. A norm between them is divided out
# behind the product.

BLOCKS = 2  # more would each take the time that a collective takes to start
LANES = 128  # of a tile: both blocks begin at one


def cuts(model: ModelConfig, shards: int, *weights: Weight) -> bool:
    """Whether a layer with these is cut so: a dense one, whose norms are before attention and MLP alone.

    A scaled product rounds whole rows, and what adapters add is summed as a whole.
    """
    dense = model.experts is None and model.latent is None and model.norms == "before"
    plain = all(each.low_rank is None and not each.form.is_scaled and not each.form.out_first for each in weights)
    return shards > 1 and dense and plain and model.hidden_size % (BLOCKS * LANES) == 0


def pays(hidden_size: int, rows: int) -> bool:
    """Whether a block of so many rows is sent beside products: the least are summed before one has begun."""
    return rows * (hidden_size // BLOCKS) * 2 >= SENT_BESIDE_BYTES


def block(array: Array, number: int, axis: int) -> Array:
    """One of both, read where it lies.

    A start told as a number would be folded into a slice of a loop's matrix, which a TPU then copies out of its stack.
    """
    size = array.shape[axis] // BLOCKS
    start = jax.lax.optimization_barrier(jnp.int32(number * size))
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis)


def summed_in_turn(
    weight: Weight,
    rows: Array,
    axis: str | None,
    use: Callable[[int, Array], Array | None] = lambda number, block: None,
) -> list[Array]:
    """Both blocks of a row-sharded product's columns, summed. use: what is done with one while the next is sent."""
    kernel, begun, made = weight.kernel[...], list[Array](), list[Array]()
    for number in range(BLOCKS):
        begun.append(_product(after(rows, begun[-1] if begun else None), block(kernel, number, 1)).astype(rows.dtype))
    used: Array | None = begun[-1]
    for number, part in enumerate(begun):
        ready = after(part, made[-1] if made else None)  # or the compiler would join both sums
        total = after(ready if axis is None else jax.lax.psum(ready, axis), used)
        if weight.bias is not None:
            total = total + over(_columns(weight.bias[...], number), total)
        made.append(total)
        used = use(number, total)
    return made


class NormedProduct:
    """A norm and a product with what it makes, of rows that come block by block."""

    def __init__(self, norm: RMSNorm, weight: Weight) -> None:
        self.norm, self.weight = norm, weight
        self.sums: Array | float = 0.0  # f32[T, out], of rows that are not divided by their size yet
        self.squares: Array | float = 0.0  # f32[T, 1]

    def add(self, number: int, x: Array) -> Array:
        """Multiplies a block."""
        rows = self.norm.scaled(x, _columns(self.norm.scale[...], number))
        self.sums = self.sums + _product(rows, block(self.weight.kernel[...], number, 0))
        self.squares = self.squares + jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        return self.sums

    def whole(self, x: Array) -> Array:
        """Of rows as long as those of `x`, in its dtype."""
        y = (self.sums * self.norm.rate(jnp.asarray(self.squares) / x.shape[-1])).astype(x.dtype)
        return y if self.weight.bias is None else y + over(self.weight.bias[...], y)


def _columns(vector: Array, number: int) -> Array:
    size = vector.shape[0] // BLOCKS
    return vector[number * size : (number + 1) * size]


def _product(rows: Array, matrix: Array) -> Array:
    return jax.lax.dot_general(rows, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


# The head: logits of a vocabulary that may be cut over shards, whole on every one of them.
#
# A step's logits take as long to gather as the head takes to be multiplied. On accelerators each shard multiplies
# its table in blocks, and one block is gathered beside the next one's product. How many they are does not depend
# on the rows, so that those of a row are the same in any company.

# A CPU gathers nothing by itself. On GPUs each gather takes long to start.
HEAD_BLOCKS = {"gpu": 2, "tpu": 4}
LEAST_OUTPUTS = 1024  # of a block
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
    most = HEAD_BLOCKS.get(platform or "cpu", 1)
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


# (layer within the stage, q [..., Hq, D], k [..., Hkv, D], v [..., Hkv, D], sinks [Hq] or None) -> [..., Hq, D];
# of latents (layer, queries, row [..., 1, R + rotated], None, None) -> [..., Hq, V]
Attend = Callable[[int, Array | LatentQueries, Array, Array | None, Array | None], Array]
OptionsOf = Callable[[int], AttentionOptions]  # by layer within the stage
CallLayer = Callable[["Layer", Array, Rotation, int], Array]  # (layer, x, rotation, its place in the stage) -> x
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class Attention(nnx.Module):
    """Grouped-query attention; q, k and v come from one fused matrix, this shard's q heads first, then k, then v."""

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

    def __call__(self, x: Array, rotation: Rotation, layer: int, attend: Attend) -> Array:
        return summed(self.out, self.mixed(self.qkv(x), rotation, layer, attend), self.axis)

    def mixed(self, rows: Array, rotation: Rotation, layer: int, attend: Attend) -> Array:
        """[..., q, k and v] -> [..., this shard's heads], before the product that joins them."""
        if self.looped:  # else a TPU splits the heads within the product, and turns the stacked matrix round for it
            rows = jax.lax.optimization_barrier(rows)
        heads = rows.reshape(*rows.shape[:-1], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = jnp.split(heads, [self.heads, self.heads + self.kv_heads], axis=-2)
        q, k = rotate(normed(self.q_norm, q), rotation), rotate(normed(self.k_norm, k), rotation)
        mixed = attend(layer, q, k, v, None if self.sinks is None else self.sinks[...])
        return mixed.reshape(*rows.shape[:-1], self.heads * self.head_dim)


class MLP(nnx.Module):
    """A gated MLP (Shazeer 2020); gate and up come from one fused matrix, this shard's gate channels first."""

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
        """[..., hidden] -> [..., this shard's channels]."""
        return self.gated(self.gate_up(x))

    def gated(self, both: Array) -> Array:
        """Of the gate's channels, and the others."""
        gate, up = jnp.split(both, 2, axis=-1)
        return ACTIVATIONS[self.activation](gate) * up


def expert_mlp(config: ModelConfig, *, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs) -> ExpertMLP:
    """What a sparse layer has in place of an MLP: experts, and the MLP that all tokens share where there is one."""
    assert config.experts is not None, config.family
    activation, shared = ACTIVATIONS[config.activation], None
    if config.experts.shared_width:
        alike = replace(config, intermediate_size=config.experts.shared_width, mlp_bias=False)
        shared = MLP(alike, tp=tp, axis=None, dtype=dtype, rngs=rngs)
    return ExpertMLP(config, lambda gate, up: activation(gate) * up, shared, tp=tp, axis=axis, dtype=dtype, rngs=rngs)


class Layer(nnx.Module):
    """Attention and an MLP or experts, each added to what it was given, with norms before, after or around them."""

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

    def __call__(self, x: Array, rotation: Rotation, layer: int, attend: Attend, routed: Routed | None = None) -> Array:
        cut = self._cut(x.shape[0]) if x.ndim == 2 else None
        if cut is not None:
            return cut(x, rotation, layer, attend)
        mixed = self.attention(normed(self.attention_norm, x), rotation, layer, attend)
        x = x + normed(self.attention_out_norm, mixed)
        inside = normed(self.mlp_norm, x)
        made = self.mlp(inside, routed) if isinstance(self.mlp, ExpertMLP) else self.mlp(inside)
        return x + normed(self.mlp_out_norm, made)

    def parts(self, rows: int) -> int:
        """That each of its sums over the shards is made in."""
        return 1 if self._cut(rows) is None else 2

    def _cut(self, rows: int) -> Callable[[Array, Rotation, int, Attend], Array] | None:
        out = self.attention.out
        if halves(self.config, rows, self.tp, out_first=out.form.out_first, adapted=out.low_rank is not None) == 2:
            return self._in_halves
        return self._in_columns if self.cuts_columns and pays(self.config.hidden_size, rows) else None

    @property
    def cuts_columns(self) -> bool:
        """Where layers go round in a loop, which is on TPUs: a GPU's collectives take too long to start for it."""
        attention, mlp = self.attention, self.mlp
        if not (isinstance(attention, Attention) and isinstance(mlp, MLP) and attention.looped):
            return False
        return cuts(self.config, self.tp, attention.out, mlp.gate_up, mlp.down)

    def _in_columns(self, x: Array, rotation: Rotation, layer: int, attend: Attend) -> Array:
        attention, mlp, norm = self.attention, self.mlp, self.mlp_norm
        assert isinstance(attention, Attention) and isinstance(mlp, MLP) and norm is not None, "others are not cut"
        mixed = attention.mixed(attention.qkv(normed(self.attention_norm, x)), rotation, layer, attend)
        inside, gate_up = list[Array](), NormedProduct(norm, mlp.gate_up)

        def add(number: int, more: Array) -> Array:
            inside.append(block(x, number, 1) + more)
            return gate_up.add(number, inside[-1])

        summed_in_turn(attention.out, mixed, attention.axis, add)
        made = summed_in_turn(mlp.down, mlp.gated(gate_up.whole(x)), attention.axis)
        return jnp.concatenate([y + each for y, each in zip(inside, made, strict=True)], axis=-1)

    def _in_halves(self, x: Array, rotation: Rotation, layer: int, attend: Attend) -> Array:
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
    """Layers `layers.start` to `layers.stop` as one shard of `tp` sees them; or those at the places of a ring's stage.

    The embedding [V, hidden] is whole on every shard; the head [V / tp, hidden] is split where the vocabulary divides.
    Tied weights are one leaf only where one shard holds both ends of the model; elsewhere the head is a second leaf.
    A ring has both ends spread over all its shards, and tied they are one leaf.
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
        spread: Vocabulary | None = None,
        repeat: Repeat | None = None,
    ):
        """`layers`: a run of them, or with `spread`, of a ring, one for each place. repeat: within that run; then the
        stage is compact, and holds what is stacked over the turns of the loop once it is loaded."""
        first, last = spread is not None or layers[0] == 0, spread is not None or layers[-1] == config.num_layers - 1
        layers = layers if repeat is None else repeat.compact(layers)
        self.config, self.numbers, self.spread, self.repeat = config, tuple(layers), spread, repeat
        shards = tp if config.vocab_size % tp == 0 else 1
        self.head_cut = spread or Vocabulary(() if axis is None else (axis,), shards)
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
        self.head_scale: nnx.Param | None = nnx.data(None)  # f32[V / tp], of int8 and fp8
        self.dtype, self.head_form = dtype, MatrixForm(True)

    def become(self, weights: WeightFormat, out_first: bool) -> None:
        """The same stage with its matrices in a machine's form, each at most once.

        Tables are looked up and multiplied: bf16 holds both, a scaled head is a leaf of its own beside the embedding.
        """
        for path, weight in self.matrices().items():
            weight.become(MatrixForm(out_first, weights.of(path)))
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertMLP):
                layer.mlp.become(MatrixForm(out_first, weights.of_experts))
        head = self.embed if self.head is None else self.head
        self.head_form = MatrixForm(True, weights.of("head"))
        if self.head_form.is_scaled and self.norm is not None and head is not None:
            rows, scale = quantized(head[...], self.head_form.dtype)
            self.head, self.head_scale = nnx.data(nnx.Param(rows)), nnx.Param(scale[:, 0])
        if not weights.is_scaled:
            self.embed, self.head = (self._table(each, weights) for each in (self.embed, self.head))

    def _table(self, table: nnx.Param | None, weights: WeightFormat) -> nnx.Param | None:
        return (
            None if table is None else nnx.Param(table[...].astype(MatrixForm(True, weights.dtype).stored(self.dtype)))
        )

    def matrices(self) -> dict[str, Weight]:
        """By layer of the model and place in it, as "11.attention.qkv"."""
        return {
            ".".join(map(str, (self.numbers[index], *path))): module
            for index, layer in enumerate(self.layers)
            for path, module in nnx.iter_modules(layer)
            if isinstance(module, Weight)
        }

    def attention(self, layer: int) -> AttentionOptions:
        """How a layer attends, by its place in the stage."""
        return self.config.attention(self.numbers[layer])

    def embed_tokens(self, tokens: Array) -> Array:
        """i32[...] -> [..., hidden]."""
        assert self.embed is not None, "only the first stage embeds"
        x = self._embedded(tokens).astype(self.dtype)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def _embedded(self, tokens: Array) -> Array:
        """Rows of the table: of one that is spread, each from the shard that has it; all others give zeros."""
        assert self.embed is not None
        table = self.embed[...]
        if self.spread is None:
            return table[tokens]
        row = tokens - jax.lax.axis_index(self.spread.axes) * table.shape[0]
        here = (row >= 0) & (row < table.shape[0])
        rows = table[jnp.where(here, row, 0)]
        return jax.lax.psum(jnp.where(here[..., None], rows, jnp.zeros_like(rows)), self.spread.axes)

    def run_layers(self, x: Array, positions: Array, call: CallLayer, held: Array | None = None) -> Array:
        """[..., hidden] -> [..., hidden]; `positions` is i32[...]. call: runs one layer, as `attending` does. held:
        bool[layers], of a ring: which places of this stage are no padding."""
        assert self.repeat is None, "a loop's layers are stacked: `engine/layer_group.py` runs them"
        rotation_of = self.rotations(positions)
        for index, layer in enumerate(self.layers):
            y = call(layer, x, rotation_of(index), index)
            x = y if held is None else jnp.where(held[index], y, x)
        return x

    def rotations(self, positions: Array) -> Callable[[int], Rotation]:
        """By place in the stage, for `positions` i32[...]."""
        config = self.config
        factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
        far = near = rotations(positions, inverse_frequencies(config), factor)
        if config.local_rope_theta is not None:
            near = rotations(positions, inverse_frequencies(config, local=True))
        return lambda index: far if config.window(self.numbers[index]) is None else near

    def states(self, x: Array) -> Array:
        """[..., hidden] as the head takes them."""
        assert self.norm is not None, "only the last stage has a head"
        return self.norm(x)

    def logits(self, x: Array) -> Array:
        """[..., hidden] -> f32[..., V], whole on every shard."""
        return self.scores(self.states(x))

    def scores(self, x: Array) -> Array:
        """[..., hidden], as the head takes them -> f32[..., V], whole on every shard."""
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
    """Plain causal attention over the tokens at hand: q [..., T, Hq, D], no cache."""

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
    """The dimensions in front of [H, Q, K]."""
    return tuple(range(len(shape) - 3))


def attending(attend: Attend) -> CallLayer:
    """Runs a layer whose attention is `attend`."""
    return lambda layer, x, rotation, index: layer(x, rotation, index, attend)


def forward(model: Stage, tokens: Array) -> Array:
    """Full forward of the whole model: i32[B, T] -> f32[B, T, V]. The definition every served token is held against."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    call = attending(dense_attend(model.attention))
    return model.logits(model.run_layers(model.embed_tokens(tokens), positions, call))
