"""Reads GGUF files: metadata, tensor positions, and dequantised blocks; split files form one model.

The header is parsed here because the `gguf` package's reader takes four seconds for a vocabulary of 50,000 and trusts
every length in the file. An inconsistent file is a `CheckpointError` in one line.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jdisagg.core.errors import CheckpointError, WrongDtype, WrongShape
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families import EXPERT_NAMES
from jdisagg.model.files import JsonFields, regular, shown
from jdisagg.model.names import Index

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
MOST_ENTRIES, MOST_TENSORS, MOST_DIMENSIONS, MOST_FILES = 1 << 16, 1 << 20, 4, 1 << 10
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
KIND_NAMES = ", ".join(kind.name for kind in GGMLQuantizationType)


def is_gguf(place: str | Path) -> bool:
    return Path(place).suffix.lower() == ".gguf" and not Path(place).is_dir()


def gguf_name(place: Path) -> str:
    """Returns the model's name from its file name, without the suffix of a split file."""
    split = SPLIT_NAME.fullmatch(place.name)
    return split[1] if split else place.stem


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The position of a tensor in a file. `shape` is in numpy's order, in blocks of `kind` along the last dimension."""

    path: Path
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # byte offset in the file
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """One model: the metadata of its first file and the tensors of all files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    fields: JsonFields = field(init=False, repr=False)  # the metadata with type and range checks

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", JsonFields(self.metadata, str(self.path)))

    @property
    def architecture(self) -> str:
        return self.fields.word("general.architecture") or ""

    def own(self, key: str) -> str:
        """Returns the full name of an architecture-specific key."""
        return f"{self.architecture}.{key}"


def read_gguf(place: str | Path) -> GGUFFile:
    """Reads the model of a file, or of all files of a split model (`-00001-of-0000N.gguf`)."""
    paths = _parts(Path(place))
    files = [_HeaderParser(path).read() for path in paths]
    for number, found in enumerate(files):
        _check_part(found, number, len(paths))
    tensors: dict[str, GGUFTensor] = {}
    for found in files:
        duplicates = tensors.keys() & found.tensors.keys()
        if duplicates:
            raise CheckpointError(
                f"{found.path} has tensor {min(duplicates)}, which another file of this model has as well"
            )
        tensors |= found.tensors
    stated_count = files[0].fields.whole("split.tensors.count", 0, MOST_TENSORS)
    if stated_count is not None and stated_count != len(tensors):
        raise CheckpointError(f"{paths[0]} says split.tensors.count = {stated_count}; its files have {len(tensors)}")
    return GGUFFile(paths[0], files[0].metadata, tensors)


def _parts(path: Path) -> list[Path]:
    """Returns all files of the model that `path` belongs to, in order."""
    regular(path)
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name[3])
    if not 1 <= count <= MOST_FILES:
        raise CheckpointError(f"{path} is named as one of {count} files; at most {MOST_FILES} are read")
    paths = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}{path.suffix}") for number in range(1, count + 1)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} files; missing beside it: {', '.join(missing[:3])}")
    return [regular(each) for each in paths]


def _check_part(found: GGUFFile, number: int, count: int) -> None:
    numbers = found.fields.whole("split.no", 0, 1 << 16), found.fields.whole("split.count", 0, 1 << 16)
    if (numbers[0] or 0, numbers[1] or 1) != (number, count):
        raise CheckpointError(
            f"{found.path} says split.no = {numbers[0]}, split.count = {numbers[1]};"
            f" by its name it is {number} of {count}"
        )


class _HeaderParser:
    """Parser of one file's header, from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        try:
            with path.open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error

    def read(self) -> GGUFFile:
        found = bytes(self._data[:4])
        if found != MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file: it begins with {found!r}; needed: {MAGIC!r}")
        self._take(4, "its magic")
        version = self._number("I", "its version")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF of version {version}; read are {VERSIONS[0]} and {VERSIONS[1]}"
            )
        num_tensors = self._count("tensors", MOST_TENSORS)
        metadata = self._metadata(self._count("metadata entries", MOST_ENTRIES))
        infos = self._tensor_infos(num_tensors)
        alignment = JsonFields(metadata, str(self._path)).whole("general.alignment", 1, 1 << 20) or ALIGNMENT
        begin = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, begin, *info) for name, info in infos.items()}
        return GGUFFile(self._path, metadata, tensors)

    def _take(self, size: int, what: str) -> memoryview:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated: {what} needs {size} bytes from {begin} on, the file has {len(self._data)}"
            )
        return self._data[begin : self._at]

    def _number(self, kind: str, what: str) -> Any:
        return struct.unpack("<" + kind, self._take(struct.calcsize(kind), what))[0]

    def _count(self, what: str, most: int) -> int:
        found = self._number("Q", f"the number of {what}")
        if found > most:
            raise CheckpointError(f"{self._path} says it has {found} {what}; at most {most} are read")
        return found

    def _text(self, what: str) -> str:
        size = self._number("Q", what)
        raw = bytes(self._take(size, what))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not UTF-8 text: {error}") from error

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in range(count):
            key = self._text(f"the name of metadata entry {index}")
            if key in found:
                raise CheckpointError(f"{self._path} has {shown(key)} twice")
            found[key] = self._value(self._number("I", f"the kind of {key}"), key)
        return found

    def _value(self, kind: int, key: str) -> Any:
        if kind == TEXT:
            return self._text(key)
        if kind == ARRAY:
            return self._array(key)
        return self._number(self._scalar(kind, key), key)

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in SCALARS:
            raise CheckpointError(f"{self._path}: {shown(key)} is of unknown kind {kind}; needed: 0 to 12")
        return SCALARS[kind]

    def _array(self, key: str) -> list[Any]:
        kind, length = self._number("I", f"the kind of {key}"), self._number("Q", f"the length of {key}")
        if kind == ARRAY:
            raise CheckpointError(f"{self._path}: {shown(key)} is an array of arrays, which none of the known keys is")
        if kind == TEXT:
            self._take(8 * length, f"{key} ({length} texts)")  # each has its length at least
            self._at -= 8 * length
            return [self._text(key) for _ in range(length)]
        letter = self._scalar(kind, key)
        return np.frombuffer(self._take(struct.calcsize(letter) * length, key), f"<{letter}").tolist()

    def _tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Returns (shape, kind, offset) of each tensor by name."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            name = self._text(f"the name of tensor {index}")
            if name in found:
                raise CheckpointError(f"{self._path} has tensor {shown(name)} twice")
            num = self._number("I", name)
            if not 1 <= num <= MOST_DIMENSIONS:
                raise CheckpointError(f"{self._path}: tensor {name} has {num} dimensions; needed: 1 to 4")
            shape = tuple(self._number("Q", name) for _ in range(num))
            found[name] = shape[::-1], self._number("I", name), self._number("Q", name)
        return found

    def _tensor(self, name: str, begin: int, shape: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise WrongDtype(
                f"{self._path}: tensor {name} is of unknown quantisation {number}; known are {KIND_NAMES}"
            ) from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block or not all(shape):
            raise CheckpointError(
                f"{self._path}: tensor {name} of shape {shape} is no whole number of blocks of {block} ({kind.name})"
            )
        start, size = begin + offset, math.prod(shape) // block * block_bytes
        if start + size > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated: tensor {name} lies in bytes {start} to {start + size},"
                f" the file has {len(self._data)}"
            )
        return GGUFTensor(self._path, shape, kind, start, size)


# Rows of memory-mapped tensors; only the requested blocks are dequantised.

STRIP_BYTES = 1 << 15  # bytes dequantised at once: with temporaries, about the size of a CPU cache


class MappedFiles:
    """The memory-mapped files of one model."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.ndarray] = {}

    def rows(self, tensor: GGUFTensor, picked: slice | np.ndarray, columns: slice) -> np.ndarray:
        """Returns f32[picked, columns] of a tensor flattened to two dimensions; a vector is one row."""
        stored = self._bytes(tensor).reshape(prod(tensor.shape[:-1]), -1)
        return _columns(stored[picked], tensor.kind, columns)

    def _bytes(self, tensor: GGUFTensor) -> np.ndarray:
        if tensor.path not in self._maps:
            self._maps[tensor.path] = np.memmap(tensor.path, np.uint8, "r")
        return self._maps[tensor.path][tensor.start : tensor.start + tensor.num_bytes]


@cache
def has_definition(kind: GGMLQuantizationType) -> bool:
    """Returns True if blocks of this kind can be dequantised."""
    try:
        _numbers(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _columns(rows: np.ndarray, kind: GGMLQuantizationType, columns: slice) -> np.ndarray:
    """Returns f32[rows, columns] of rows of blocks, reading only the blocks that contain the columns."""
    block, size = GGML_QUANT_SIZES[kind]
    first, last = columns.start // block, -(-columns.stop // block)
    found = _numbers(rows[:, first * size : last * size], kind).reshape(len(rows), -1)
    return found[:, columns.start - first * block : columns.stop - first * block]


def _numbers(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Dequantises blocks strip by strip into one f32 vector."""
    size = GGML_QUANT_SIZES[kind][1]
    blocks = np.ascontiguousarray(stored).reshape(-1, size)
    step = max(1, STRIP_BYTES // size)
    strips = [dequantize(blocks[at : at + step].reshape(1, -1), kind) for at in range(0, len(blocks), step)]
    return np.concatenate([strip.ravel() for strip in strips]).astype(np.float32, copy=False)


# Tensors that a GGUF file stores in another layout: all experts of a matrix in one tensor, and the matrix from
# latents to keys and values, which newer files split in two.

MATRICES = ("gate", "up", "down")


class TensorView(Protocol):
    """One checkpoint tensor, computed from `tensors` of the file."""

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, blocks: MappedFiles, index: Index) -> np.ndarray:
        """Returns the slice `index` of the checkpoint tensor, in f32."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertView:
    """One expert's matrix [out, in] of a tensor [experts, out, in]."""

    tensor: GGUFTensor
    expert: int

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[1:]

    def read(self, blocks: MappedFiles, index: Index) -> np.ndarray:
        first = self.expert * self.shape[0]
        return blocks.rows(self.tensor, slice(first + index[0].start, first + index[0].stop), index[1])


@dataclass(frozen=True, slots=True)
class InterleavedView:
    """gpt-oss' [experts, in, out] from tensors [experts, out, in] with interleaved outputs; or a bias [experts,
    out]."""

    tensors: tuple[GGUFTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, *inputs = self.tensors[0].shape
        return (experts, *inputs, len(self.tensors) * outputs)

    def read(self, blocks: MappedFiles, index: Index) -> np.ndarray:
        experts, *inputs, outputs = index
        numbers = range(experts.start, experts.stop)
        return np.ascontiguousarray(np.stack([self._expert(blocks, each, inputs) for each in numbers])[..., outputs])

    def _expert(self, blocks: MappedFiles, expert: int, inputs: list[slice]) -> np.ndarray:
        size = self.tensors[0].shape[1]
        if not inputs:
            rows = [blocks.rows(each, slice(expert, expert + 1), slice(0, size))[0] for each in self.tensors]
            return np.stack(rows, axis=-1).ravel()
        own = slice(expert * size, (expert + 1) * size)
        return np.stack([blocks.rows(each, own, inputs[0]).T for each in self.tensors], axis=-1).reshape(
            inputs[0].stop - inputs[0].start, -1
        )


@dataclass(frozen=True, slots=True)
class KVHeadView:
    """`kv_b_proj` [heads * (keys + values), rank], from keys [heads, rank, keys] and values [heads, values, rank]."""

    keys: GGUFTensor
    values: GGUFTensor

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        return self.keys, self.values

    @property
    def shape(self) -> tuple[int, ...]:
        heads, rank, keys = self.keys.shape
        return heads * (keys + self.values.shape[1]), rank

    def read(self, blocks: MappedFiles, index: Index) -> np.ndarray:
        (_, rank, keys), values = self.keys.shape, self.values.shape[1]
        size = keys + values
        first, last = index[0].start // size, -(-index[0].stop // size)
        up = blocks.rows(self.keys, slice(first * rank, last * rank), slice(0, keys)).reshape(-1, rank, keys)
        out = blocks.rows(self.values, slice(first * values, last * values), slice(0, rank)).reshape(-1, values, rank)
        rows = np.concatenate([up.swapaxes(1, 2), out], axis=1).reshape(-1, rank)
        return rows[index[0].start - first * size : index[0].stop - first * size, index[1]]


def views_of(file: GGUFFile, config: ModelConfig) -> dict[str, TensorView]:
    """Returns views by checkpoint name. Raises `WrongShape`, naming the file's tensor, if a shape differs."""
    return {name: view for layer in range(config.num_layers) for name, view in _layer_views(file, config, layer)}


def _layer_views(file: GGUFFile, config: ModelConfig, layer: int) -> Iterator[tuple[str, TensorView]]:
    if config.latent is not None and f"blk.{layer}.attn_k_b.weight" in file.tensors:
        rank, heads = config.latent.kv_lora_rank, config.num_heads
        keys = _tensor(file, f"blk.{layer}.attn_k_b.weight", (heads, rank, config.latent.qk_nope_head_dim))
        values = _tensor(file, f"blk.{layer}.attn_v_b.weight", (heads, config.latent.v_head_dim, rank))
        if keys is not None and values is not None:
            yield f"model.layers.{layer}.self_attn.kv_b_proj.weight", KVHeadView(keys, values)
    if config.is_sparse(layer):
        assert config.experts is not None
        number, width, hidden = config.experts.number, config.experts.width, config.hidden_size
        shapes = {"gate": (number, width, hidden), "up": (number, width, hidden), "down": (number, hidden, width)}
        found = {each: _tensor(file, f"blk.{layer}.ffn_{each}_exps.weight", shapes[each]) for each in MATRICES}
        biases = {each: _tensor(file, f"blk.{layer}.ffn_{each}_exps.bias", shapes[each][:2]) for each in MATRICES}
        fused = EXPERT_NAMES[config.family].fused
        yield from _interleaved_views(layer, found, biases) if fused else _expert_views(config, layer, found)


def _interleaved_views(
    layer: int, found: dict[str, GGUFTensor | None], biases: dict[str, GGUFTensor | None]
) -> Iterator[tuple[str, TensorView]]:
    prefix = f"model.layers.{layer}.mlp.experts"
    for ours, theirs in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for suffix, tensors in (("", found), ("_bias", biases)):
            parts = tuple(tensor for each in theirs if (tensor := tensors[each]) is not None)
            if len(parts) == len(theirs):
                yield f"{prefix}.{ours}{suffix}", InterleavedView(parts)


def _expert_views(
    config: ModelConfig, layer: int, found: dict[str, GGUFTensor | None]
) -> Iterator[tuple[str, TensorView]]:
    names = EXPERT_NAMES[config.family]
    for each, matrix in zip(MATRICES, names.matrices, strict=True):
        tensor = found[each]
        for expert in range(tensor.shape[0] if tensor is not None else 0):
            assert tensor is not None
            yield f"model.layers.{layer}.{names.block}.experts.{expert}.{matrix}.weight", ExpertView(tensor, expert)


def _tensor(file: GGUFFile, name: str, wanted: tuple[int, ...]) -> GGUFTensor | None:
    found = file.tensors.get(name)
    if found is not None and found.shape != wanted:
        raise WrongShape(f"{found.path}: tensor {name} has shape {found.shape}; the config asks for {wanted}")
    return found
