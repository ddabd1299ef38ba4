"""Builds one shard's part of a leaf on the host: read from a source, joined, transposed and possibly quantised."""

from __future__ import annotations

from math import prod

import numpy as np
from jax.typing import DTypeLike

from jdisagg.core.model_config import experts_held
from jdisagg.model.names import Index, LeafSpec, TensorSlice, in_halves
from jdisagg.model.products import STEP, STORED, TINY
from jdisagg.model.sources import TensorSource, stored_channels

STRIP_ROWS = 16  # one cache line of the transposed f32 matrix


def shard_of_leaf(source: TensorSource, rule: LeafSpec, shard: int, tp: int, dtype: DTypeLike) -> np.ndarray:
    """Returns one shard's leaf on the host, contiguous, in `dtype`."""
    if rule.experts:
        return _experts_of_shard(source, rule, shard, tp, dtype)
    parts = [_part_of_shard(source, part, shard, tp, dtype) for part in rule.parts]
    if rule.transposed:
        return _side_by_side(parts, np.dtype(dtype))
    return np.ascontiguousarray(np.concatenate(parts).astype(dtype, copy=False))


def channel_scales(source: TensorSource, rule: LeafSpec, shard: int, tp: int, dtype: str) -> np.ndarray:
    """Returns a scale f32[out] for each of a shard's output channels, over all inputs of all shards."""
    return np.concatenate([_scales_of_part(source, part, shard, tp, dtype) for part in rule.parts])


def _scales_of_part(source: TensorSource, part: TensorSlice, shard: int, tp: int, dtype: str) -> np.ndarray:
    """Returns the checkpoint's scales if it stores the tensor in `dtype`, else absolute maxima over the dtype's
    maximum."""
    rows, padding = part.index(shard, tp)[0], part.padding(shard, tp)[0]
    stored = stored_channels(source, part.name, dtype)
    if stored is not None:
        return np.pad(stored.scales(rows), (0, padding), constant_values=TINY)
    found = _read(source, part.name, (rows, slice(0, part.shape[1])), np.float32)
    absmax = np.abs(found).max(axis=1).astype(np.float32)
    return np.pad(np.maximum(absmax * np.float32(STEP[dtype]), np.float32(TINY)), (0, padding), constant_values=TINY)


def scaled_shard(source: TensorSource, rule: LeafSpec, shard: int, tp: int, dtype: str) -> np.ndarray:
    """Returns one shard's leaf in "int8" or "fp8": as stored where the checkpoint has that dtype, else rounded."""
    parts = [_scaled_part(source, part, shard, tp, dtype) for part in rule.parts]
    return _side_by_side(parts, parts[0].dtype) if rule.transposed else np.concatenate(parts)


def _scaled_part(source: TensorSource, part: TensorSlice, shard: int, tp: int, dtype: str) -> np.ndarray:
    stored, index = stored_channels(source, part.name, dtype), part.index(shard, tp)
    if stored is not None and _size(index):
        return _padded(stored.numbers(index), part, shard, tp)
    scales = _scales_of_part(source, part, shard, tp, dtype)
    rows = _part_of_shard(source, part, shard, tp, np.float32).astype(np.float32, copy=False) / scales[:, None]
    return (np.rint(rows) if dtype == "int8" else rows).astype(STORED[dtype])


def _part_of_shard(source: TensorSource, part: TensorSlice, shard: int, tp: int, dtype: DTypeLike) -> np.ndarray:
    """Returns a shard's slice of one tensor, padded with zeros."""
    return _padded(_read(source, part.name, part.index(shard, tp), dtype), part, shard, tp)


def _padded(found: np.ndarray, part: TensorSlice, shard: int, tp: int) -> np.ndarray:
    padding = part.padding(shard, tp)
    return np.pad(found, [(0, zeros) for zeros in padding]) if any(padding) else found


def _read(source: TensorSource, name: str, index: Index, dtype: DTypeLike) -> np.ndarray:
    """Reads a slice; an empty slice is not requested from the source."""
    return source.read(name, index) if _size(index) else np.zeros([each.stop - each.start for each in index], dtype)


def _size(index: Index) -> int:
    return prod(each.stop - each.start for each in index)


def _experts_of_shard(source: TensorSource, rule: LeafSpec, shard: int, tp: int, dtype: DTypeLike) -> np.ndarray:
    """Returns one shard's experts stacked; zeros beyond the last expert."""
    stacked = np.zeros((experts_held(rule.experts, tp), *rule.expert_shape), np.dtype(dtype))
    for position, parts in enumerate(rule.experts_of(shard, tp)):
        rows = np.concatenate([_whole_part(source, part) for part in parts])
        rows = in_halves(rows) if rule.paired else rows
        stacked[position] = _side_by_side([rows], stacked.dtype) if rule.transposed else rows
    return stacked


def _whole_part(source: TensorSource, part: TensorSlice) -> np.ndarray:
    """Returns one expert's matrix with outputs first."""
    found = source.read(part.name, part.index(0, 1))
    return found if part.expert is None else found[0].T


def _side_by_side(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Transposes [rows, in] matrices and joins them: [in, all rows]. Works in strips, because numpy transposes a
    cache-sized strip seven times faster than a matrix."""
    joined = np.empty((parts[0].shape[1], sum(len(part) for part in parts)), dtype)
    column = 0
    for part in parts:
        for row in range(0, len(part), STRIP_ROWS):
            strip = part[row : row + STRIP_ROWS].astype(dtype, copy=False)
            joined[:, column : column + len(strip)] = strip.T
            column += len(strip)
    return joined
