"""Where tensors come from: a Hugging Face folder or a seed (an Orbax checkpoint: `orbax_source.py`).

A source hands out slices, by the checkpoint's own tensor names, and keeps nothing it handed out.
"""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open

from jdisagg.core.errors import CheckpointError, MissingTensor
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.hf_config import read_json
from jdisagg.model.names import Index, stage_leaves

INDEX_FILE = "model.safetensors.index.json"
BLOCK_ROWS = 256  # rows that one generator of a `RandomSource` draws


class Source(Protocol):
    """Read-only tensors by name."""

    @property
    def place(self) -> str:
        """Where this reads from, for messages."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's whole shape, or None if there is no such tensor."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice [start:stop of every dimension], in the stored dtype. Raises `MissingTensor`."""
        ...


class HFSource:
    """The safetensors of one folder, one file or many; only the bytes of a slice are read from disk."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._file_of = _files_of_tensors(self.folder)
        self._open: dict[Path, Any] = {}

    @property
    def place(self) -> str:
        return str(self.folder)

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._slice(name).get_shape()) if name in self._file_of else None

    def read(self, name: str, index: Index) -> np.ndarray:
        if name not in self._file_of:
            raise MissingTensor(f"tensor {name} is in no file of {self.folder}")
        return self._slice(name)[index]

    def _slice(self, name: str) -> Any:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path].get_slice(name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy").__enter__()
    except Exception as error:  # safetensors raises its own bare Exception subclass; OSError comes out as itself
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index where there is one, else from the files themselves."""
    if not folder.is_dir():
        raise CheckpointError(f"no folder {folder}")
    if (folder / INDEX_FILE).exists():
        return {name: folder / file for name, file in read_json(folder / INDEX_FILE)["weight_map"].items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}; for weights from a seed: --load_format=random")
    return {name: path for path in files for name in _opened(path).keys()}  # noqa: SIM118 (not a dict)


class RandomSource:
    """Weights from a seed, the same for every way of cutting them: norms 1, biases small, matrices 1/sqrt(inputs).

    Each block of 256 rows of a tensor has its own generator, keyed by seed, name and block, so a slice costs only
    its own rows.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.seed = seed
        leaves = stage_leaves(config, range(config.num_layers), 1).values()
        self._shapes = {part.name: part.shape for leaf in leaves for part in leaf.parts}

    @property
    def place(self) -> str:
        return f"random weights of seed {self.seed}"

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        shape, rows = self._shapes[name], index[0]
        if "norm" in name:
            return np.ones(rows.stop - rows.start, np.float32)
        first, last = rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)
        blocks = np.concatenate([self._block(name, shape, block) for block in range(first, last)])
        offset = first * BLOCK_ROWS
        return blocks[(slice(rows.start - offset, rows.stop - offset), *index[1:])]

    def _block(self, name: str, shape: tuple[int, ...], block: int) -> np.ndarray:
        digest = hashlib.sha256(f"{self.seed}/{name}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
        scale = np.float32(0.02 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5)
        return (
            generator.standard_normal((min(BLOCK_ROWS, shape[0] - block * BLOCK_ROWS), *shape[1:]), np.float32) * scale
        )
