"""Sources of tensors: a Hugging Face folder, or random weights from a seed (Orbax: `checkpoint.py`).

A source returns slices by the checkpoint's tensor names and does not cache them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jdisagg.core.errors import CheckpointError, MissingTensor
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.files import JsonFields, plain_name, read_json, regular
from jdisagg.model.names import Index, stage_leaves

INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("float16", "bfloat16", "float32", "float64")  # dtypes of plain weights
STORED = {  # safetensors' name -> dtype
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}
OCTETS = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # safetensors cannot slice these for numpy
BLOCK_ROWS = 256  # rows that one generator of a `RandomSource` generates


class TensorSource(Protocol):
    """A read-only collection of tensors by name."""

    @property
    def place(self) -> str:
        """Location of the tensors, for messages."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the tensor's whole shape, or None if there is no such tensor."""
        ...

    def dtype(self, name: str) -> str:
        """Returns the stored dtype: one of FLOATS, or another name. Raises `MissingTensor`."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns the slice [start:stop of every dimension] in the stored dtype. Raises `MissingTensor`."""
        ...


class StoredChannels(Protocol):
    """A matrix [out, in] stored in int8 or fp8 with one scale per output channel, or one for the tensor."""

    @property
    def dtype(self) -> str:
        """The dtype as named in `products.py`: "int8" or "fp8"."""
        ...

    def numbers(self, index: Index) -> np.ndarray:
        """Returns a slice of the numbers as stored."""
        ...

    def scales(self, rows: slice) -> np.ndarray:
        """Returns the scales of some rows, f32[rows]."""
        ...


@runtime_checkable
class ScaledSource(Protocol):
    """A source that stores some tensors quantised with scales."""

    def channels(self, name: str) -> StoredChannels | None:
        """Returns the stored numbers and scales if a product can use them directly; else None."""
        ...


def stored_channels(source: TensorSource, name: str, dtype: str) -> StoredChannels | None:
    """Returns the stored numbers and scales of a tensor if they are in `dtype`; else None."""
    found = source.channels(name) if isinstance(source, ScaledSource) else None
    return found if found is not None and found.dtype == dtype else None


class HFSource:
    """The safetensors of a folder, in one file or many; only the bytes of a slice are read from disk."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._file_of = _files_of_tensors(self.folder)
        self._open: dict[Path, Any] = {}
        self._spans: dict[Path, dict[str, tuple[int, int]]] = {}

    @property
    def place(self) -> str:
        return str(self.folder)

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._slice(name).get_shape()) if name in self._file_of else None

    def dtype(self, name: str) -> str:
        stored = str(self._slice(name).get_dtype())
        return STORED.get(stored, stored)

    def read(self, name: str, index: Index) -> np.ndarray:
        found = self._slice(name)
        try:
            return self._read_octets(name, found, index) if found.get_dtype() in OCTETS else found[index]
        except Exception as error:  # the file changed after it was opened
            raise CheckpointError(f"cannot read tensor {name} of {self._file_of[name]}: {error}") from error

    def num_bytes(self, name: str) -> int:
        self._slice(name)
        start, stop = self._span(name)
        return stop - start

    def _read_octets(self, name: str, found: Any, index: Index) -> np.ndarray:
        path, (start, _) = self._file_of[name], self._span(name)
        whole = np.memmap(path, np.uint8, "r", start, tuple(found.get_shape()))
        return np.array(whole[index]).view(OCTETS[found.get_dtype()])

    def _span(self, name: str) -> tuple[int, int]:
        """Returns the byte range of a tensor in its file, whose header safetensors has validated."""
        path = self._file_of[name]
        if path not in self._spans:
            self._spans[path] = _spans(path)
        return self._spans[path][name]

    def _slice(self, name: str) -> Any:
        path = self._file_of.get(name)
        if path is None:
            raise MissingTensor(f"tensor {name} is in no file of {self.folder}")
        if path not in self._open:
            self._open[path] = _opened(path)
        try:
            return self._open[path].get_slice(name)
        except Exception as error:  # as in `_opened`
            raise MissingTensor(f"tensor {name} is not in {path}, where {INDEX_FILE} says it is") from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(regular(path), framework="numpy").__enter__()
    except CheckpointError:
        raise
    except Exception as error:  # safetensors raises its own subclass of Exception
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + size + start, 8 + size + stop) for name, (start, stop) in offsets.items()}


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Returns tensor name -> file, from the index if there is one, else from the files' headers."""
    if not folder.is_dir():
        raise CheckpointError(f"no folder {folder}")
    if (folder / INDEX_FILE).exists():
        return _indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}; for weights from a seed: --load_format=random")
    return {name: path for path in files for name in _opened(path).keys()}  # noqa: SIM118 (not a dict)


def _indexed(folder: Path) -> dict[str, Path]:
    """Returns tensor name -> file from the index, which may name only files of its own folder."""
    index = folder / INDEX_FILE
    files = JsonFields(read_json(index), str(index)).part("weight_map")
    if files is None:
        raise CheckpointError(f"{index} has no weight_map")
    return {name: folder / plain_name(file, f"{index}, weight_map, {name}") for name, file in files.raw.items()}


class RandomSource:
    """Random weights from a seed, independent of the cut: norms 1, biases small, matrices 1/sqrt(inputs).

    Each block of 256 rows (with all experts in one tensor: each expert) has its own generator, keyed by seed, name and
    block, so a slice generates only its own blocks.
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

    def dtype(self, name: str) -> str:
        return "float32"

    def read(self, name: str, index: Index) -> np.ndarray:
        shape, rows = self._shapes[name], index[0]
        if "norm" in name:
            return np.ones(rows.stop - rows.start, np.float32)
        block_rows = _block_rows(shape)
        first, last = rows.start // block_rows, -(-rows.stop // block_rows)
        blocks = np.concatenate([self._block(name, shape, block) for block in range(first, last)])
        offset = first * block_rows
        return blocks[(slice(rows.start - offset, rows.stop - offset), *index[1:])]

    def _block(self, name: str, shape: tuple[int, ...], block: int) -> np.ndarray:
        digest = hashlib.sha256(f"{self.seed}/{name}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
        scale = np.float32(0.02 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5)
        block_rows = _block_rows(shape)
        return (
            generator.standard_normal((min(block_rows, shape[0] - block * block_rows), *shape[1:]), np.float32) * scale
        )


def _block_rows(shape: tuple[int, ...]) -> int:
    """Returns the rows of a block. In a tensor of all experts a row is a whole matrix, so a block is one row."""
    return BLOCK_ROWS if len(shape) < 3 else 1
