"""The mapping between Hugging Face tensor names and the leaves of a `Stage`.

A `LeafSpec` lists the checkpoint tensors that it consists of, in order along its output axis, and how each is cut for a
shard. Checkpoint matrices are [out, in]. A kernel [in, out] is such a leaf `transposed`; platforms that need [out, in]
use it `flipped` again. Fused leaves are fused per shard: shard 0's q, k and v heads, then shard 1's, and so on. If
shards do not divide heads or channels, some shards are padded with zeros (see `core/layout/tensor_cut.py`), which add
nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jdisagg.core.layout.tensor_cut import Channels, Cut
from jdisagg.core.model_config import Experts, Latent, ModelConfig, experts_held
from jdisagg.model.families import EXPERT_NAMES, FUSED

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One checkpoint tensor with the slice of it that a shard takes."""

    name: str
    shape: tuple[int, ...]  # as the checkpoint stores it
    cut: Cut | None = None  # over the shards; None: every shard takes all
    axis: int = 0  # dimension of `shape` that is cut
    rows: range | None = None  # rows of a fused tensor that belong to this part; None: all
    expert: int | None = None  # this part's index in a tensor of all experts, [experts, ...]

    @property
    def outputs_first(self) -> tuple[int, ...]:
        """Shape as [out, in], without the dimension of experts."""
        return self.shape if self.expert is None else self.shape[:0:-1]

    def index(self, shard: int, tp: int) -> Index:
        """Returns the slices that `shard` of `tp` reads; empty if the shard holds only padding."""
        whole = tuple(slice(0, size) for size in self.shape)
        if self.expert is not None:
            return (slice(self.expert, self.expert + 1), *whole[1:])
        if self.cut is None:
            return whole
        held, first = self.cut.held(tp, shard), self.rows.start if self.rows else 0
        return (*whole[: self.axis], slice(first + held.start, first + held.stop), *whole[self.axis + 1 :])

    def padding(self, shard: int, tp: int) -> tuple[int, ...]:
        """Returns the number of zeros after the shard's slice, in each dimension."""
        zeros = self.cut.width(tp) - len(self.cut.held(tp, shard)) if self.cut else 0
        return tuple(zeros if axis == self.axis else 0 for axis in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """The recipe of one leaf: its parts, cut, joined along the first dimension, then transposed.

    A leaf with `experts` is [experts of the shard, ...]. Its parts are grouped by expert, each expert is built on its
    own and not cut, and shards beyond the last expert hold zeros. A tensor of all experts is stored as [experts, in,
    out].
    """

    parts: tuple[TensorSlice, ...]
    axis: int | None = None  # sharded dimension of the leaf; None: replicated
    transposed: bool = False
    experts: int = 0  # 0: none
    paired: bool = False  # an expert's stored rows interleave gate and up; the leaf has all gate rows first

    def flipped(self) -> LeafSpec:
        """Returns the leaf of the transposed matrix, or of each expert's transposed matrix."""
        axis = self.axis if self.axis is None or self.experts else 1 - self.axis
        return replace(self, axis=axis, transposed=not self.transposed)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        shapes = [part.outputs_first for part in self.parts[: len(self.parts) // self.experts]]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        return shape[::-1] if self.transposed else shape

    def channels(self) -> LeafSpec:
        """Returns the leaf of one number per output of the matrix."""
        outputs = 1 if self.transposed else 0
        return replace(self, axis=0 if self.axis == outputs else None, transposed=False)

    def cut(self, local: np.ndarray, shard: int, tp: int) -> Iterator[tuple[TensorSlice, Index, np.ndarray]]:
        """Splits a shard's leaf back into parts: yields each part, its slices in the checkpoint tensor, and its
        values."""
        if not self.experts:
            yield from self._cut(self.parts, local, shard, tp)
            return
        for matrix, parts in zip(local, self.experts_of(shard, tp), strict=False):
            rows = matrix.T if self.transposed else matrix
            yield from _cut_expert(parts, in_turns(rows) if self.paired else rows)

    def _cut(
        self, parts: tuple[TensorSlice, ...], local: np.ndarray, shard: int, tp: int
    ) -> Iterator[tuple[TensorSlice, Index, np.ndarray]]:
        rows, start = local.T if self.transposed else local, 0
        for part in parts:
            index, padding = part.index(shard, tp), part.padding(shard, tp)
            sizes = [bounds.stop - bounds.start for bounds in index]
            yield part, index, rows[start : start + sizes[0]][tuple(slice(0, size) for size in sizes)]
            start += sizes[0] + padding[0]

    def experts_of(self, shard: int, tp: int) -> Iterator[tuple[TensorSlice, ...]]:
        parts_per_expert, experts_per_shard = len(self.parts) // self.experts, experts_held(self.experts, tp)
        for expert in range(shard * experts_per_shard, min((shard + 1) * experts_per_shard, self.experts)):
            yield self.parts[expert * parts_per_expert : (expert + 1) * parts_per_expert]


def _cut_expert(parts: tuple[TensorSlice, ...], rows: np.ndarray) -> Iterator[tuple[TensorSlice, Index, np.ndarray]]:
    """Splits one expert's matrix [out, in], or its bias, back into parts."""
    start = 0
    for part in parts:
        stop = start + part.outputs_first[0]
        yield part, part.index(0, 1), rows[start:stop] if part.expert is None else rows[start:stop].T[None]
        start = stop


def in_turns(rows: np.ndarray) -> np.ndarray:
    """Interleaves the rows of two halves."""
    return rows.reshape(2, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def in_halves(rows: np.ndarray) -> np.ndarray:
    """Reverses `in_turns`: first all even rows, then all odd rows."""
    return rows.reshape(-1, 2, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def stage_leaves(config: ModelConfig, layers: range, vocab_shards: int) -> dict[str, LeafSpec]:
    """Returns every leaf of a stage by path in the module tree, such as "layers.0.attention.qkv.kernel"."""
    table = (config.vocab_size, config.hidden_size)
    leaves: dict[str, LeafSpec] = {}
    if layers.start == 0:
        leaves["embed"] = LeafSpec((TensorSlice("model.embed_tokens.weight", table),))
    for index, layer in enumerate(layers):
        for path, leaf in layer_leaves(config, f"model.layers.{layer}").items():
            leaves[f"layers.{index}.{path}"] = leaf
    if layers.stop == config.num_layers:
        name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        leaves["norm.scale"] = LeafSpec((TensorSlice("model.norm.weight", (config.hidden_size,)),))
        cut = Channels(config.vocab_size) if vocab_shards > 1 else None
        leaves["head"] = LeafSpec((TensorSlice(name, table, cut),), axis=0 if cut else None)
    return leaves


def ring_leaves(config: ModelConfig, numbers: Sequence[int]) -> dict[str, LeafSpec]:
    """Returns every leaf of a ring stage that holds the layers `numbers`. Embedding and head are cut over all shards of
    the ring."""
    table, cut = (config.vocab_size, config.hidden_size), Channels(config.vocab_size)
    name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    leaves = {
        "embed": LeafSpec((TensorSlice("model.embed_tokens.weight", table, cut),), axis=0),
        "head": LeafSpec((TensorSlice(name, table, cut),), axis=0),
        "norm.scale": LeafSpec((TensorSlice("model.norm.weight", (config.hidden_size,)),)),
    }
    for index, layer in enumerate(numbers):
        for path, leaf in layer_leaves(config, f"model.layers.{layer}").items():
            leaves[f"layers.{index}.{path}"] = leaf
    return leaves


def matrix_leaves(config: ModelConfig) -> dict[str, LeafSpec]:
    """Returns every matrix of the model by the names of `WeightFormat`, such as "11.mlp.down" and "head"."""
    layers = range(config.num_layers)
    found = {
        f"{layer}.{path.removesuffix('.kernel')}": leaf
        for layer in layers
        for path, leaf in layer_leaves(config, f"model.layers.{layer}").items()
        if path.endswith(".kernel")
    }
    return found | {"head": stage_leaves(config, layers[-1:], 1)["head"]}


NORMS = {  # by norm placement: leaf -> checkpoint name
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


def first_tensor(config: ModelConfig, layer: int) -> str:
    return f"model.layers.{layer}.{next(iter(NORMS[config.norms].values()))}.weight"


def layer_leaves(config: ModelConfig, prefix: str) -> dict[str, LeafSpec]:
    """Returns every leaf that one layer can have; those of absent biases and norms are not used."""
    norms = {
        f"{leaf}.scale": LeafSpec((TensorSlice(f"{prefix}.{name}.weight", (config.hidden_size,)),))
        for leaf, name in NORMS[config.norms].items()
    }
    mlp = _mlp_leaves(config, f"{prefix}.mlp") | _expert_leaves(config, prefix)
    return norms | _attention_leaves(config, f"{prefix}.self_attn") | mlp


def _attention_leaves(config: ModelConfig, prefix: str) -> dict[str, LeafSpec]:
    if config.latent is not None:
        return _latent_leaves(config, config.latent, prefix)
    sinks = TensorSlice(f"{prefix}.sinks", (config.num_heads,), replace(config.q_cut, head_dim=1))
    return {
        "attention.q_norm.scale": _head_norm(config, f"{prefix}.q_norm.weight", config.q_size, config.q_cut),
        "attention.k_norm.scale": _head_norm(config, f"{prefix}.k_norm.weight", config.kv_size, config.kv_cut),
        "attention.qkv.kernel": LeafSpec(_qkv(config, prefix, "weight", (config.hidden_size,)), 1, True),
        "attention.qkv.bias": LeafSpec(_qkv(config, prefix, "bias", ()), 0),
        "attention.out.kernel": _row_split(f"{prefix}.o_proj.weight", config.hidden_size, config.q_size, config.q_cut),
        "attention.out.bias": LeafSpec((TensorSlice(f"{prefix}.o_proj.bias", (config.hidden_size,)),)),
        **({"attention.sinks": LeafSpec((sinks,), 0)} if config.sinks else {}),
    }


def _latent_leaves(config: ModelConfig, latent: Latent, prefix: str) -> dict[str, LeafSpec]:
    """Returns the leaves of latent attention: projections to latents are replicated, those from latents are cut by
    heads."""
    hidden, rank = config.hidden_size, latent.q_lora_rank

    def by_heads(name: str, head_size: int, inputs: int) -> tuple[TensorSlice, ...]:
        cut = replace(config.q_cut, head_dim=head_size)
        return (TensorSlice(f"{prefix}.{name}.weight", (config.num_heads * head_size, inputs), cut),)

    values = replace(config.q_cut, head_dim=latent.v_head_dim)
    out = _row_split(f"{prefix}.o_proj.weight", hidden, config.num_heads * latent.v_head_dim, values)
    q_up = by_heads("q_proj" if rank is None else "q_b_proj", latent.q_head_dim, rank or hidden)
    return {
        **_replicated("attention.q_down", f"{prefix}.q_a_proj", (rank or 0, hidden)),
        "attention.q_norm.scale": LeafSpec((TensorSlice(f"{prefix}.q_a_layernorm.weight", (rank or 0,)),)),
        "attention.q_up.kernel": LeafSpec(q_up, 1, True),
        **_replicated("attention.kv_down", f"{prefix}.kv_a_proj_with_mqa", (latent.row_size, hidden)),
        "attention.kv_norm.scale": LeafSpec((TensorSlice(f"{prefix}.kv_a_layernorm.weight", (latent.kv_lora_rank,)),)),
        "attention.kv_up": LeafSpec(by_heads("kv_b_proj", latent.up_size, latent.kv_lora_rank), 0),
        "attention.out.kernel": out,
        "attention.out.bias": LeafSpec((TensorSlice(f"{prefix}.o_proj.bias", (hidden,)),)),
    }


def _replicated(leaf: str, name: str, shape: tuple[int, int]) -> dict[str, LeafSpec]:
    """Returns the leaves of a replicated matrix and its bias."""
    return {
        f"{leaf}.kernel": LeafSpec((TensorSlice(f"{name}.weight", shape),), transposed=True),
        f"{leaf}.bias": LeafSpec((TensorSlice(f"{name}.bias", shape[:1]),)),
    }


def _mlp_leaves(config: ModelConfig, prefix: str) -> dict[str, LeafSpec]:
    return {
        "mlp.gate_up.kernel": LeafSpec(_gate_up(config, prefix, "weight", (config.hidden_size,)), 1, True),
        "mlp.gate_up.bias": LeafSpec(_gate_up(config, prefix, "bias", ()), 0),
        "mlp.down.kernel": _row_split(
            f"{prefix}.down_proj.weight", config.hidden_size, config.intermediate_size, config.mlp_cut
        ),
        "mlp.down.bias": LeafSpec((TensorSlice(f"{prefix}.down_proj.bias", (config.hidden_size,)),)),
    }


def _expert_leaves(config: ModelConfig, prefix: str) -> dict[str, LeafSpec]:
    """Returns the leaves of the layer's experts; empty if the model has none."""
    experts = config.experts
    if experts is None:
        return {}
    names, number = EXPERT_NAMES[config.family], experts.number
    block = f"{prefix}.{names.block}"
    router = f"{block}.{names.router}"
    stacked = _experts_of_one_tensor if names.fused else _experts_of_many
    shared = replace(config, intermediate_size=experts.shared_width)
    alike = _mlp_leaves(shared, f"{block}.shared_experts") if experts.shared_width else {}
    return {
        "mlp.router": LeafSpec((TensorSlice(f"{router}.weight", (number, config.hidden_size)),)),
        "mlp.router_bias": LeafSpec((TensorSlice(f"{router}.bias", (number,)),)),
        "mlp.correction": LeafSpec((TensorSlice(f"{router}.e_score_correction_bias", (number,)),)),
        **{path.replace("mlp.", "mlp.shared."): leaf for path, leaf in alike.items()},
        **stacked(config, experts, f"{block}.experts"),
    }


def _experts_of_many(config: ModelConfig, experts: Experts, prefix: str) -> dict[str, LeafSpec]:
    """Returns leaves for checkpoints with one tensor per matrix and expert."""
    gate, up, down = EXPERT_NAMES[config.family].matrices

    def leaf(shape: tuple[int, int], *names: str) -> LeafSpec:
        every = range(experts.number)
        parts = (TensorSlice(f"{prefix}.{expert}.{name}.weight", shape) for expert in every for name in names)
        return LeafSpec(tuple(parts), 0, True, experts.number)

    return {
        "mlp.gate_up": leaf((experts.width, config.hidden_size), gate, up),
        "mlp.down": leaf((config.hidden_size, experts.width), down),
    }


def _experts_of_one_tensor(config: ModelConfig, experts: Experts, prefix: str) -> dict[str, LeafSpec]:
    """Returns leaves for gpt-oss: one tensor per matrix, [experts, in, out], with gate and up channels interleaved."""
    number, hidden, width = experts.number, config.hidden_size, experts.width

    def leaf(name: str, *shape: int, paired: bool) -> LeafSpec:
        parts = (TensorSlice(f"{prefix}.{name}", (number, *shape), expert=expert) for expert in range(number))
        return LeafSpec(tuple(parts), 0, len(shape) > 1, number, paired)

    return {
        "mlp.gate_up": leaf("gate_up_proj", hidden, 2 * width, paired=True),
        "mlp.gate_up_bias": leaf("gate_up_proj_bias", 2 * width, paired=True),
        "mlp.down": leaf("down_proj", width, hidden, paired=False),
        "mlp.down_bias": leaf("down_proj_bias", hidden, paired=False),
    }


def _head_norm(config: ModelConfig, name: str, size: int, cut: Cut) -> LeafSpec:
    """Returns the leaf of a q or k norm: one scale shared by all heads, or one over all heads, cut like them."""
    if not config.qk_norm_is_wide:
        return LeafSpec((TensorSlice(name, (config.head_dim,)),))
    return LeafSpec((TensorSlice(name, (size,), cut),), 0)


def _qkv(config: ModelConfig, prefix: str, kind: str, inputs: tuple[int, ...]) -> tuple[TensorSlice, ...]:
    sizes, cuts = (config.q_size, config.kv_size, config.kv_size), (config.q_cut, config.kv_cut, config.kv_cut)
    if config.family in FUSED:
        return _fused(f"{prefix}.qkv_proj.{kind}", sizes, inputs, cuts)
    names = [f"{prefix}.{which}_proj.{kind}" for which in "qkv"]
    return tuple(TensorSlice(name, (size, *inputs), cut) for name, size, cut in zip(names, sizes, cuts, strict=True))


def _gate_up(config: ModelConfig, prefix: str, kind: str, inputs: tuple[int, ...]) -> tuple[TensorSlice, ...]:
    size, cut = config.intermediate_size, config.mlp_cut
    if config.family in FUSED:
        return _fused(f"{prefix}.gate_up_proj.{kind}", (size, size), inputs, (cut, cut))
    return tuple(TensorSlice(f"{prefix}.{which}_proj.{kind}", (size, *inputs), cut) for which in ("gate", "up"))


def _fused(
    name: str, sizes: tuple[int, ...], inputs: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[TensorSlice, ...]:
    """Returns consecutive row ranges of one fused checkpoint tensor as parts."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(
        TensorSlice(name, (sum(sizes), *inputs), cut, rows=range(start, start + size))
        for start, size, cut in zip(starts, sizes, cuts, strict=True)
    )


def _row_split(name: str, outputs: int, inputs: int, cut: Cut) -> LeafSpec:
    """Returns the leaf of a matrix [out, in] cut along its inputs, so that each shard's product is a partial sum."""
    return LeafSpec((TensorSlice(name, (outputs, inputs), cut, 1),), axis=0, transposed=True)
