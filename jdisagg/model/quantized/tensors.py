"""What the readers of quantised weights share: tensors that belong to others, checked, and which part a slice needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jdisagg.core.errors import CheckpointError, MissingTensor, WrongDtype, WrongShape
from jdisagg.model.names import Index
from jdisagg.model.sources import FLOATS, Source

Shape = tuple[int, ...]
SCALES = (*FLOATS, "float8_e8m0fnu")  # what scales are stored as
STRIP_NUMBERS = 1 << 16  # dequantised at once: with their temporaries, about what a cache holds


def needed(source: Source, name: str, dtypes: Sequence[str], shapes: Sequence[Shape] | None = None) -> Shape:
    """The shape of a tensor that another's numbers cannot be told without. Raises `CheckpointError`s."""
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


def matrix(source: Source, name: str, dtypes: Sequence[str]) -> tuple[int, int]:
    """The shape of a tensor that must have two dimensions."""
    shape = needed(source, name, dtypes)
    if len(shape) != 2:
        raise WrongShape(f"tensor {name} in {source.place} has shape {list(shape)}; needed: two dimensions")
    return shape[0], shape[1]


def ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def blocks_of(span: slice, size: int) -> tuple[slice, np.ndarray]:
    """The blocks of `size` numbers that hold those of `span`, and which of these blocks each of them is in."""
    first = span.start // size
    return slice(first, ceil_div(span.stop, size)), np.arange(span.start, span.stop) // size - first


def groups_of(source: Source, name: str, span: slice, size: int, count: int) -> tuple[slice, np.ndarray]:
    """The groups that the inputs of `span` are in, as a run of the `count`, and which of the run is each one's.

    Tensor `name` says it where there is one; else `size` neighbours are a group. Raises `CheckpointError`.
    """
    if source.shape(name) is None:
        return blocks_of(span, size)
    group_of = source.read(name, (span,)).astype(np.int64)
    first, last = int(group_of.min()), int(group_of.max())
    if first < 0 or last >= count:
        raise CheckpointError(f"tensor {name} in {source.place} has groups {first} to {last}; needed: 0 to {count - 1}")
    return slice(first, last + 1), group_of - first


def words_of(span: slice, bits: int) -> tuple[slice, slice]:
    """The int32 words that hold the numbers of `span`, and where among those words' numbers they are."""
    each = 32 // bits
    first = span.start // each
    return slice(first, ceil_div(span.stop, each)), slice(span.start - first * each, span.stop - first * each)


def unpacked(words: np.ndarray, bits: int, places: Sequence[int] | None = None) -> np.ndarray:
    """u8[rows, numbers] of i32[rows, words]: a word's first number is in its lowest bits, or number i at `places[i]`.

    One of each word's numbers after another: numpy is fast along long rows only.
    """
    each, stored = 32 // bits, np.ascontiguousarray(words).view(np.uint32)
    out = np.empty((len(words), words.shape[1] * each), np.uint8)
    for number in range(each):
        place = number if places is None else places[number]
        out[:, number::each] = (stored >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return out


def read_f32(source: Source, name: str, index: Index) -> np.ndarray:
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
    """f32[rows, columns], or `transposed`: (number - zero) x scale, a strip of rows at a time.

    `numbers(strip)` gives some rows of what is stored. Row r is scaled by row `rows[r]` of `scales` (and of `zeros`),
    column c by their column `columns[c]`; None where they have a column for each, or one for all.
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
