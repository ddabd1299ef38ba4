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
from jdisagg.model.names import Index

WEIGHTS = "weights"
CHUNK_BYTES = 16 << 20  # a chunk is the least that is read for a slice


class OrbaxSource:
    """Slices of the tensors in `folder/weights`, read by tensorstore; nothing is ever read whole."""

    def __init__(self, folder: str | Path):
        self._path = (Path(folder) / WEIGHTS).absolute()
        if not self._path.is_dir():
            raise CheckpointError(f"no Orbax checkpoint in {folder}: it has no folder {WEIGHTS}/")
        metadata = _metadata(self._path)
        self._driver = "zarr3" if metadata.use_zarr3 else "zarr"
        self._shapes = {name: tuple(array.shape) for name, array in metadata.tree.items()}

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        if name not in self._shapes:
            raise MissingTensor(f"tensor {name} is not in {self._path}")
        store = {"driver": "ocdbt", "base": f"file://{self._path}", "path": f"{name}/"}
        spec = {"driver": self._driver, "kvstore": store}
        return tensorstore.open(spec, open=True, read=True).result()[index].read().result()


def _metadata(path: Path) -> Any:
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).item_metadata
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the Orbax checkpoint {path}: {error}") from error
    if found is None or not isinstance(found.tree, dict):
        raise CheckpointError(f"the Orbax checkpoint {path} is not a flat tree of named tensors")
    return found


def save_orbax(folder: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes `tensors` (Hugging Face names) to `folder/weights` in chunks of about CHUNK_BYTES."""
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in tensors}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((Path(folder) / WEIGHTS).absolute(), dict(tensors), save_args=save_args)
