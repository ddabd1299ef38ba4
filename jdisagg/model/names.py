"""The one table between Hugging Face tensor names and our leaves.

A `Leaf` says which checkpoint tensors a leaf of a `Stage` is made of, in order along its output axis, and how each
is cut for a shard. Checkpoint matrices are [out, in]; a kernel [in, out] is such a leaf `transposed`, and one of a
machine that wants it [out, in] is `flipped` once more.
Fused leaves are fused per shard: shard 0's q, k and v heads, then shard 1's, and so on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jdisagg.core.model_config import ModelConfig
from jdisagg.core.tensor_cut import heads_per_shard, kv_heads_of_shard
from jdisagg.model.families import FUSED

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor, and the cut of it that a shard takes."""

    name: str
    shape: tuple[int, ...]  # as the checkpoint stores it
    split: int | None = None  # dimension of `shape` that is cut over the shards; None means every shard takes all
    kv_head_dim: int = 0  # not 0: cut by KV heads of this width, so that shards beyond the heads repeat them
    rows: range | None = None  # of the tensor's first dimension, where it is fused with others; None means all

    def index(self, shard: int, tp: int) -> Index:
        """What `shard` of `tp` reads."""
        whole = tuple(slice(0, size) for size in self.shape)
        if self.split is None:
            return whole
        rows = self.rows or range(self.shape[self.split])
        size = len(rows)
        start, width = shard * size // tp, size // tp
        if self.kv_head_dim:
            heads = size // self.kv_head_dim
            start = kv_heads_of_shard(heads, tp, shard).start * self.kv_head_dim
            width = heads_per_shard(heads, tp) * self.kv_head_dim
        start += rows.start
        return (*whole[: self.split], slice(start, start + width), *whole[self.split + 1 :])


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one leaf is made: its parts, cut, joined along the first dimension, then transposed."""

    parts: tuple[Part, ...]
    axis: int | None = None  # dimension of the leaf that is sharded; None where every shard holds the same
    transposed: bool = False

    def flipped(self) -> "Leaf":
        """The leaf of the transposed matrix."""
        return replace(self, axis=None if self.axis is None else 1 - self.axis, transposed=not self.transposed)

    def channels(self) -> "Leaf":
        """The leaf of one number for each of the matrix's outputs."""
        outputs = 1 if self.transposed else 0
        return replace(self, axis=0 if self.axis == outputs else None, transposed=False)

    def cut(self, local: np.ndarray, shard: int, tp: int) -> Iterator[tuple[Part, Index, np.ndarray]]:
        """A shard's leaf back into its parts: where each lies in the checkpoint's tensor, and its values."""
        rows, start = local.T if self.transposed else local, 0
        for part in self.parts:
            index = part.index(shard, tp)
            stop = start + index[0].stop - index[0].start
            yield part, index, rows[start:stop]
            start = stop


def stage_leaves(config: ModelConfig, layers: range, vocab_shards: int) -> dict[str, Leaf]:
    """Every leaf of a stage by its path in the module tree, as "layers.0.attention.qkv.kernel"."""
    table = (config.vocab_size, config.hidden_size)
    leaves: dict[str, Leaf] = {}
    if layers.start == 0:
        leaves["embed"] = Leaf((Part("model.embed_tokens.weight", table),))
    for index, layer in enumerate(layers):
        for path, leaf in layer_leaves(config, f"model.layers.{layer}").items():
            leaves[f"layers.{index}.{path}"] = leaf
    if layers.stop == config.num_layers:
        name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        leaves["norm.scale"] = Leaf((Part("model.norm.weight", (config.hidden_size,)),))
        leaves["head"] = Leaf((Part(name, table, 0),), axis=0) if vocab_shards > 1 else Leaf((Part(name, table),))
    return leaves


NORMS = {  # leaf -> the checkpoint's name, by where a family has its norms
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
    """A tensor that every layer of the family has."""
    return f"model.layers.{layer}.{next(iter(NORMS[config.norms].values()))}.weight"


def layer_leaves(config: ModelConfig, prefix: str) -> dict[str, Leaf]:
    """Every leaf that one layer can have; a family without biases or q/k norms never asks for theirs."""
    norms = {
        f"{leaf}.scale": Leaf((Part(f"{prefix}.{name}.weight", (config.hidden_size,)),))
        for leaf, name in NORMS[config.norms].items()
    }
    return norms | _attention_leaves(config, f"{prefix}.self_attn") | _mlp_leaves(config, f"{prefix}.mlp")


def _attention_leaves(config: ModelConfig, prefix: str) -> dict[str, Leaf]:
    return {
        "attention.q_norm.scale": _head_norm(config, f"{prefix}.q_norm.weight", config.q_size, 0),
        "attention.k_norm.scale": _head_norm(config, f"{prefix}.k_norm.weight", config.kv_size, config.head_dim),
        "attention.qkv.kernel": Leaf(_qkv(config, prefix, "weight", (config.hidden_size,)), 1, True),
        "attention.qkv.bias": Leaf(_qkv(config, prefix, "bias", ()), 0),
        "attention.out.kernel": _row_split(f"{prefix}.o_proj.weight", config.hidden_size, config.q_size),
        "attention.out.bias": Leaf((Part(f"{prefix}.o_proj.bias", (config.hidden_size,)),)),
        "attention.sinks": Leaf((Part(f"{prefix}.sinks", (config.num_heads,), 0),), 0),
    }


def _mlp_leaves(config: ModelConfig, prefix: str) -> dict[str, Leaf]:
    return {
        "mlp.gate_up.kernel": Leaf(_gate_up(config, prefix, "weight", (config.hidden_size,)), 1, True),
        "mlp.gate_up.bias": Leaf(_gate_up(config, prefix, "bias", ()), 0),
        "mlp.down.kernel": _row_split(f"{prefix}.down_proj.weight", config.hidden_size, config.intermediate_size),
        "mlp.down.bias": Leaf((Part(f"{prefix}.down_proj.bias", (config.hidden_size,)),)),
    }


def _head_norm(config: ModelConfig, name: str, size: int, kv_head_dim: int) -> Leaf:
    """One scale for every head, or one for all of them, cut as they are."""
    if not config.qk_norm_is_wide:
        return Leaf((Part(name, (config.head_dim,)),))
    return Leaf((Part(name, (size,), 0, kv_head_dim),), 0)


def _qkv(config: ModelConfig, prefix: str, kind: str, inputs: tuple[int, ...]) -> tuple[Part, ...]:
    sizes, heads = (config.q_size, config.kv_size, config.kv_size), (0, config.head_dim, config.head_dim)
    if config.family in FUSED:
        return _fused(f"{prefix}.qkv_proj.{kind}", sizes, inputs, heads)
    names = [f"{prefix}.{which}_proj.{kind}" for which in "qkv"]
    return tuple(Part(name, (size, *inputs), 0, dim) for name, size, dim in zip(names, sizes, heads, strict=True))


def _gate_up(config: ModelConfig, prefix: str, kind: str, inputs: tuple[int, ...]) -> tuple[Part, ...]:
    size = config.intermediate_size
    if config.family in FUSED:
        return _fused(f"{prefix}.gate_up_proj.{kind}", (size, size), inputs, (0, 0))
    return tuple(Part(f"{prefix}.{which}_proj.{kind}", (size, *inputs), 0) for which in ("gate", "up"))


def _fused(name: str, sizes: tuple[int, ...], inputs: tuple[int, ...], heads: tuple[int, ...]) -> tuple[Part, ...]:
    """Parts of one tensor of the checkpoint, one after another in its rows."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(
        Part(name, (sum(sizes), *inputs), 0, dim, range(start, start + size))
        for start, size, dim in zip(starts, sizes, heads, strict=True)
    )


def _row_split(name: str, outputs: int, inputs: int) -> Leaf:
    """A checkpoint matrix [out, in] cut along its inputs: each shard's product is a partial sum."""
    return Leaf((Part(name, (outputs, inputs), 1),), axis=0, transposed=True)
