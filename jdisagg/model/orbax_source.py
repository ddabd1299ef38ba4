"""Orbax checkpoints of a model: tensors under their Hugging Face names, in chunks, so that a shard reads its own part.

A folder holds the weights in `weights/` and beside them the same files a Hugging Face folder has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jdisagg.core.errors import CheckpointError, MissingTensor
from jdisagg.model.files import first_line, regular
from jdisagg.model.names import Index

WEIGHTS = "weights"
CHUNK_BYTES = 16 << 20  # a chunk is the least that is read for a slice


class OrbaxSource:
    """Slices of the tensors in `folder/weights`, read by tensorstore; nothing is ever read whole."""

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
    except Exception as error:  # whatever the JSON of a damaged checkpoint makes orbax raise
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
