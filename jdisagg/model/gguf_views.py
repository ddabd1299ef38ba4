"""Tensors of a checkpoint that a GGUF file cuts otherwise: experts, which lie in one tensor for each matrix, and the
matrix that makes keys and values of latents, which newer files hold in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jdisagg.core.errors import WrongShape
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families import EXPERT_NAMES
from jdisagg.model.gguf_blocks import Blocks
from jdisagg.model.gguf_file import GGUFFile, Tensor
from jdisagg.model.names import Index

MATRICES = ("gate", "up", "down")


class View(Protocol):
    """One tensor of the checkpoint, as `tensors` of the file hold it."""

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, blocks: Blocks, index: Index) -> np.ndarray:
        """f32[index]"""
        ...


@dataclass(frozen=True, slots=True)
class OfExpert:
    """One expert's matrix [out, in] of a tensor [experts, out, in]."""

    tensor: Tensor
    expert: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[1:]

    def read(self, blocks: Blocks, index: Index) -> np.ndarray:
        first = self.expert * self.shape[0]
        return blocks.rows(self.tensor, slice(first + index[0].start, first + index[0].stop), index[1])


@dataclass(frozen=True, slots=True)
class InTurns:
    """gpt-oss' [experts, in, out] of tensors [experts, out, in], whose outputs follow each other in turns; or a bias
    [experts, out] of such biases."""

    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, *inputs = self.tensors[0].shape
        return (experts, *inputs, len(self.tensors) * outputs)

    def read(self, blocks: Blocks, index: Index) -> np.ndarray:
        experts, *inputs, outputs = index
        numbers = range(experts.start, experts.stop)
        return np.ascontiguousarray(np.stack([self._expert(blocks, each, inputs) for each in numbers])[..., outputs])

    def _expert(self, blocks: Blocks, expert: int, inputs: list[slice]) -> np.ndarray:
        size = self.tensors[0].shape[1]
        if not inputs:
            rows = [blocks.rows(each, slice(expert, expert + 1), slice(0, size))[0] for each in self.tensors]
            return np.stack(rows, axis=-1).ravel()
        own = slice(expert * size, (expert + 1) * size)
        return np.stack([blocks.rows(each, own, inputs[0]).T for each in self.tensors], axis=-1).reshape(
            inputs[0].stop - inputs[0].start, -1
        )


@dataclass(frozen=True, slots=True)
class ByHeads:
    """`kv_b_proj` [heads * (keys + values), rank], of keys [heads, rank, keys] and values [heads, values, rank]."""

    keys: Tensor
    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def shape(self) -> tuple[int, ...]:
        heads, rank, keys = self.keys.shape
        return heads * (keys + self.values.shape[1]), rank

    def read(self, blocks: Blocks, index: Index) -> np.ndarray:
        (_, rank, keys), values = self.keys.shape, self.values.shape[1]
        size = keys + values
        first, last = index[0].start // size, -(-index[0].stop // size)
        up = blocks.rows(self.keys, slice(first * rank, last * rank), slice(0, keys)).reshape(-1, rank, keys)
        out = blocks.rows(self.values, slice(first * values, last * values), slice(0, rank)).reshape(-1, values, rank)
        rows = np.concatenate([up.swapaxes(1, 2), out], axis=1).reshape(-1, rank)
        return rows[index[0].start - first * size : index[0].stop - first * size, index[1]]


def views_of(file: GGUFFile, config: ModelConfig) -> dict[str, View]:
    """By the checkpoint's names. Raises `WrongShape` with the file's name of a tensor that is of another."""
    return {name: view for layer in range(config.num_layers) for name, view in _of_layer(file, config, layer)}


def _of_layer(file: GGUFFile, config: ModelConfig, layer: int) -> Iterator[tuple[str, View]]:
    if config.latent is not None and f"blk.{layer}.attn_k_b.weight" in file.tensors:
        rank, heads = config.latent.kv_lora_rank, config.num_heads
        keys = _tensor(file, f"blk.{layer}.attn_k_b.weight", (heads, rank, config.latent.qk_nope_head_dim))
        values = _tensor(file, f"blk.{layer}.attn_v_b.weight", (heads, config.latent.v_head_dim, rank))
        if keys is not None and values is not None:
            yield f"model.layers.{layer}.self_attn.kv_b_proj.weight", ByHeads(keys, values)
    if config.is_sparse(layer):
        assert config.experts is not None
        number, width, hidden = config.experts.number, config.experts.width, config.hidden_size
        shapes = {"gate": (number, width, hidden), "up": (number, width, hidden), "down": (number, hidden, width)}
        found = {each: _tensor(file, f"blk.{layer}.ffn_{each}_exps.weight", shapes[each]) for each in MATRICES}
        biases = {each: _tensor(file, f"blk.{layer}.ffn_{each}_exps.bias", shapes[each][:2]) for each in MATRICES}
        fused = EXPERT_NAMES[config.family].fused
        yield from _in_turns(layer, found, biases) if fused else _each_alone(config, layer, found)


def _in_turns(
    layer: int, found: dict[str, Tensor | None], biases: dict[str, Tensor | None]
) -> Iterator[tuple[str, View]]:
    prefix = f"model.layers.{layer}.mlp.experts"
    for ours, theirs in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for suffix, tensors in (("", found), ("_bias", biases)):
            parts = tuple(tensor for each in theirs if (tensor := tensors[each]) is not None)
            if len(parts) == len(theirs):
                yield f"{prefix}.{ours}{suffix}", InTurns(parts)


def _each_alone(config: ModelConfig, layer: int, found: dict[str, Tensor | None]) -> Iterator[tuple[str, View]]:
    names = EXPERT_NAMES[config.family]
    for each, matrix in zip(MATRICES, names.matrices, strict=True):
        tensor = found[each]
        for expert in range(tensor.shape[0] if tensor is not None else 0):
            assert tensor is not None
            yield f"model.layers.{layer}.{names.block}.experts.{expert}.{matrix}.weight", OfExpert(tensor, expert)


def _tensor(file: GGUFFile, name: str, wanted: tuple[int, ...]) -> Tensor | None:
    found = file.tensors.get(name)
    if found is not None and found.shape != wanted:
        raise WrongShape(f"{found.path}: tensor {name} has shape {found.shape}; the config asks for {wanted}")
    return found
