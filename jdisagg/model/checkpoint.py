"""Opens a model's configuration, generation defaults and weights, whichever format they are stored in.

A model is a Hugging Face folder, an Orbax folder or a GGUF file. With `--load_format=random` no weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jdisagg.core.errors import CheckpointError, ConfigError, FlagError, MissingTensor
from jdisagg.core.hardware import GIB
from jdisagg.core.layout.kv_layout import DTYPE_BYTES
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.model import hf_config
from jdisagg.model.experts import with_split_experts
from jdisagg.model.files import first_line, regular
from jdisagg.model.gguf import config as gguf_config
from jdisagg.model.gguf.file import is_gguf, read_gguf
from jdisagg.model.gguf.source import GGUFSource
from jdisagg.model.hf_config import GenerationSettings
from jdisagg.model.names import Index, matrix_leaves
from jdisagg.model.quantized.config import ScaledFormat, read_quantization
from jdisagg.model.quantized.source import QuantizedSource
from jdisagg.model.sources import HFSource, RandomSource, TensorSource, stored_channels

# Orbax checkpoints: tensors under their Hugging Face names, stored in chunks so that a shard reads only its slice.
# The weights are in `weights/`; the other files are those of a Hugging Face folder.

WEIGHTS = "weights"
CHUNK_BYTES = 16 << 20  # a chunk is the smallest unit of a read


class OrbaxSource:
    """Slices of the tensors in `folder/weights`, read by tensorstore; no tensor is read whole."""

    def __init__(self, folder: str | Path):
        self._path = (Path(folder) / WEIGHTS).absolute()
        if not self._path.is_dir():
            raise CheckpointError(f"no Orbax checkpoint in {folder}: it has no folder {WEIGHTS}/")
        for path in self._path.rglob("*"):
            if not path.is_dir():
                regular(path)
        metadata = _metadata(self._path)
        self._driver = "zarr3" if metadata.use_zarr3 else "zarr"
        self._arrays = dict(metadata.tree)

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def names(self) -> list[str]:
        return sorted(self._arrays)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._arrays[name].shape) if name in self._arrays else None

    def dtype(self, name: str) -> str:
        return str(self._array(name).dtype)

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            raise MissingTensor(f"tensor {name} is not in {self._path}")
        return self._arrays[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        self._array(name)
        store = {"driver": "ocdbt", "base": f"file://{self._path}", "path": f"{name}/"}
        spec = {"driver": self._driver, "kvstore": store}
        try:
            return tensorstore.open(spec, open=True, read=True).result()[index].read().result()
        except (OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"cannot read tensor {name} of {self._path}: {first_line(error)}") from error


def _metadata(path: Path) -> Any:
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).item_metadata
    except Exception as error:  # orbax raises many types for damaged JSON
        raise CheckpointError(f"cannot read the Orbax checkpoint {path}: {first_line(error)}") from error
    if found is None or not isinstance(found.tree, dict) or not all(map(_is_array, found.tree.values())):
        raise CheckpointError(f"the Orbax checkpoint {path} is not a flat tree of named tensors")
    return found


def _is_array(found: Any) -> bool:
    return getattr(found, "shape", None) is not None and getattr(found, "dtype", None) is not None


def save_orbax(folder: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes `tensors` (Hugging Face names) to `folder/weights` in chunks of about CHUNK_BYTES."""
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in tensors}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((Path(folder) / WEIGHTS).absolute(), dict(tensors), save_args=save_args)


LOAD_FORMATS = ("hf", "orbax", "random")
Stored = HFSource | QuantizedSource | OrbaxSource | GGUFSource


def read_model(place: str | Path) -> ModelConfig:
    """Returns the model's configuration. Raises `CheckpointError`."""
    return gguf_config.model_config(read_gguf(place)) if is_gguf(place) else hf_config.read_config(place)


def read_defaults(place: str | Path) -> GenerationSettings:
    """Returns the model's end tokens and sampling defaults. Raises `CheckpointError`."""
    if is_gguf(place):
        return gguf_config.generation_defaults(read_gguf(place))
    return hf_config.read_generation_config(place)


def open_source(place: str | Path, load_format: str, config: ModelConfig, seed: int = 0) -> TensorSource:
    """Returns the weights of the model at `place`. "random" reads no file: weights follow from `seed` and `config`."""
    if load_format == "random":
        return RandomSource(config, seed)
    if load_format == "hf":
        return GGUFSource(place) if is_gguf(place) else with_split_experts(_hf_source(Path(place)), config)
    if load_format == "orbax":
        return with_split_experts(OrbaxSource(place), config)
    raise FlagError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")


def stored_weights(place: str | Path, load_format: str, config: ModelConfig) -> WeightFormat | None:
    """Returns the weight format of a checkpoint whose quantised matrices can be multiplied as stored.

    Such a checkpoint also quantises activations. Returns None if no matrix can be used as stored. A folder without
    weights is assumed to store all matrices but the head so. Raises `CheckpointError`.
    """
    if load_format != "hf" or is_gguf(place) or not (Path(place) / "config.json").exists():
        return None
    found = read_quantization(Path(place))
    if (
        found is None
        or not found.activations
        or not isinstance(found.scheme, ScaledFormat)
        or found.scheme.block is not None
    ):
        return None
    dtype = found.scheme.of_products
    if not weight_files(place):
        return WeightFormat(dtype, frozenset({"head"}))
    source, matrices = open_source(place, "hf", config), matrix_leaves(config)
    kept = {
        path
        for path, leaf in matrices.items()
        if all(stored_channels(source, part.name, dtype) is not None for part in leaf.parts)
    }
    there = {path for path, leaf in matrices.items() if source.shape(leaf.parts[0].name) is not None}
    return WeightFormat(dtype, frozenset(there - kept)) if kept else None


def storage_line(place: str | Path, dtype: str, weights: WeightFormat = AS_MADE) -> str | None:
    """Returns a line about the size of quantised weights in files and in memory; None if the weights are plain.

    `weights` is the requested format of the matrices, which may be the stored one. `dtype` is the dtype after
    dequantisation.
    """
    source = stored_source(place)
    if not isinstance(source, QuantizedSource | GGUFSource):
        return None
    if isinstance(source, QuantizedSource) and source.is_kept(weights.dtype):
        return f"{source.scheme_label}: {size_text(source.stored_bytes())} in files, multiplied as they are stored"
    stored, held = size_text(source.stored_bytes()), size_text(source.num_weights() * DTYPE_BYTES[dtype])
    return f"{source.label}: {stored} in files, dequantised on load to {held} of {dtype} in each worker"


def size_text(size_bytes: int) -> str:
    """Returns the size as "1.25 GiB", or in MiB below one GiB."""
    return f"{size_bytes / GIB:,.2f} GiB" if size_bytes >= GIB else f"{size_bytes / (1 << 20):,.2f} MiB"


def stored_source(place: str | Path) -> Stored:
    """Returns the weights at `place`: GGUF, Orbax or Hugging Face."""
    if is_gguf(place):
        return GGUFSource(place)
    return OrbaxSource(place) if (Path(place) / WEIGHTS).is_dir() else _hf_source(Path(place))


def _hf_source(folder: Path) -> HFSource | QuantizedSource:
    """Returns a source of plain tensors, dequantising the folder's weights if they are quantised."""
    found = read_quantization(folder) if (folder / "config.json").exists() else None
    return HFSource(folder) if found is None else QuantizedSource(HFSource(folder), found)


def weight_files(place: str | Path) -> list[Path]:
    """Returns the files that hold the weights, sorted by name; Orbax files are not listed."""
    if is_gguf(place):
        return sorted({tensor.path for tensor in read_gguf(place).tensors.values()})
    return sorted(Path(place).glob("*.safetensors"))


def why_no_model(place: Path) -> str | None:
    """Returns the reason why `place` cannot be a model, without reading it; None if it may be one."""
    if is_gguf(place) or (place / "config.json").exists():
        return None
    if place.is_file():
        return "a model is a folder, or a file whose name ends in .gguf"
    found = sorted(path.name for path in place.glob("*.gguf")) if place.is_dir() else []
    return "there is no config.json in that folder" + (f"; name its file {found[0]}" if found else "")


def read_sharing_vocabulary(folder: Path, vocab_size: int, label: str) -> ModelConfig:
    """Returns the configuration of a model that must share a vocabulary of `vocab_size`; `label` names it in errors.
    Raises CheckpointError if there is no model, ConfigError if its vocabulary differs."""
    why = why_no_model(folder)
    if why is not None:
        raise CheckpointError(f"{label}: {why}")
    found = read_model(folder)
    if found.vocab_size != vocab_size:
        raise ConfigError(
            f"{label} has a vocabulary of {found.vocab_size} tokens and the model beside it one of {vocab_size}: both"
            " must read the same tokens"
        )
    return found
