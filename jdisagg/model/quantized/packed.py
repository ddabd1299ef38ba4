"""compressed-tensors' "pack-quantized": numbers [out, in] of 4 or 8 bits, in int32 along a row, unsigned by offset."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jdisagg.core.errors import WrongShape
from jdisagg.model.names import Index
from jdisagg.model.quantized.tensors import (
    ceil_div,
    groups_of,
    needed,
    read_f32,
    scaled,
    unpacked,
    words_of,
)
from jdisagg.model.sources import FLOATS, Source

ZERO, GROUPS = ".weight_zero_point", ".weight_g_idx"


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups of `group_size` inputs (0: a whole row) share a scale, and a zero point where `zero_points`."""

    bits: int
    group_size: int
    zero_points: bool
    any_order: bool = False  # which inputs are a group is for `weight_g_idx` to say
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".weight_packed"
    beside: tuple[str, ...] = (".weight_scale", ".weight_shape", ZERO, GROUPS)

    def shape(self, source: Source, stem: str) -> tuple[int, ...]:
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
            needed(source, stem + ZERO, ("int32",), ((ceil_div(outputs, each), groups),))
        if self.any_order or source.shape(stem + GROUPS) is not None:
            needed(source, stem + GROUPS, ("int32", "int64"), ((inputs,),))
        return outputs, inputs

    def read(self, source: Source, stem: str, index: Index) -> np.ndarray:
        inputs = self.shape(source, stem)[1]
        outputs, span = index
        words, inside = words_of(span, self.bits)
        size = self.group_size or inputs
        groups, group_of = groups_of(source, stem + GROUPS, span, size, ceil_div(inputs, size))
        stored = source.read(stem + self.numbers, (outputs, words))
        scales = read_f32(source, stem + ".weight_scale", (outputs, groups))
        zeros = np.full((1, 1), 1 << (self.bits - 1), np.float32)  # what a number of 0 is stored as
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

    def _zeros(self, source: Source, stem: str, outputs: slice, groups: slice) -> np.ndarray:
        """f32[outputs, groups]; they are packed along the outputs."""
        words, inside = words_of(outputs, self.bits)
        return unpacked(source.read(stem + ZERO, (words, groups)).T, self.bits)[:, inside].T.astype(np.float32)
