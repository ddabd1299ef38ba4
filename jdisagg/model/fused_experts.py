"""Checkpoints whose experts are one tensor for each matrix, read by the names of those where each expert has its own.

transformers 5 writes either: `mlp.experts.gate_up_proj` [experts, 2 * width, hidden], gate rows before up rows, and
`mlp.experts.down_proj` [experts, hidden, width] are what it computes with, and are split on saving unless told not to.
"""

from __future__ import annotations

import re

import numpy as np

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families import EXPERT_NAMES
from jdisagg.model.names import Index
from jdisagg.model.sources import Source

BLOCK = "mlp"  # what transformers calls every family's experts by


class FusedExperts:
    """`source`, with a tensor for each expert in place of one of all."""

    def __init__(self, source: Source, config: ModelConfig):
        assert config.experts is not None, config
        names = EXPERT_NAMES[config.family]
        gate, up, down = names.matrices
        matrices, width, hidden = "|".join(names.matrices), config.experts.width, config.hidden_size
        self._source, self._block = source, f".{names.block}."
        self._expert = re.compile(rf"(model\.layers\.\d+)\.{names.block}\.experts\.(\d+)\.({matrices})\.weight")
        self._rows = {
            gate: ("gate_up_proj", range(width)),
            up: ("gate_up_proj", range(width, 2 * width)),
            down: ("down_proj", range(hidden)),
        }

    @property
    def place(self) -> str:
        return self._source.place

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored, expert, rows = self._stored(name)
        found = self._source.shape(stored)
        if expert is None or found is None or len(found) != 3:
            return found
        held = len(range(found[1])[rows.start : rows.stop])
        return (held, found[2]) if expert < found[0] else None

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._stored(name)[0])

    def read(self, name: str, index: Index) -> np.ndarray:
        stored, expert, rows = self._stored(name)
        if expert is None:
            return self._source.read(stored, index)
        first, *others = index
        within = slice(rows.start + first.start, rows.start + first.stop)
        return self._source.read(stored, (slice(expert, expert + 1), within, *others))[0]

    def _stored(self, name: str) -> tuple[str, int | None, range]:
        """Its name in the checkpoint; for an expert's matrix also which it is, and its rows."""
        found = self._expert.fullmatch(name)
        if found is None:
            return name.replace(self._block, f".{BLOCK}."), None, range(0)
        tensor, rows = self._rows[found[3]]
        return f"{found[1]}.{BLOCK}.experts.{tensor}", int(found[2]), rows


def with_split_experts(source: Source, config: ModelConfig) -> Source:
    """`source` as the leaves' names ask for it, whichever way its experts are stored."""
    sparse = [layer for layer, _ in config.layer_kinds() if config.is_sparse(layer)]
    if not sparse or EXPERT_NAMES[config.family].fused:
        return source
    fused = source.shape(f"model.layers.{sparse[0]}.{BLOCK}.experts.gate_up_proj") is not None
    return FusedExperts(source, config) if fused else source
