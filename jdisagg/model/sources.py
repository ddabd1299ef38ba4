"""Where tensors come from: a Hugging Face folder or a seed (an Orbax checkpoint: `orbax_source.py`).

A source hands out slices, by the checkpoint's own tensor names, and keeps nothing it handed out.
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
from jdisagg.model.files import Fields, plain_name, read_json, regular
from jdisagg.model.names import Index, stage_leaves

INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("float16", "bfloat16", "float32", "float64")  # what weights may be
STORED = {  # as safetensors names them
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
OCTETS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}  # safetensors' numpy has no slices
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

    def dtype(self, name: str) -> str:
        """How a tensor's numbers are stored: one of FLOATS, or another name. Raises `MissingTensor`."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice [start:stop of every dimension], in the stored dtype. Raises `MissingTensor`."""
        ...


class StoredChannels(Protocol):
    """A matrix [out, in] that is stored in int8 or fp8 with a scale an output channel, or one for all of them."""

    @property
    def dtype(self) -> str:
        """ "int8" or "fp8", as of products."""
        ...

    def numbers(self, index: Index) -> np.ndarray:
        """As they are stored."""
        ...

    def scales(self, rows: slice) -> np.ndarray:
        """f32[rows]."""
        ...


@runtime_checkable
class ScaledSource(Protocol):
    """A source of which some tensors are stored scaled."""

    def channels(self, name: str) -> StoredChannels | None:
        """Where the tensor is stored so that a product can take it as it is."""
        ...


def stored_channels(source: Source, name: str, dtype: str) -> StoredChannels | None:
    """The tensor as it is stored, where that is `dtype` with a scale a channel."""
    found = source.channels(name) if isinstance(source, ScaledSource) else None
    return found if found is not None and found.dtype == dtype else None


class HFSource:
    """The safetensors of one folder, one file or many; only the bytes of a slice are read from disk."""

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
        except Exception as error:  # the file is not what it was when it was opened
            raise CheckpointError(f"cannot read tensor {name} of {self._file_of[name]}: {error}") from error

    def num_bytes(self, name: str) -> int:
        """That the tensor takes in its file."""
        self._slice(name)
        start, stop = self._span(name)
        return stop - start

    def _read_octets(self, name: str, found: Any, index: Index) -> np.ndarray:
        path, (start, _) = self._file_of[name], self._span(name)
        whole = np.memmap(path, np.uint8, "r", start, tuple(found.get_shape()))
        return np.array(whole[index]).view(OCTETS[found.get_dtype()])

    def _span(self, name: str) -> tuple[int, int]:
        """First and last byte + 1 of a tensor in its file, which safetensors has found to be sound."""
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
    except Exception as error:  # safetensors raises its own bare Exception subclass; OSError comes out as itself
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + size + start, 8 + size + stop) for name, (start, stop) in places.items()}


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index where there is one, else from the files themselves."""
    if not folder.is_dir():
        raise CheckpointError(f"no folder {folder}")
    if (folder / INDEX_FILE).exists():
        return _indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}; for weights from a seed: --load_format=random")
    return {name: path for path in files for name in _opened(path).keys()}  # noqa: SIM118 (not a dict)


def _indexed(folder: Path) -> dict[str, Path]:
    """As the index says. It names files of its own folder only (a link among them may lead elsewhere)."""
    index = folder / INDEX_FILE
    places = Fields(read_json(index), str(index)).part("weight_map")
    if places is None:
        raise CheckpointError(f"{index} has no weight_map")
    return {name: folder / plain_name(file, f"{index}, weight_map, {name}") for name, file in places.raw.items()}


class RandomSource:
    """Weights from a seed, the same for every way of cutting them: norms 1, biases small, matrices 1/sqrt(inputs).

    Each block of 256 rows of a tensor (of a tensor of all experts: each expert) has its own generator, keyed by seed,
    name and block, so a slice costs only its own rows.
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
        high = _block_rows(shape)
        first, last = rows.start // high, -(-rows.stop // high)
        blocks = np.concatenate([self._block(name, shape, block) for block in range(first, last)])
        offset = first * high
        return blocks[(slice(rows.start - offset, rows.stop - offset), *index[1:])]

    def _block(self, name: str, shape: tuple[int, ...], block: int) -> np.ndarray:
        digest = hashlib.sha256(f"{self.seed}/{name}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
        scale = np.float32(0.02 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5)
        high = _block_rows(shape)
        return generator.standard_normal((min(high, shape[0] - block * high), *shape[1:]), np.float32) * scale


def _block_rows(shape: tuple[int, ...]) -> int:
    """A row of a tensor of all experts is a matrix."""
    return BLOCK_ROWS if len(shape) < 3 else 1
