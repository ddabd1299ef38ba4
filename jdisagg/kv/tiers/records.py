"""The record of one KV page below HBM: of a fixed size, with all layers and heads, independent of the mesh.

For the transfer plan (`core/layout/reshard.py`) records are one stage with one shard. A page leaves HBM as the
slices that it would send to such a stage, each copied to its offset in the record, and is loaded as the slices that
it would receive from it. The record holds the digests of each layer and head, computed where the page was packed;
the devices that load the page check them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from jdisagg.core.layout.kv_layout import DraftPages, KVLayout
from jdisagg.core.layout.reshard import Move, StageShape, draft_shape, plan_heads
from jdisagg.core.model_identity import FINGERPRINT_DIGITS, SHORT_DIGITS
from jdisagg.core.worker_config import RAW, Digests
from jdisagg.kv.pools import PagesOfStage
from jdisagg.kv.shipping import DestinationDevices, HeadSlices, PackedMove, ReceivedSlices, padded, slice_shapes

VERSION = 1
ALIGNMENT = 64  # bytes


class RecordField(NamedTuple):
    """One array of a record and its location there."""

    kind: str
    offset: int  # offset in bytes
    shape: tuple[int, ...]  # [L, heads, ...] of one page
    dtype: np.dtype[Any]
    layers: range

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """The layout of the record of one page."""

    layout: KVLayout
    wire: str = RAW
    digests: Digests = Digests.FULL  # sampled digests say nothing about a single page, so only full ones are kept
    draft: DraftPages | None = None  # draft model whose KV is kept with the model's

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """Returns the stage shapes by which transfers see a record."""
        model = StageShape(range(self.layout.num_layers), 1, self.layout.page_size, self.layout.dtype)
        return (model,) if self.draft is None else (model, draft_shape(self.draft, 1))

    @cached_property
    def parts(self) -> tuple[RecordField, ...]:
        parts = self._parts(self.layout, range(self.layout.num_layers), 0)
        if self.draft is not None:
            parts += self._parts(self.draft.layout, self.draft.layers, _end(parts[-1]))
        return tuple(parts)

    def _parts(self, layout: KVLayout, layers: range, offset: int) -> list[RecordField]:
        heads = plan_heads(layout.num_kv_heads, 1, 1)
        shapes = slice_shapes(layout, layout.dtype, layout.num_layers, 1, heads, self.digests, self.wire)
        parts, slices = list[RecordField](), kept_slices(shapes, self.digests)
        for kind in slices.kinds:
            for each in getattr(slices, kind):
                shape, dtype = (each.shape[0], *each.shape[2:]), np.dtype(each.dtype)
                parts.append(RecordField(kind, offset, shape, dtype, layers))
                offset = _end(parts[-1])
        return parts

    def parts_of(self, layers: range) -> list[RecordField]:
        """Returns the arrays that hold these layers."""
        return [part for part in self.parts if layers.start in part.layers]

    @cached_property
    def record_bytes(self) -> int:
        return _end(self.parts[-1])

    def empty(self, count: int) -> np.ndarray:
        """Returns u8[count, record_bytes] of zeros."""
        return np.zeros((count, self.record_bytes), np.uint8)

    def view(self, records: np.ndarray, part: RecordField) -> np.ndarray:
        """Returns a view [n, L, heads, ...] of one array of the records u8[n, record_bytes]."""
        cut = records[:, part.offset : part.offset + part.num_bytes]
        return cut.view(part.dtype).reshape(len(records), *part.shape)

    def fingerprint(self, model: str) -> str:
        """Returns 32 hexadecimal digits that are equal if and only if records mean the same. `model` begins with the
        model's own fingerprint, whose first 12 digits begin the result."""
        what = f"{VERSION} {model} {self.layout} {self.wire} {self.digests is Digests.FULL}"
        if self.draft is not None:
            what += f" {self.draft}"
        own = model[:SHORT_DIGITS]
        return own + hashlib.sha256(what.encode()).hexdigest()[: FINGERPRINT_DIGITS - len(own)]


def _end(part: RecordField) -> int:
    return part.offset + -(-part.num_bytes // ALIGNMENT) * ALIGNMENT


def kept_slices(slices: HeadSlices, digests: Digests) -> HeadSlices:
    """Returns the slices that records keep; quantisation errors are checked when the record is written."""
    return slices._replace(digests=slices.digests if digests is Digests.FULL else [], errors=[])


def fill_records(form: RecordLayout, records: np.ndarray, packed: Sequence[PackedMove], error_bound: float) -> bool:
    """Copies the packed pages for `form.shapes` into records, waiting for them. Returns False if an error is over the
    bound."""
    for each in packed:
        start, stop = each.move.span.source
        heads, layers = each.move.route.heads, each.layers
        arrays = _by_slice(each)
        for part in form.parts_of(layers):
            first = part.layers.start
            view = form.view(records, part)[start:stop, layers.start - first : layers.stop - first]
            for index, array in enumerate(arrays[part.kind]):
                first = index * heads.slice_heads
                values = np.asarray(array)[:, : stop - start]
                view[:, :, first : first + heads.slice_heads] = np.swapaxes(values, 0, 1)
        if any(not float(np.asarray(array).max()) <= error_bound for array in arrays["errors"]):
            return False
    return True


def _by_slice(packed: PackedMove) -> dict[str, list[jax.Array]]:
    """Returns the arrays of the one destination shard by kind, in the order of heads."""
    kinds, arrays = packed.slices.kinds, packed.device_arrays
    number = len(arrays) // len(kinds)
    by_kind = {kind: arrays[at * number : (at + 1) * number] for at, kind in enumerate(kinds)}
    return {kind: by_kind.get(kind, []) for kind in HeadSlices._fields}


def land_records(
    form: RecordLayout, records: np.ndarray, pages: Sequence[int], stages: Sequence[PagesOfStage], moves: Sequence[Move]
) -> list[ReceivedSlices]:
    """Starts the load of records to the devices of `stages`, for these pages; `moves` are those of the plan."""
    landed = []
    for move in moves:
        start, stop = move.span.source
        stage, count = move.route.destination_stage, move.span.groups
        kinds = [part.kind for part in form.parts_of(move.route.layers)]
        arrays = list(_slices(form, records[start:stop], move, count))
        width = move.route.heads.slices_per_destination * len(kinds)
        devices = DestinationDevices.of(stages[stage], width, len(kinds))
        slices = devices.joined(jax.device_put(arrays, devices.devices), kinds)
        landed.append(
            ReceivedSlices(move.route.destination_stage, move.route.layers, slices, padded(pages[start:stop], count))
        )
    return landed


def _slices(form: RecordLayout, records: np.ndarray, move: Move, count: int) -> Iterator[np.ndarray]:
    """Yields arrays [L, count, heads, ...] in the order in which a stage receives them; padding is zeros."""
    heads, layers = move.route.heads, move.route.layers
    for row in heads.slices:
        for part in form.parts_of(layers):
            start = part.layers.start
            view = form.view(records, part)[:, layers.start - start : layers.stop - start]
            for each in row:
                if each is not None:
                    first = each.index * heads.slice_heads
                    cut = view[:, :, first : first + heads.slice_heads]
                    array = np.zeros((cut.shape[1], count, *cut.shape[2:]), part.dtype)
                    array[:, : len(records)] = np.swapaxes(cut, 0, 1)
                    yield array


# A digest of a record that is as fast as copying it.

ROW = 509  # words; prime, so that swapped blocks of a file are noticed
DIGEST_BYTES = 16


def digest_of(record: np.ndarray) -> bytes:
    """Returns the digest of u8[n]: sums of words by column, hashed. It detects accidental damage; it does not protect
    against deliberate changes."""
    words = record[: len(record) // 8 * 8].view(np.uint64)
    whole = len(words) // ROW * ROW
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed.update(words[:whole].reshape(-1, ROW).sum(axis=0, dtype=np.uint64).tobytes())
    hashed.update(words[whole:].tobytes())
    hashed.update(record[len(words) * 8 :].tobytes())
    hashed.update(len(record).to_bytes(8, "little"))
    return hashed.digest()
