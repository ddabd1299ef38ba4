"""Weights of a GGUF file by their Hugging Face names: memory-mapped, and dequantised only where a shard reads.

Some things differ from a Hugging Face folder beside the names: numbers come in quantised blocks along a row, for Llama
the rows of q and k are stored in the order of interleaved rotation, and for Gemma norms have the 1 that the network
adds. Both are undone here.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jdisagg.core.errors import CheckpointError, MissingTensor, UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.files import first_line
from jdisagg.model.gguf_config import NO_WEIGHTS, model_config
from jdisagg.model.gguf_families import NORMS_PLUS_ONE
from jdisagg.model.gguf_file import Tensor, read_gguf
from jdisagg.model.names import Index, stage_leaves

STRIP_BYTES = 1 << 15  # dequantised at once: with its temporaries, about what a cache holds
INTERLEAVED = ("llama",)  # architectures whose q and k llama.cpp stores for rotation of neighbours


class GGUFSource:
    """Slices of the tensors of one model's files, in float32 whatever they are stored in."""

    def __init__(self, path: str | Path) -> None:
        file = read_gguf(path)
        config = model_config(file)
        self._path, self._config = file.path, config
        self._interleaved = file.architecture in INTERLEAVED
        self._norm_offset = np.float32(file.architecture in NORMS_PLUS_ONE)
        names = _names(config, file.architecture)
        self._tensors = {name: file.tensors[stored] for name, stored in names.items() if stored in file.tensors}
        unread = file.tensors.keys() - names.values() - NO_WEIGHTS
        if unread:
            raise UnsupportedModel(f"{self.place}: tensor {min(unread)} has no place in a {config.family} model here")
        self._maps: dict[Path, np.ndarray] = {}

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    @property
    def label(self) -> str:
        """How the numbers are stored: the kinds of blocks, the one that most bytes are of first."""
        kinds = Counter[str]()
        for tensor in self._tensors.values():
            kinds[tensor.kind.name] += tensor.num_bytes
        return f"gguf of {', '.join(kind for kind, _ in kinds.most_common())}"

    def stored_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def num_weights(self) -> int:
        """Numbers in all the network's tensors."""
        return sum(prod(tensor.shape) for tensor in self._tensors.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[name].shape if name in self._tensors else None

    def dtype(self, name: str) -> str:
        kind = self._tensor(name).kind
        return "float32" if _has_definition(kind) else kind.name

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor, rows = self._tensor(name), index[0]
        order = self._order(name)
        picked = rows if order is None else order[rows]
        stored = self._bytes(tensor)
        try:
            if len(tensor.shape) == 1:
                found = _numbers(stored, tensor.kind)[picked]
                return found - self._norm_offset if name.endswith("norm.weight") else found
            return _columns(stored.reshape(tensor.shape[0], -1)[picked], tensor.kind, index[1])
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"cannot read tensor {name} of {tensor.path}: {first_line(error)}") from error

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise MissingTensor(f"tensor {name} is not in {self.place}")
        return self._tensors[name]

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        if tensor.path not in self._maps:
            self._maps[tensor.path] = np.memmap(tensor.path, np.uint8, "r")
        return self._maps[tensor.path][tensor.start : tensor.start + tensor.num_bytes]

    def _order(self, name: str) -> np.ndarray | None:
        """Which stored row each of the tensor's rows is; None where they are the same."""
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        projection = name.split(".")[-2]
        if not self._interleaved or projection not in heads:
            return None
        rows = np.arange(self._tensors[name].shape[0])
        return rows.reshape(heads[projection], -1, 2).swapaxes(1, 2).ravel()


def _names(config: ModelConfig, architecture: str) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every tensor that the model may be made of."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, config.num_layers)
    leaves = stage_leaves(config, range(config.num_layers), 1).values()
    parts = [part.name for leaf in leaves for part in leaf.parts if _is_read(config, part.name)]
    named = {name: table.get_name(name, (".weight", ".bias")) for name in parts}
    return {name: stored for name, stored in named.items() if stored is not None}


def _is_read(config: ModelConfig, name: str) -> bool:
    """Whether the network has it: biases are for some families only."""
    if not name.endswith(".bias"):
        return True
    return config.mlp_bias if ".mlp." in name else config.o_bias if ".o_proj." in name else config.qkv_bias


@cache
def _has_definition(kind: GGMLQuantizationType) -> bool:
    try:
        _numbers(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _columns(rows: np.ndarray, kind: GGMLQuantizationType, columns: slice) -> np.ndarray:
    """f32[rows, columns] of rows of blocks; only the blocks that hold some of the columns are looked at."""
    block, size = GGML_QUANT_SIZES[kind]
    first, last = columns.start // block, -(-columns.stop // block)
    found = _numbers(rows[:, first * size : last * size], kind).reshape(len(rows), -1)
    return found[:, columns.start - first * block : columns.stop - first * block]


def _numbers(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """f32[all of them] of blocks, a strip of them at a time."""
    size = GGML_QUANT_SIZES[kind][1]
    blocks = np.ascontiguousarray(stored).reshape(-1, size)
    step = max(1, STRIP_BYTES // size)
    strips = [dequantize(blocks[at : at + step].reshape(1, -1), kind) for at in range(0, len(blocks), step)]
    return np.concatenate([strip.ravel() for strip in strips]).astype(np.float32, copy=False)
