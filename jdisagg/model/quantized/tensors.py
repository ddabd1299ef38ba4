"""Helpers of the quantised readers: checks of auxiliary tensors, and the blocks, groups and words that a slice
needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jdisagg.core.errors import CheckpointError, MissingTensor, WrongDtype, WrongShape
from jdisagg.model.names import Index
from jdisagg.model.sources import FLOATS, TensorSource

Shape = tuple[int, ...]
SCALES = (*FLOATS, "float8_e8m0fnu")  # dtypes of scales
STRIP_NUMBERS = 1 << 16  # numbers dequantised at once: with temporaries, about the size of a CPU cache


def needed(source: TensorSource, name: str, dtypes: Sequence[str], shapes: Sequence[Shape] | None = None) -> Shape:
    """Returns the shape of a required auxiliary tensor. Raises subclasses of `CheckpointError`."""
    shape = source.shape(name)
    if shape is None:
        raise MissingTensor(f"tensor {name} is not in {source.place}; the quantised weight beside it needs it")
    if shapes is not None and shape not in shapes:
        expected = " or ".join(str(list(each)) for each in dict.fromkeys(shapes))
        raise WrongShape(f"tensor {name} in {source.place} has shape {list(shape)}; needed: {expected}")
    stored = source.dtype(name)
    if stored not in dtypes:
        raise WrongDtype(f"tensor {name} in {source.place} has dtype {stored}; needed: {', '.join(dtypes)}")
    return shape


def matrix(source: TensorSource, name: str, dtypes: Sequence[str]) -> tuple[int, int]:
    shape = needed(source, name, dtypes)
    if len(shape) != 2:
        raise WrongShape(f"tensor {name} in {source.place} has shape {list(shape)}; needed: two dimensions")
    return shape[0], shape[1]


def ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def blocks_of(span: slice, size: int) -> tuple[slice, np.ndarray]:
    """Returns the blocks of `size` numbers that cover `span`, and each number's block within them."""
    first = span.start // size
    return slice(first, ceil_div(span.stop, size)), np.arange(span.start, span.stop) // size - first


def groups_of(source: TensorSource, name: str, span: slice, size: int, count: int) -> tuple[slice, np.ndarray]:
    """Returns the range of groups that covers the inputs of `span`, and each input's group within it.

    Tensor `name` gives the group of each of the inputs; without it, `size` consecutive inputs form a group. Raises
    `CheckpointError`.
    """
    if source.shape(name) is None:
        return blocks_of(span, size)
    group_of = source.read(name, (span,)).astype(np.int64)
    first, last = int(group_of.min()), int(group_of.max())
    if first < 0 or last >= count:
        raise CheckpointError(f"tensor {name} in {source.place} has groups {first} to {last}; needed: 0 to {count - 1}")
    return slice(first, last + 1), group_of - first


def words_of(span: slice, bits: int) -> tuple[slice, slice]:
    """Returns the int32 words that cover the numbers of `span`, and the numbers' range within those words."""
    per_word = 32 // bits
    first = span.start // per_word
    return slice(first, ceil_div(span.stop, per_word)), slice(
        span.start - first * per_word, span.stop - first * per_word
    )


def unpacked(words: np.ndarray, bits: int, places: Sequence[int] | None = None) -> np.ndarray:
    """Unpacks i32[rows, words] to u8[rows, numbers]; number i of a word is at position `places[i]`, by default i, from
    the lowest bits. The loop is over the numbers of a word because numpy is fast only along long rows."""
    per_word, stored = 32 // bits, np.ascontiguousarray(words).view(np.uint32)
    out = np.empty((len(words), words.shape[1] * per_word), np.uint8)
    for number in range(per_word):
        place = number if places is None else places[number]
        out[:, number::per_word] = (stored >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return out


def read_f32(source: TensorSource, name: str, index: Index) -> np.ndarray:
    return source.read(name, index).astype(np.float32)


def scaled(
    numbers: Callable[[slice], np.ndarray],
    rows: np.ndarray,
    num_columns: int,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    columns: np.ndarray | None = None,
    transposed: bool = False,
) -> np.ndarray:
    """Returns f32[rows, columns], or its transpose: (number - zero) x scale, computed in strips of rows.

    `numbers(strip)` returns rows of stored numbers. Row r uses row `rows[r]` of `scales` and `zeros`; column c uses
    their column `columns[c]`. With `columns` None they have one column per column, or one for all.
    """
    shape = (len(rows), num_columns)
    out = np.empty(shape[::-1] if transposed else shape, np.float32)
    view, step = out.T if transposed else out, max(1, STRIP_NUMBERS // max(1, num_columns))
    for start in range(0, len(rows), step):
        strip = slice(start, start + step)
        found = numbers(strip).astype(np.float32)
        if zeros is not None:
            found -= _picked(zeros, rows[strip], columns)
        found *= _picked(scales, rows[strip], columns)
        view[strip] = found
    return out


def _picked(table: np.ndarray, rows: np.ndarray, columns: np.ndarray | None) -> np.ndarray:
    picked = table[rows]
    return picked if columns is None else np.take(picked, columns, axis=1)
