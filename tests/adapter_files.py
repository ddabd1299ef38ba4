"""Adapters for the tests: folders as PEFT writes them, and the model that each comes to when it is merged."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Adapter
from jdisagg.model.lora import AdapterWeights, adapted_leaves, identified, read_adapter, target_of
from jdisagg.model.names import Index
from jdisagg.model.sources import TensorSource

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 4.0  # of lora_alpha, that tokens may differ


def write_adapter(
    folder: Path,
    model: ModelConfig,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    layers: Iterable[int] | None = None,
    change: Mapping[str, Any] | None = None,
    strength: float = STRENGTH,
) -> Path:
    """Random matrices for these targets of these layers (all); `change` replaces fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for layer in range(model.num_layers) if layers is None else layers:
        for leaf in adapted_leaves(model, layer).values():
            for part in leaf.parts:
                name = f"base_model.model.model.layers.{layer}.{target_of(part)}"
                if target_of(part).rpartition(".")[2] in targets:
                    out, inside = part.shape
                    tensors[f"{name}.lora_A.weight"] = generator.normal(0, inside**-0.5, (rank, inside)).astype("f4")
                    tensors[f"{name}.lora_B.weight"] = generator.normal(0, rank**-0.5, (out, rank)).astype("f4")
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": strength * rank**0.5, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "bias": "none", **(change or {})}))
    return folder


def adapters_in(root: Path, model: ModelConfig, number: int, **how: Any) -> list[Adapter]:
    """So many different ones."""
    return [
        identified(f"adapter-{seed}", str(write_adapter(root / f"adapter-{seed}", model, seed, **how)))
        for seed in range(number)
    ]


@dataclass(frozen=True)
class Merged:
    """A source whose matrices have an adapter's added to them."""

    source: TensorSource
    weights: AdapterWeights

    @property
    def place(self) -> str:
        return f"{self.source.place} with {self.weights.adapter.name}"

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.source.shape(name)

    def dtype(self, name: str) -> str:
        return self.source.dtype(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        found, parts = self.source.read(name, index), name.split(".")
        if parts[:2] != ["model", "layers"]:
            return found
        pair = self.weights.pairs.get((int(parts[2]), ".".join(parts[3:-1])))
        # Not rounded again: what a checkpoint stores in two bytes is read exactly, and the adapter added to that.
        return found if pair is None else found.astype(np.float32) + (pair.b @ pair.a)[index]


def merged(source: TensorSource, adapter: Adapter, model: ModelConfig) -> Merged:
    return Merged(source, read_adapter(adapter, model, max_rank=64))
