"""Checkpoints whose experts are one tensor for each matrix, read by the names of those where each expert has its own.

transformers 5 writes either: `mlp.experts.gate_up_proj` [experts, 2 * width, hidden], gate rows before up rows, and
`mlp.experts.down_proj` [experts, hidden, width] are what it computes with, and are split on saving unless told not to.
"""

from __future__ import annotations

import re
from itertools import product

import numpy as np

from jdisagg.core.errors import MissingTensor, WrongShape
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families import EXPERT_NAMES
from jdisagg.model.names import Index
from jdisagg.model.sources import ScaledSource, Source, StoredChannels

BLOCK = "mlp"  # what transformers calls every family's experts by
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class FusedExperts:
    """`source`, with a tensor for each expert in place of one of all."""

    def __init__(self, source: Source, config: ModelConfig):
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
        """Raises `MissingTensor`, `WrongShape` of the tensor of all experts: an expert's own name is in no file."""
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
        """Its name in the checkpoint; for an expert's matrix also which it is, and its rows."""
        found = self._expert.fullmatch(name)
        if found is None:
            return name.replace(self._block, f".{BLOCK}."), None, range(0)
        tensor, rows = self._rows[found[3]]
        return f"{found[1]}.{BLOCK}.experts.{tensor}", int(found[2]), rows


def with_split_experts(source: Source, config: ModelConfig) -> Source:
    """`source` as the leaves' names ask for it, whichever way its experts are stored."""
    sparse = [layer for layer in range(config.num_layers) if config.is_sparse(layer)]
    if not sparse or EXPERT_NAMES[config.family].fused:
        return source
    names = (f"model.layers.{layer}.{BLOCK}.experts.{name}" for layer, name in product(sparse, (GATE_UP, DOWN)))
    return FusedExperts(source, config) if any(source.shape(name) is not None for name in names) else source
