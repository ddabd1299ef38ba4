"""Reads a checkpoint's quantisation and its quantised weights: one table from `quant_method` to a reader.

A method or option that is not supported is refused by name, with the value found and the values supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jdisagg.core.errors import MissingTensor, UnsupportedModel, WrongShape
from jdisagg.model.files import JsonFields, read_json, shown
from jdisagg.model.names import Index
from jdisagg.model.quantized.tensors import (
    SCALES,
    Shape,
    blocks_of,
    ceil_div,
    groups_of,
    matrix,
    needed,
    read_f32,
    scaled,
    unpacked,
    words_of,
)
from jdisagg.model.sources import FLOATS, TensorSource

# AWQ in the "gemm" order: four-bit numbers [in, out], eight consecutive outputs per int32; zero points likewise.

BITS = 4
PER_WORD = 32 // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of a word's eight outputs, in units of four bits


@dataclass(frozen=True, slots=True)
class AWQ:
    """AWQ weights: groups of `group_size` inputs share a scale and a zero point; 0: all inputs."""

    group_size: int
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".qweight"
    beside: tuple[str, ...] = (".qzeros", ".scales")

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        inputs, words = matrix(source, stem + ".qweight", ("int32",))
        groups = ceil_div(inputs, self.group_size or inputs)
        needed(source, stem + ".qzeros", ("int32",), ((groups, words),))
        needed(source, stem + ".scales", FLOATS, ((groups, words * PER_WORD),))
        return words * PER_WORD, inputs

    def read(self, source: TensorSource, stem: str, index: Index) -> np.ndarray:
        inputs = self.shape(source, stem)[1]
        outputs, span = index
        words, inside = words_of(outputs, BITS)
        groups, group_of = blocks_of(span, self.group_size or inputs)
        stored = source.read(stem + ".qweight", (span, words))
        zeros = _numbers(source.read(stem + ".qzeros", (groups, words)))[:, inside].astype(np.float32)
        scales = read_f32(source, stem + ".scales", (groups, outputs))
        width = outputs.stop - outputs.start
        return scaled(lambda strip: _numbers(stored[strip])[:, inside], group_of, width, scales, zeros, transposed=True)


def _numbers(words: np.ndarray) -> np.ndarray:
    """Returns u8[rows, 8 x words] in the order of the outputs."""
    return unpacked(words, BITS, PLACES)


# fp8 and int8 weights [out, in] with a scale for the tensor, each row, each block, or each group along a row.
#
# Formats: fp8 of DeepSeek V3 and Qwen3 (`weight_scale_inv`, blocks), of FBGEMM, ModelOpt, AutoFP8 and
# compressed-tensors (`weight_scale`), and int8 of compressed-tensors. Under either name, numbers are multiplied by it.

SCALE_NAMES = (".weight_scale_inv", ".weight_scale")
ZERO = ".weight_zero_point"
FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    """fp8 or int8 weights. `block` is [rows, columns] that share a scale; None: one scale per tensor or row, as
    stored."""

    dtype: str  # float8_e4m3fn or int8
    block: tuple[int, int] | None = None
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".weight"
    beside: tuple[str, ...] = (*SCALE_NAMES, ZERO)

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        found = matrix(source, stem + self.numbers, (self.dtype,))
        scales = needed(source, _scale_name(source, stem), SCALES, self._scale_shapes(found))
        if source.shape(stem + ZERO) is not None:
            needed(source, stem + ZERO, ("int8",), (scales,))
        return found

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        if self.block is not None:
            return (tuple(map(ceil_div, shape, self.block)),)
        return (), (1,), (1, 1), (shape[0], 1), (shape[0],)

    @property
    def of_products(self) -> str:
        """Name of the dtype in `products.py`."""
        return "int8" if self.dtype == "int8" else "fp8"

    def channels(self, source: TensorSource, stem: str) -> ScaledTensor | None:
        """Returns the stored numbers and scales if each row or the tensor has one scale and there are no zero points;
        else None."""
        self.shape(source, stem)
        is_scaled = self.block is None and source.shape(stem + ZERO) is None
        return (
            ScaledTensor(source, stem + self.numbers, _scale_name(source, stem), self.of_products)
            if is_scaled
            else None
        )

    def read(self, source: TensorSource, stem: str, index: Index) -> np.ndarray:
        shape, name = self.shape(source, stem), _scale_name(source, stem)
        block = self.block or ((1 if _size(source, name) == shape[0] else shape[0]), shape[1])
        (rows, row_of), (columns, column_of) = (blocks_of(*each) for each in zip(index, block, strict=True))
        stored = source.read(stem + self.numbers, index)
        zeros = None if source.shape(stem + ZERO) is None else _grid(source, stem + ZERO, rows, columns)
        scales = _grid(source, name, rows, columns)
        places = column_of if scales.shape[1] > 1 else None
        return scaled(lambda strip: _f32(stored[strip]), row_of, stored.shape[1], scales, zeros, places)


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A tensor of int8 or fp8 numbers, and the tensor of their scales."""

    source: TensorSource
    name: str
    scale: str
    dtype: str

    def numbers(self, index: Index) -> np.ndarray:
        return self.source.read(self.name, index)

    def scales(self, rows: slice) -> np.ndarray:
        """Returns one scale per row; a single stored scale is repeated."""
        count = rows.stop - rows.start
        is_one = _size(self.source, self.scale) == 1
        found = _grid(self.source, self.scale, slice(0, 1) if is_one else rows, slice(0, 1))
        return np.ascontiguousarray(np.broadcast_to(found[:, 0], count))


def _scale_name(source: TensorSource, stem: str) -> str:
    found = next((name for name in SCALE_NAMES if source.shape(stem + name) is not None), None)
    if found is None:
        names = " or ".join(stem + name for name in SCALE_NAMES)
        raise MissingTensor(f"tensor {names} is not in {source.place}; {stem}.weight is quantised and needs it")
    return stem + found


def _size(source: TensorSource, name: str) -> int:
    return int(np.prod(source.shape(name) or ()))


def _grid(source: TensorSource, name: str, rows: slice, columns: slice) -> np.ndarray:
    """Returns scales as f32[rows, columns], whatever rank they are stored in."""
    index = (rows, columns)[: len(source.shape(name) or ())]
    return read_f32(source, name, index).reshape(rows.stop - rows.start, columns.stop - columns.start)


def _f32(stored: np.ndarray) -> np.ndarray:
    """Converts to f32 by a table, because ml_dtypes converts eight-bit floats one by one."""
    return stored.astype(np.float32) if stored.dtype == np.int8 else np.take(FP8_VALUES, stored.view(np.uint8))


# compressed-tensors' "pack-quantized": numbers [out, in] of 4 or 8 bits, packed in int32 along a row, unsigned with an
# offset.

PACKED_ZERO, GROUPS = ".weight_zero_point", ".weight_g_idx"


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Packed integer weights: groups of `group_size` inputs (0: a row) share a scale, and a zero point if
    `zero_points`."""

    bits: int
    group_size: int
    zero_points: bool
    any_order: bool = False  # `weight_g_idx` gives the group of each input
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".weight_packed"
    beside: tuple[str, ...] = (".weight_scale", ".weight_shape", PACKED_ZERO, GROUPS)

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        each = 32 // self.bits
        needed(source, stem + ".weight_shape", ("int64", "int32"), ((2,),))
        outputs, inputs = map(int, source.read(stem + ".weight_shape", (slice(0, 2),)))
        if min(outputs, inputs) < 1:
            raise WrongShape(
                f"tensor {stem}.weight_shape in {source.place} is {[outputs, inputs]}; needed: sizes over 0"
            )
        needed(source, stem + self.numbers, ("int32",), ((outputs, ceil_div(inputs, each)),))
        groups = ceil_div(inputs, self.group_size or inputs)
        needed(source, stem + ".weight_scale", FLOATS, ((outputs, groups),))
        if self.zero_points:
            needed(source, stem + PACKED_ZERO, ("int32",), ((ceil_div(outputs, each), groups),))
        if self.any_order or source.shape(stem + GROUPS) is not None:
            needed(source, stem + GROUPS, ("int32", "int64"), ((inputs,),))
        return outputs, inputs

    def read(self, source: TensorSource, stem: str, index: Index) -> np.ndarray:
        inputs = self.shape(source, stem)[1]
        outputs, span = index
        words, inside = words_of(span, self.bits)
        size = self.group_size or inputs
        groups, group_of = groups_of(source, stem + GROUPS, span, size, ceil_div(inputs, size))
        stored = source.read(stem + self.numbers, (outputs, words))
        scales = read_f32(source, stem + ".weight_scale", (outputs, groups))
        zeros = np.full((1, 1), 1 << (self.bits - 1), np.float32)  # the stored value of 0
        if self.zero_points:
            zeros = self._zeros(source, stem, outputs, groups)
        return scaled(
            lambda strip: unpacked(stored[strip], self.bits)[:, inside],
            np.arange(len(stored)),
            len(group_of),
            scales,
            np.broadcast_to(zeros, scales.shape),
            group_of,
        )

    def _zeros(self, source: TensorSource, stem: str, outputs: slice, groups: slice) -> np.ndarray:
        """Returns zero points f32[outputs, groups], which are packed along the outputs."""
        words, inside = words_of(outputs, self.bits)
        return unpacked(source.read(stem + PACKED_ZERO, (words, groups)).T, self.bits)[:, inside].T.astype(np.float32)


# MXFP4 of gpt-oss: experts' matrices [E, out, in] in blocks of 32 four-bit floats that share a power of two.
#
# The network's tensor is [E, in, out], as checkpoints of gpt-oss in bfloat16 store it.

BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# E8M0: the power of two of each scale byte; the last byte is NaN.
POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@dataclass(frozen=True, slots=True)
class MXFP4:
    """MXFP4 weights: two numbers per byte, the first in the lower half."""

    label: str = "mxfp4, blocks of 32"
    plain: str = ""
    numbers: str = "_blocks"
    beside: tuple[str, ...] = ("_scales",)

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        found = needed(source, stem + "_blocks", ("uint8",))
        if len(found) != 4 or found[3] != BLOCK // 2:
            raise WrongShape(
                f"tensor {stem}_blocks in {source.place} has shape {list(found)};"
                f" needed: experts, outputs, blocks and {BLOCK // 2} bytes"
            )
        needed(source, stem + "_scales", ("uint8",), (found[:3],))
        return found[0], found[2] * BLOCK, found[1]

    def read(self, source: TensorSource, stem: str, index: Index) -> np.ndarray:
        self.shape(source, stem)
        experts, span, outputs = index
        out = np.empty([part.stop - part.start for part in index], np.float32)
        for position, expert in enumerate(range(experts.start, experts.stop)):
            out[position] = self._read_expert(source, stem, expert, span, outputs)
        return out

    def _read_expert(self, source: TensorSource, stem: str, expert: int, span: slice, outputs: slice) -> np.ndarray:
        """Returns one expert's f32[span, outputs]."""
        blocks, block_of = blocks_of(span, BLOCK)
        one = slice(expert, expert + 1)
        stored = source.read(stem + "_blocks", (one, outputs, blocks, slice(0, BLOCK // 2)))[0]
        octets = stored.reshape(len(stored), -1)
        inside = slice(span.start - blocks.start * BLOCK, span.stop - blocks.start * BLOCK)
        scales = POWERS[source.read(stem + "_scales", (one, outputs, blocks))[0]]
        return scaled(
            lambda strip: np.take(E2M1, _halves(octets[strip])[:, inside]),
            np.arange(len(octets)),
            len(block_of),
            scales,
            columns=block_of,
            transposed=True,
        )


def _halves(octets: np.ndarray) -> np.ndarray:
    out = np.empty((len(octets), octets.shape[1] * 2), np.uint8)
    out[:, 0::2], out[:, 1::2] = octets & 15, octets >> 4
    return out


# GPTQ: numbers [in, out] of 2, 4 or 8 bits, packed along the inputs, in groups that may be any inputs (`g_idx`).


@dataclass(frozen=True, slots=True)
class GPTQ:
    """GPTQ weights: groups of `group_size` inputs (0: all) share a scale and a zero point, stored minus
    `zero_offset`."""

    bits: int
    group_size: int
    any_order: bool  # `desc_act`: `g_idx` gives the group of each input
    zero_offset: int  # 1 in the first format, 0 in gptq_v2
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".qweight"
    beside: tuple[str, ...] = (".qzeros", ".scales", ".g_idx")

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        each = 32 // self.bits
        words, outputs = matrix(source, stem + ".qweight", ("int32",))
        inputs = words * each
        groups = ceil_div(inputs, self.group_size or inputs)
        needed(source, stem + ".qzeros", ("int32",), ((groups, ceil_div(outputs, each)),))
        needed(source, stem + ".scales", FLOATS, ((groups, outputs),))
        if self.any_order or source.shape(stem + ".g_idx") is not None:
            needed(source, stem + ".g_idx", ("int32", "int64"), ((inputs,),))
        return outputs, inputs

    def read(self, source: TensorSource, stem: str, index: Index) -> np.ndarray:
        inputs = self.shape(source, stem)[1]
        outputs, span = index
        size = self.group_size or inputs
        groups, group_of = groups_of(source, stem + ".g_idx", span, size, ceil_div(inputs, size))
        words, inside = words_of(span, self.bits)
        stored = source.read(stem + ".qweight", (words, outputs)).T
        zero_words, inside_zeros = words_of(outputs, self.bits)
        zeros = unpacked(source.read(stem + ".qzeros", (groups, zero_words)), self.bits)[:, inside_zeros]
        scales = read_f32(source, stem + ".scales", (groups, outputs))
        return scaled(
            lambda strip: unpacked(stored[strip], self.bits)[:, inside],
            np.arange(outputs.stop - outputs.start),
            len(group_of),
            np.ascontiguousarray(scales.T),
            zeros.T.astype(np.float32) + self.zero_offset,
            group_of,
        )


# The interface of a storage scheme, and the parsing of its configuration.


class StorageFormat(Protocol):
    """A storage scheme. A weight `X` + `plain` is stored as `X` + `numbers`, with scales in `X` + `beside`."""

    @property
    def label(self) -> str:
        """Readable name with bits and group size."""
        ...

    @property
    def plain(self) -> str:
        """Suffix of a weight's name in the network."""
        ...

    @property
    def numbers(self) -> str:
        """Suffix of the tensor with the weight's numbers; may equal `plain`."""
        ...

    @property
    def beside(self) -> tuple[str, ...]:
        """Suffixes of the auxiliary tensors, such as scales."""
        ...

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        """Returns the plain weight's shape. Raises a `CheckpointError` if one of its tensors is invalid."""
        ...

    def read(self, source: TensorSource, stem: str, index: Index) -> np.ndarray:
        """Returns a slice of the plain weight in float32, reading only the bytes it needs."""
        ...


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """A checkpoint's storage scheme, with flags for quantised activations and KV, which are not applied here."""

    scheme: StorageFormat
    activations: bool = False  # the checkpoint intends quantised activations
    kv_cache: bool = False  # the checkpoint has scales for KV pages


KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' old key
MODELOPT_FILE = "hf_quant_config.json"  # ModelOpt's file before config.json had the field
MOST_GROUP = 1 << 20
E4M3 = "float8_e4m3fn"
FP8 = "fp8 e4m3"


def read_quantization(folder: Path) -> QuantizationConfig | None:
    """Returns how the weights in `folder` are quantised; None if they are plain. Raises `CheckpointError`."""
    found = quantization_of(JsonFields(read_json(folder / "config.json"), str(folder / "config.json")))
    if found is not None or not (folder / MODELOPT_FILE).exists():
        return found
    own = JsonFields(read_json(folder / MODELOPT_FILE), str(folder / MODELOPT_FILE)).part("quantization")
    return None if own is None or own.word("quant_algo") is None else _modelopt(own)


def quantization_of(read: JsonFields) -> QuantizationConfig | None:
    """Returns the quantisation of a `config.json`, or None. Raises `UnsupportedModel`."""
    parts = (read.part(key) for key in KEYS)
    settings = next((part for part in parts if part is not None and part.raw), None)
    if settings is None:
        return None
    method = settings.word("quant_method") or ("compressed-tensors" if "config_groups" in settings.raw else "unnamed")
    if method not in METHODS:
        raise UnsupportedModel(
            f"{read.place}: quantization {shown(method)} is not supported; supported: {', '.join(METHODS)},"
            " and plain bfloat16, float16, float32"
        )
    return METHODS[method](settings)


def _one_of(read: JsonFields, key: str, supported: tuple[object, ...], default: object = None) -> None:
    """Refuses a value of `key` that is not in `supported`; `default` is the meaning of an absent key."""
    value = read.raw.get(key, default)
    if not any(type(value) is type(each) and value == each for each in supported):
        raise UnsupportedModel(
            f"{read.place} has {key} = {shown(value)}, which is not supported; supported:"
            f" {', '.join(str(each) for each in supported)}"
        )


def _group_size(read: JsonFields, *keys: str) -> int:
    """Returns the inputs that share a scale; 0 for a whole row, which files write as -1."""
    key = next((key for key in keys if key in read.raw), keys[0])
    size = read.whole(key, -1, MOST_GROUP)
    if size in (None, 0):
        raise read.wrong(key, f"-1, or a whole number from 1 to {MOST_GROUP}")
    return max(size or 0, 0)


def _groups(size: int) -> str:
    return f"groups of {size}" if size else "a scale a row"


def _pair(read: JsonFields, key: str) -> tuple[int, int] | None:
    value = read.raw.get(key)
    if value is None:
        return None
    good = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
    if not good:
        raise read.wrong(key, "a list of two whole numbers over 0")
    return value[0], value[1]


def _fp8(read: JsonFields) -> QuantizationConfig:
    """Parses fp8 of DeepSeek V3 and Qwen3 (blocks), AutoFP8 and Mistral (one scale per tensor)."""
    _one_of(read, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    _one_of(read, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = _pair(read, "weight_block_size")
    how = "a scale a tensor or row" if block is None else f"blocks of {block[0]} x {block[1]}"
    return QuantizationConfig(ScaledFormat(E4M3, block, f"{FP8}, {how}"), activations=True)


def _fbgemm(read: JsonFields) -> QuantizationConfig:
    return QuantizationConfig(ScaledFormat(E4M3, label=f"{FP8}, a scale a row"), activations=True)


def _modelopt(read: JsonFields) -> QuantizationConfig:
    _one_of(read, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
    kv = read.raw.get("kv_cache_quant_algo") or read.raw.get("kv_cache_scheme")
    return QuantizationConfig(
        ScaledFormat(E4M3, label=f"{FP8}, a scale a tensor or row"), activations=True, kv_cache=bool(kv)
    )


def _awq(read: JsonFields) -> QuantizationConfig:
    _one_of(read, "bits" if "bits" in read.raw else "w_bit", (BITS,), BITS)
    _one_of(read, "zero_point", (True,), True)
    layout = "version" if "version" in read.raw else "format"
    _one_of(read, layout, ("gemm", "GEMM"), "gemm")
    size = _group_size(read, "group_size", "q_group_size")
    return QuantizationConfig(AWQ(size, f"awq of {BITS} bits, {_groups(size)}"))


def _gptq(read: JsonFields) -> QuantizationConfig:
    _one_of(read, "bits", (2, 4, 8))
    key = "checkpoint_format" if "checkpoint_format" in read.raw else "format"
    _one_of(read, key, ("gptq", "gptq_v2"), "gptq")
    _one_of(read, "pack_dtype", ("int32",), "int32")
    _one_of(read, "is_marlin_format", (False,), False)
    dynamic = read.part("dynamic")
    if dynamic is not None and any(not rule.startswith("-:") for rule in dynamic.raw):
        raise read.wrong("dynamic", 'rules that begin with "-:", which leave modules as they are')
    bits, size = read.needed("bits", 8), _group_size(read, "group_size")
    offset = 0 if read.raw.get(key) == "gptq_v2" else 1
    label = f"gptq of {bits} bits, {_groups(size)}"
    return QuantizationConfig(GPTQ(bits, size, read.flag("desc_act"), offset, label))


def _mxfp4(read: JsonFields) -> QuantizationConfig:
    return QuantizationConfig(MXFP4())


def _compressed_tensors(read: JsonFields) -> QuantizationConfig:
    """Parses compressed-tensors; all groups must use one scheme."""
    _one_of(read, "quantization_status", ("compressed", "frozen"), "compressed")
    sparsity, transform = read.part("sparsity_config"), read.part("transform_config")
    if sparsity is not None and sparsity.raw:
        _one_of(sparsity, "format", ("dense",))
    if transform is not None and transform.raw:
        raise read.wrong("transform_config", "none")
    groups = read.part("config_groups")
    kinds = [groups.part(name) for name in groups.raw] if groups is not None else []
    found = {_of_group(read, kind) for kind in kinds if kind is not None and kind.raw.get("weights") is not None}
    if len(found) != 1:
        labels = "; ".join(sorted(scheme.label for scheme in found)) or "none"
        raise UnsupportedModel(f"{read.place} config_groups quantise weights as {labels}; supported: one way for all")
    keys = ("input_activations", "output_activations")
    activations = any(kind.raw.get(key) for kind in kinds if kind is not None for key in keys)
    return QuantizationConfig(found.pop(), activations, kv_cache=bool(read.raw.get("kv_cache_scheme")))


def _of_group(read: JsonFields, group: JsonFields) -> StorageFormat:
    own = group if group.raw.get("format") is not None else read
    _one_of(own, "format", ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"))
    weights = group.part("weights")
    assert weights is not None
    _one_of(weights, "dynamic", (False, None), False)
    _one_of(weights, "type", ("int", "float"), "int")
    if own.raw["format"] == "pack-quantized":
        return _packed(weights)
    _one_of(weights, "num_bits", (8,), 8)
    block, how = _sharing(weights)
    is_float = weights.raw.get("type") == "float"
    return ScaledFormat(E4M3 if is_float else "int8", block, f"{FP8 if is_float else 'int8'}, {how}")


def _sharing(weights: JsonFields) -> tuple[tuple[int, int] | None, str]:
    """Returns the rows and columns that share a scale, and a description."""
    _one_of(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
    match weights.raw.get("strategy"):
        case "group":
            size = _group_size(weights, "group_size")
            return ((1, size), _groups(size)) if size else (None, _groups(size))
        case "block":
            block = _pair(weights, "block_structure")
            if block is None:
                raise weights.wrong("block_structure", "a list of two whole numbers over 0")
            return block, f"blocks of {block[0]} x {block[1]}"
        case "channel":
            return None, "a scale a row"
    return None, "a scale a tensor"


def _packed(weights: JsonFields) -> StorageFormat:
    _one_of(weights, "type", ("int",), "int")
    _one_of(weights, "num_bits", (4, 8), 8)
    _one_of(weights, "strategy", ("group", "channel"))
    bits = weights.needed("num_bits", 8)
    size = _group_size(weights, "group_size") if weights.raw["strategy"] == "group" else 0
    symmetric = weights.flag("symmetric") or "symmetric" not in weights.raw
    label = f"packed int{bits}, {_groups(size)}"
    return PackedFormat(bits, size, not symmetric, weights.raw.get("actorder") == "group", label)


METHODS: dict[str, Callable[[JsonFields], QuantizationConfig]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
