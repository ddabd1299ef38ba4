"""Weights of a GGUF file by their Hugging Face names: memory-mapped, and dequantised only where a shard reads.

Some things differ from a Hugging Face folder beside the names: numbers come in quantised blocks along a row, for Llama
the rows of q and k are stored in the order of interleaved rotation, and for Gemma norms have the 1 that the network
adds. Both are undone here.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from jdisagg.core.errors import CheckpointError, MissingTensor, UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.files import first_line
from jdisagg.model.gguf_blocks import Blocks, has_definition
from jdisagg.model.gguf_config import NO_WEIGHTS, model_config
from jdisagg.model.gguf_families import NORMS_PLUS_ONE
from jdisagg.model.gguf_file import Tensor, read_gguf
from jdisagg.model.gguf_views import views_of
from jdisagg.model.names import Index, stage_leaves

CORRECTION = ".e_score_correction_bias"
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
        self._views, self._blocks = views_of(file, config), Blocks()
        found = [*self._tensors.values(), *(tensor for view in self._views.values() for tensor in view.tensors)]
        self._used = {(tensor.path, tensor.start): tensor for tensor in found}  # each once
        unread = [
            name
            for name, tensor in file.tensors.items()
            if (tensor.path, tensor.start) not in self._used and name not in NO_WEIGHTS
        ]
        if unread:
            raise UnsupportedModel(f"{self.place}: tensor {min(unread)} has no place in a {config.family} model here")

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors.keys() | self._views.keys())

    @property
    def label(self) -> str:
        """How the numbers are stored: the kinds of blocks, the one that most bytes are of first."""
        kinds = Counter[str]()
        for tensor in self._used.values():
            kinds[tensor.kind.name] += tensor.num_bytes
        return f"gguf of {', '.join(kind for kind, _ in kinds.most_common())}"

    def stored_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._used.values())

    def num_weights(self) -> int:
        """Numbers in all the network's tensors."""
        return sum(prod(tensor.shape) for tensor in self._used.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._views.get(name) or self._tensors.get(name)
        return None if found is None else found.shape

    def dtype(self, name: str) -> str:
        view = self._views.get(name)
        tensors = (self._tensor(name),) if view is None else view.tensors
        unknown = [tensor.kind.name for tensor in tensors if not has_definition(tensor.kind)]
        return unknown[0] if unknown else "float32"

    def read(self, name: str, index: Index) -> np.ndarray:
        view = self._views.get(name)
        place = self._tensor(name).path if view is None else view.tensors[0].path
        try:
            return self._read(name, index) if view is None else view.read(self._blocks, index)
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"cannot read tensor {name} of {place}: {first_line(error)}") from error

    def _read(self, name: str, index: Index) -> np.ndarray:
        tensor, rows = self._tensors[name], index[0]
        order = self._order(name)
        picked = rows if order is None else order[rows]
        if len(index) > 1:
            return self._blocks.rows(tensor, picked, index[1])
        found = self._blocks.rows(tensor, slice(0, 1), slice(0, prod(tensor.shape)))[0][picked]
        return found - self._norm_offset if name.endswith("norm.weight") else found

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise MissingTensor(f"tensor {name} is not in {self.place}")
        return self._tensors[name]

    def _order(self, name: str) -> np.ndarray | None:
        """Which stored row each of the tensor's rows is; None where they are the same."""
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        projection = name.split(".")[-2]
        if not self._interleaved or projection not in heads:
            return None
        rows = np.arange(self._tensors[name].shape[0])
        return rows.reshape(heads[projection], -1, 2).swapaxes(1, 2).ravel()


def _names(config: ModelConfig, architecture: str) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every tensor that the model may be made of, one of one."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, config.num_layers)
    leaves = stage_leaves(config, range(config.num_layers), 1).values()
    parts = {part.name for leaf in leaves for part in leaf.parts if _is_read(config, part.name)}
    named = {name: _own_name(name) or table.get_name(name, (".weight", ".bias")) for name in parts}
    return {name: stored for name, stored in named.items() if stored is not None}


def _own_name(name: str) -> str | None:
    """Of tensors that the table of names does not know, or not whole."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest.endswith(CORRECTION):
        return f"blk.{layer}.exp_probs_b.bias"
    return f"blk.{layer}.attn_sinks.weight" if rest == "self_attn.sinks" else None


def _is_read(config: ModelConfig, name: str) -> bool:
    """Whether the network has it: biases are for some families only."""
    if not name.endswith(".bias"):
        return True
    if ".mlp." in name:
        router = config.experts is not None and config.experts.router_bias and name.endswith(".router.bias")
        return config.mlp_bias or router
    return config.o_bias if ".o_proj." in name else config.qkv_bias
