"""Rows of tensors that lie in GGUF files: memory-mapped, and only the blocks that are asked for are dequantised."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jdisagg.model.gguf_file import Tensor

STRIP_BYTES = 1 << 15  # dequantised at once: with its temporaries, about what a cache holds


class Blocks:
    """The files of one model, each mapped once."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.ndarray] = {}

    def rows(self, tensor: Tensor, picked: slice | np.ndarray, columns: slice) -> np.ndarray:
        """f32[picked, columns] of a tensor whose dimensions but the last count as one; a vector is one row."""
        stored = self._bytes(tensor).reshape(prod(tensor.shape[:-1]), -1)
        return _columns(stored[picked], tensor.kind, columns)

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        if tensor.path not in self._maps:
            self._maps[tensor.path] = np.memmap(tensor.path, np.uint8, "r")
        return self._maps[tensor.path][tensor.start : tensor.start + tensor.num_bytes]


@cache
def has_definition(kind: GGMLQuantizationType) -> bool:
    """Whether blocks of this kind can be dequantised."""
    try:
        _numbers(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _columns(rows: np.ndarray, kind: GGMLQuantizationType, columns: slice) -> np.ndarray:
    """f32[rows, columns] of rows of blocks; only the blocks that hold some of the columns are looked at."""
    block, size = GGML_QUANT_SIZES[kind]
    first, last = columns.start // block, -(-columns.stop // block)
    found = _numbers(rows[:, first * size : last * size], kind).reshape(len(rows), -1)
    return found[:, columns.start - first * block : columns.stop - first * block]


def _numbers(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """f32[all of them] of blocks, a strip of them at a time."""
    size = GGML_QUANT_SIZES[kind][1]
    blocks = np.ascontiguousarray(stored).reshape(-1, size)
    step = max(1, STRIP_BYTES // size)
    strips = [dequantize(blocks[at : at + step].reshape(1, -1), kind) for at in range(0, len(blocks), step)]
    return np.concatenate([strip.ravel() for strip in strips]).astype(np.float32, copy=False)
