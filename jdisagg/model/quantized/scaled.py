"""fp8 and int8 weights [out, in] with a scale for the tensor, each row, each block, or each group along a row.

fp8 of DeepSeek V3 and Qwen3 (`weight_scale_inv`, blocks), of FBGEMM, ModelOpt, AutoFP8 and compressed-tensors
(`weight_scale`), and int8 of compressed-tensors. Whatever the scale is called, a number is multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jdisagg.core.errors import MissingTensor
from jdisagg.model.names import Index
from jdisagg.model.quantized.tensors import SCALES, Shape, blocks_of, ceil_div, matrix, needed, read_f32, scaled
from jdisagg.model.sources import Source

SCALE_NAMES = (".weight_scale_inv", ".weight_scale")
ZERO = ".weight_zero_point"
FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Scaled:
    """`block` is [rows, columns] that share a scale; None: one scale for the tensor or for each row, as it is found."""

    dtype: str  # float8_e4m3fn or int8
    block: tuple[int, int] | None = None
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".weight"
    beside: tuple[str, ...] = (*SCALE_NAMES, ZERO)

    def shape(self, source: Source, stem: str) -> tuple[int, ...]:
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
        """What products call the dtype of the numbers."""
        return "int8" if self.dtype == "int8" else "fp8"

    def channels(self, source: Source, stem: str) -> Channels | None:
        """As it is stored, where rows of numbers have one scale each, or all the same, and no zero points."""
        self.shape(source, stem)
        is_scaled = self.block is None and source.shape(stem + ZERO) is None
        return Channels(source, stem + self.numbers, _scale_name(source, stem), self.of_products) if is_scaled else None

    def read(self, source: Source, stem: str, index: Index) -> np.ndarray:
        shape, name = self.shape(source, stem), _scale_name(source, stem)
        block = self.block or ((1 if _size(source, name) == shape[0] else shape[0]), shape[1])
        (rows, row_of), (columns, column_of) = (blocks_of(*each) for each in zip(index, block, strict=True))
        stored = source.read(stem + self.numbers, index)
        zeros = None if source.shape(stem + ZERO) is None else _grid(source, stem + ZERO, rows, columns)
        scales = _grid(source, name, rows, columns)
        places = column_of if scales.shape[1] > 1 else None
        return scaled(lambda strip: _f32(stored[strip]), row_of, stored.shape[1], scales, zeros, places)


@dataclass(frozen=True, slots=True)
class Channels:
    """A tensor of int8 or fp8 numbers, and that of their scales."""

    source: Source
    name: str
    scale: str
    dtype: str

    def numbers(self, index: Index) -> np.ndarray:
        return self.source.read(self.name, index)

    def scales(self, rows: slice) -> np.ndarray:
        """One for all is each row's."""
        count = rows.stop - rows.start
        is_one = _size(self.source, self.scale) == 1
        found = _grid(self.source, self.scale, slice(0, 1) if is_one else rows, slice(0, 1))
        return np.ascontiguousarray(np.broadcast_to(found[:, 0], count))


def _scale_name(source: Source, stem: str) -> str:
    found = next((name for name in SCALE_NAMES if source.shape(stem + name) is not None), None)
    if found is None:
        names = " or ".join(stem + name for name in SCALE_NAMES)
        raise MissingTensor(f"tensor {names} is not in {source.place}; {stem}.weight is quantised and needs it")
    return stem + found


def _size(source: Source, name: str) -> int:
    return int(np.prod(source.shape(name) or ()))


def _grid(source: Source, name: str, rows: slice, columns: slice) -> np.ndarray:
    """f32[rows, columns] of scales, however many dimensions they are stored in."""
    index = (rows, columns)[: len(source.shape(name) or ())]
    return read_f32(source, name, index).reshape(rows.stop - rows.start, columns.stop - columns.start)


def _f32(stored: np.ndarray) -> np.ndarray:
    """By a table: ml_dtypes casts eight bits one by one."""
    return stored.astype(np.float32) if stored.dtype == np.int8 else np.take(FP8_VALUES, stored.view(np.uint8))
