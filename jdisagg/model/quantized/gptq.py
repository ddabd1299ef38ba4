"""GPTQ: numbers [in, out] of 2, 4 or 8 bits, packed along the inputs, in groups that may be any inputs (`g_idx`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jdisagg.model.names import Index
from jdisagg.model.quantized.tensors import (
    ceil_div,
    groups_of,
    matrix,
    needed,
    read_f32,
    scaled,
    unpacked,
    words_of,
)
from jdisagg.model.sources import FLOATS, Source


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Groups of `group_size` inputs (0: all) share a scale and a zero point, stored less `zero_offset`."""

    bits: int
    group_size: int
    any_order: bool  # `desc_act`: which inputs are a group is for `g_idx` to say
    zero_offset: int  # 1 in the first format, 0 in gptq_v2
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".qweight"
    beside: tuple[str, ...] = (".qzeros", ".scales", ".g_idx")

    def shape(self, source: Source, stem: str) -> tuple[int, ...]:
        each = 32 // self.bits
        words, outputs = matrix(source, stem + ".qweight", ("int32",))
        inputs = words * each
        groups = ceil_div(inputs, self.group_size or inputs)
        needed(source, stem + ".qzeros", ("int32",), ((groups, ceil_div(outputs, each)),))
        needed(source, stem + ".scales", FLOATS, ((groups, outputs),))
        if self.any_order or source.shape(stem + ".g_idx") is not None:
            needed(source, stem + ".g_idx", ("int32", "int64"), ((inputs,),))
        return outputs, inputs

    def read(self, source: Source, stem: str, index: Index) -> np.ndarray:
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
