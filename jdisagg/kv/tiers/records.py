"""A page below HBM: one record of a fixed size, of all layers and all heads, whatever mesh wrote it or will read it.

For the plan of transfers (`core/layout/reshard.py`) records are an end with one stage and one shard: a page leaves
HBM as the slices that it would send there, each copied to its place in the record, and comes back as the slices that
it would get from there. Digests of each layer and head, made where the page was packed, lie in the record, and are
checked by the devices that take it.
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
from jdisagg.kv.shipping import HeadSlices, LandedKV, PackedKV, Seats, padded, slice_shapes

VERSION = 1
ALIGNMENT = 64  # bytes


class Part(NamedTuple):
    """One kind of array in a record."""

    kind: str
    offset: int  # bytes
    shape: tuple[int, ...]  # [L, heads, ...] of one page
    dtype: np.dtype[Any]
    layers: range

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """What is where in the record of one page."""

    layout: KVLayout
    wire: str = RAW
    digests: Digests = Digests.FULL  # sampled ones tell nothing of a single page: then there are none
    draft: DraftPages | None = None  # whose KV is kept with the model's

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """What transfers must know of the end that records are."""
        model = StageShape(range(self.layout.num_layers), 1, self.layout.page_size, self.layout.dtype)
        return (model,) if self.draft is None else (model, draft_shape(self.draft, 1))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        parts = self._parts(self.layout, range(self.layout.num_layers), 0)
        if self.draft is not None:
            parts += self._parts(self.draft.layout, self.draft.layers, _end(parts[-1]))
        return tuple(parts)

    def _parts(self, layout: KVLayout, layers: range, offset: int) -> list[Part]:
        heads = plan_heads(layout.num_kv_heads, 1, 1)
        shapes = slice_shapes(layout, layout.dtype, layout.num_layers, 1, heads, self.digests, self.wire)
        parts, kept = list[Part](), kept_slices(shapes, self.digests)
        for kind in kept.kinds:
            for each in getattr(kept, kind):
                shape, dtype = (each.shape[0], *each.shape[2:]), np.dtype(each.dtype)
                parts.append(Part(kind, offset, shape, dtype, layers))
                offset = _end(parts[-1])
        return parts

    def parts_of(self, layers: range) -> list[Part]:
        """Those that these layers are in."""
        return [part for part in self.parts if layers.start in part.layers]

    @cached_property
    def record_bytes(self) -> int:
        return _end(self.parts[-1])

    def empty(self, count: int) -> np.ndarray:
        """u8[count, record_bytes], zeros."""
        return np.zeros((count, self.record_bytes), np.uint8)

    def view(self, records: np.ndarray, part: Part) -> np.ndarray:
        """[n, L, heads, ...] of records u8[n, record_bytes], in place."""
        cut = records[:, part.offset : part.offset + part.num_bytes]
        return cut.view(part.dtype).reshape(len(records), *part.shape)

    def fingerprint(self, model: str) -> str:
        """Returns 32 hexadecimal digits that are equal where records mean the same.

        `model` begins with the model's own fingerprint, whose first 12 digits begin the result.
        """
        what = f"{VERSION} {model} {self.layout} {self.wire} {self.digests is Digests.FULL}"
        if self.draft is not None:
            what += f" {self.draft}"
        own = model[:SHORT_DIGITS]
        return own + hashlib.sha256(what.encode()).hexdigest()[: FINGERPRINT_DIGITS - len(own)]


def _end(part: Part) -> int:
    return part.offset + -(-part.num_bytes // ALIGNMENT) * ALIGNMENT


def kept_slices(slices: HeadSlices, digests: Digests) -> HeadSlices:
    """What of these is in records: what quantising lost is looked at when they are written."""
    return slices._replace(digests=slices.digests if digests is Digests.FULL else [], errors=[])


def fill_records(form: RecordLayout, records: np.ndarray, packed: Sequence[PackedKV], error_bound: float) -> bool:
    """Copies what was packed for `form.shapes` into records; waits for it. False where quantising lost too much."""
    for each in packed:
        start, stop = each.move.span.source
        heads, layers = each.move.route.heads, each.layers
        arrays = _by_slice(each)
        for part in form.parts_of(layers):
            first = part.layers.start
            view = form.view(records, part)[start:stop, layers.start - first : layers.stop - first]
            for index, array in enumerate(arrays[part.kind]):
                first = index * heads.slice_heads
                held = np.asarray(array)[:, : stop - start]
                view[:, :, first : first + heads.slice_heads] = np.swapaxes(held, 0, 1)
        if any(not float(np.asarray(array).max()) <= error_bound for array in arrays["errors"]):
            return False
    return True


def _by_slice(packed: PackedKV) -> dict[str, list[jax.Array]]:
    """By kind, the arrays of the one destination shard in the order of heads."""
    kinds, arrays = packed.slices.kinds, packed.device_arrays
    number = len(arrays) // len(kinds)
    found = {kind: arrays[at * number : (at + 1) * number] for at, kind in enumerate(kinds)}
    return {kind: found.get(kind, []) for kind in HeadSlices._fields}


def land_records(
    form: RecordLayout, records: np.ndarray, pages: Sequence[int], stages: Sequence[PagesOfStage], moves: Sequence[Move]
) -> list[LandedKV]:
    """Starts records on their way to the devices of `stages`, for these pages; `moves` are the plan's."""
    landed = []
    for move in moves:
        start, stop = move.span.source
        at, count = move.route.destination_stage, move.span.groups
        kinds = [part.kind for part in form.parts_of(move.route.layers)]
        arrays = list(_slices(form, records[start:stop], move, count))
        width = move.route.heads.slices_per_destination * len(kinds)
        seats = Seats.of(stages[at], width, len(kinds))
        slices = seats.joined(jax.device_put(arrays, seats.devices), kinds)
        landed.append(
            LandedKV(move.route.destination_stage, move.route.layers, slices, padded(pages[start:stop], count))
        )
    return landed


def _slices(form: RecordLayout, records: np.ndarray, move: Move, count: int) -> Iterator[np.ndarray]:
    """[L, count, heads, ...] each, in the order in which a stage takes them; padding is zeros."""
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


# A digest of a record that is as quick as copying it.

ROW = 509  # words; prime, so that blocks of a file that change places are seen
DIGEST_BYTES = 16


def digest_of(record: np.ndarray) -> bytes:
    """Of u8[n]: sums of words, column by column, hashed. Chance finds no two alike; who means harm may."""
    words = record[: len(record) // 8 * 8].view(np.uint64)
    whole = len(words) // ROW * ROW
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed.update(words[:whole].reshape(-1, ROW).sum(axis=0, dtype=np.uint64).tobytes())
    hashed.update(words[whole:].tobytes())
    hashed.update(record[len(words) * 8 :].tobytes())
    hashed.update(len(record).to_bytes(8, "little"))
    return hashed.digest()
