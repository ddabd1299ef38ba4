"""The one table between Hugging Face tensor names and our leaves.

A `Leaf` says which checkpoint tensors a leaf of a `Stage` is made of, in order along its output axis, and how each
is cut for a shard. Checkpoint matrices are [out, in]; our kernels are [in, out], so most leaves are `transposed`.
Fused leaves are fused per shard: shard 0's q, k and v heads, then shard 1's, and so on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jdisagg.core.kv_layout import heads_per_shard, kv_head_of_shard
from jdisagg.core.model_config import ModelConfig

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor, and the cut of it that a shard takes."""

    name: str
    shape: tuple[int, ...]  # as the checkpoint stores it
    split: int | None = None  # dimension of `shape` that is cut over the shards; None means every shard takes all
    kv_head_dim: int = 0  # not 0: cut by KV heads of this width, so that shards beyond the heads repeat them

    def index(self, shard: int, tp: int) -> Index:
        """What `shard` of `tp` reads."""
        whole = tuple(slice(0, size) for size in self.shape)
        if self.split is None:
            return whole
        size = self.shape[self.split]
        start, width = shard * size // tp, size // tp
        if self.kv_head_dim:
            heads = size // self.kv_head_dim
            start = kv_head_of_shard(heads, tp, shard) * self.kv_head_dim
            width = heads_per_shard(heads, tp) * self.kv_head_dim
        return (*whole[: self.split], slice(start, start + width), *whole[self.split + 1 :])


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one leaf is made: its parts, cut, joined along the first dimension, then transposed."""

    parts: tuple[Part, ...]
    axis: int | None = None  # dimension of the leaf that is sharded; None where every shard holds the same
    transposed: bool = False

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


def layer_leaves(config: ModelConfig, prefix: str) -> dict[str, Leaf]:
    """Every leaf that one layer can have; a family without biases or q/k norms never asks for theirs."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        "attention_norm.scale": Leaf((Part(f"{prefix}.input_layernorm.weight", (config.hidden_size,)),)),
        "mlp_norm.scale": Leaf((Part(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)),)),
        "attention.q_norm.scale": Leaf((Part(f"{attention}.q_norm.weight", (config.head_dim,)),)),
        "attention.k_norm.scale": Leaf((Part(f"{attention}.k_norm.weight", (config.head_dim,)),)),
        "attention.qkv.kernel": Leaf(_qkv(config, attention, "weight", (config.hidden_size,)), 1, True),
        "attention.qkv.bias": Leaf(_qkv(config, attention, "bias", ()), 0),
        "attention.out.kernel": _row_split(f"{attention}.o_proj.weight", config.hidden_size, config.q_size),
        "attention.out.bias": Leaf((Part(f"{attention}.o_proj.bias", (config.hidden_size,)),)),
        "mlp.gate_up.kernel": Leaf(_gate_up(config, mlp, "weight", (config.hidden_size,)), 1, True),
        "mlp.gate_up.bias": Leaf(_gate_up(config, mlp, "bias", ()), 0),
        "mlp.down.kernel": _row_split(f"{mlp}.down_proj.weight", config.hidden_size, config.intermediate_size),
        "mlp.down.bias": Leaf((Part(f"{mlp}.down_proj.bias", (config.hidden_size,)),)),
    }


def _qkv(config: ModelConfig, prefix: str, kind: str, inputs: tuple[int, ...]) -> tuple[Part, ...]:
    return (
        Part(f"{prefix}.q_proj.{kind}", (config.q_size, *inputs), 0),
        Part(f"{prefix}.k_proj.{kind}", (config.kv_size, *inputs), 0, config.head_dim),
        Part(f"{prefix}.v_proj.{kind}", (config.kv_size, *inputs), 0, config.head_dim),
    )


def _gate_up(config: ModelConfig, prefix: str, kind: str, inputs: tuple[int, ...]) -> tuple[Part, ...]:
    shape = (config.intermediate_size, *inputs)
    return (Part(f"{prefix}.gate_proj.{kind}", shape, 0), Part(f"{prefix}.up_proj.{kind}", shape, 0))


def _row_split(name: str, outputs: int, inputs: int) -> Leaf:
    """A checkpoint matrix [out, in] cut along its inputs: each shard's product is a partial sum."""
    return Leaf((Part(name, (outputs, inputs), 1),), axis=0, transposed=True)
