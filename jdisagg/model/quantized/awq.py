"""AWQ, the "gemm" order: four-bit numbers [in, out], eight along the outputs in an int32, with zero points likewise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jdisagg.model.names import Index
from jdisagg.model.quantized.tensors import (
    blocks_of,
    ceil_div,
    matrix,
    needed,
    read_f32,
    scaled,
    unpacked,
    words_of,
)
from jdisagg.model.sources import FLOATS, Source

BITS = 4
PER_WORD = 32 // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight outputs of a word, which four bits of it are theirs


@dataclass(frozen=True, slots=True)
class AWQ:
    """Groups of `group_size` inputs share a scale and a zero point; 0: all of them."""

    group_size: int
    label: str = ""
    plain: str = ".weight"
    numbers: str = ".qweight"
    beside: tuple[str, ...] = (".qzeros", ".scales")

    def shape(self, source: Source, stem: str) -> tuple[int, ...]:
        inputs, words = matrix(source, stem + ".qweight", ("int32",))
        groups = ceil_div(inputs, self.group_size or inputs)
        needed(source, stem + ".qzeros", ("int32",), ((groups, words),))
        needed(source, stem + ".scales", FLOATS, ((groups, words * PER_WORD),))
        return words * PER_WORD, inputs

    def read(self, source: Source, stem: str, index: Index) -> np.ndarray:
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
    """u8[rows, 8 x words] in the order of the outputs."""
    return unpacked(words, BITS, PLACES)
