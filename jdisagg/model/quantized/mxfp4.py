"""MXFP4 of gpt-oss: experts' matrices [E, out, in] in blocks of 32 four-bit floats that share a power of two.

The network's tensor is [E, in, out], as checkpoints of gpt-oss in bfloat16 store it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jdisagg.core.errors import WrongShape
from jdisagg.model.names import Index
from jdisagg.model.quantized.tensors import blocks_of, needed, scaled
from jdisagg.model.sources import Source

BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# E8M0: of the bytes that scales are, the powers of two; the last is no number.
POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@dataclass(frozen=True, slots=True)
class MXFP4:
    """Two numbers a byte, the lower half first."""

    label: str = "mxfp4, blocks of 32"
    plain: str = ""
    numbers: str = "_blocks"
    beside: tuple[str, ...] = ("_scales",)

    def shape(self, source: Source, stem: str) -> tuple[int, ...]:
        found = needed(source, stem + "_blocks", ("uint8",))
        if len(found) != 4 or found[3] != BLOCK // 2:
            raise WrongShape(
                f"tensor {stem}_blocks in {source.place} has shape {list(found)};"
                f" needed: experts, outputs, blocks and {BLOCK // 2} bytes"
            )
        needed(source, stem + "_scales", ("uint8",), (found[:3],))
        return found[0], found[2] * BLOCK, found[1]

    def read(self, source: Source, stem: str, index: Index) -> np.ndarray:
        self.shape(source, stem)
        experts, span, outputs = index
        out = np.empty([part.stop - part.start for part in index], np.float32)
        for place, expert in enumerate(range(experts.start, experts.stop)):
            out[place] = self._read_expert(source, stem, expert, span, outputs)
        return out

    def _read_expert(self, source: Source, stem: str, expert: int, span: slice, outputs: slice) -> np.ndarray:
        """f32[span, outputs]"""
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
