"""The numbers of a model, which may be a name, a folder, or nothing at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.hf_config import read_config
from jdisagg.sim.arithmetic import model

EMBEDDED = Path(__file__).parent.parent / "embedded"


def model_of(name: str) -> ModelConfig:
    """Of a name of `sim/arithmetic.py`, a Hugging Face folder, or "", the embedded model. Raises ConfigError or
    CheckpointError."""
    folder = Path(name) if name else EMBEDDED
    return replace(read_config(folder), family=folder.name) if folder.is_dir() else model(name)
