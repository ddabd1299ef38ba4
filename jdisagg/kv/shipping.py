"""The device side of a KV transfer: packs pages into head slices, sends these to the destination and inserts them.

The plan of `core/layout/reshard.py` lists the moves. Each move has three asynchronous steps: a pack (a program of
the source), one put of all shards and slices (without a reshard on the way), and an insert (a donated program of the
destination). Page counts are padded to buckets with the null page. A digest of every page, layer and head is sent
with the pages, and the destination compares it before the insert. KV quantised for the transfer also brings its
quantisation error, and the destination refuses it if the error is over a bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jdisagg.core.layout.kv_layout import NULL_PAGE, SCALED, KVLayout
from jdisagg.core.layout.reshard import HeadPlan, Move, PageGroup, StageShape, narrower, padded_slices, plan_transfer
from jdisagg.core.worker_config import RAW, Digests
from jdisagg.kv.pools import POOL_SPEC, PagesOfStage, places_in, pool_format, pool_of, pools_of
from jdisagg.parallel.submesh import AXIS, WHOLE, Device, Program, StageMesh, shards_here
from pallas_kernels import PackedPages, QuantizedPages, digest_pages, pack_kv_pages, unpack_kv_pages, wire_error
from pallas_kernels.platforms import traced_for
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool, bits_of

# The programs that one shard runs: pack pages, cut them in head slices, check them, recut them and write them in place.
#
# A head slice is some heads of some pages of some layers, as one to four arrays whose axis 2 counts heads
# (`HeadSlices`). Pages are sent with the page size of the source. A destination with another page size recuts them at
# the insert.

SAMPLE = 8  # pages per digest with sampled digests
PAGE_WIRES = {"int8": "int8", "float8_e4m3fn": "fp8"}  # dtype of quantised pages -> codec of the same numbers


class HeadSlices(NamedTuple):
    """Arrays of one shard or submesh by kind; each list is ordered by heads, and empty if the kind was not sent."""

    values: list[Array]  # [L, n, heads, parts, page_size, D'], parts: 2, or 1 for latents
    scales: list[Array]  # f32 [L, n, heads, parts * page_size] if values are quantised
    digests: list[Array]  # u32 [L, pages with a digest, heads]
    errors: list[Array]  # f32 [L, 1, heads]: quantisation error of the shard's layer, repeated for each head

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(name for name, arrays in zip(self._fields, self, strict=True) if arrays)

    @property
    def numbers(self) -> HeadSlices:
        """Returns the arrays that are written into pages, without digests and errors."""
        return HeadSlices(self.values, self.scales, [], [])


def by_kind(arrays: Sequence[Array], kinds: Sequence[str]) -> HeadSlices:
    """Groups a flat list of arrays, the same number of each kind and kind by kind, by name."""
    number = len(arrays) // len(kinds)
    named = {kind: list(arrays[index * number : (index + 1) * number]) for index, kind in enumerate(kinds)}
    return HeadSlices(*(named.get(kind, []) for kind in HeadSlices._fields))


def pack_shard(
    pools: Sequence[Pool], pages: Array, *, slice_heads: int, wire: str, dtype: str, digests: Digests
) -> HeadSlices:
    """Packs pages into head slices of `slice_heads` heads.

    `pools` and `pages` are the pools of some layers with i32[n], or one pool of all layers with i32[layers, n].
    `dtype` is the dtype of raw numbers on the way, no wider than that of the pools. Numbers for quantised pages are
    quantised at the source, and that error is not checked. Quantised pages are always sent with their scales.
    """
    lost = None if wire == RAW else _lost(pools, pages, wire)
    if dtype in SCALED and not isinstance(pools[0], QuantizedPages):
        wire = PAGE_WIRES[dtype]
    elif wire == RAW and stored(pools[0]).dtype != dtype:
        count = jnp.arange(pages.size, dtype=jnp.int32)
        pools, pages = [stored(pool)[pages.reshape(-1)].astype(dtype) for pool in pools], count.reshape(pages.shape)
    packed = as_bytes(_packed(pools, pages, wire, digests=digests is Digests.FULL))
    sums = packed.digests
    if digests is Digests.SAMPLED:
        sums = _packed(pools, pages[..., ::SAMPLE], wire, digests=True).digests
    layers, heads = packed.values.shape[0], packed.values.shape[2]
    errors = None if lost is None else jnp.broadcast_to(lost[:, None, None], (layers, 1, heads))
    whole = packed.values, packed.scales, sums, errors
    return HeadSlices(*([] if each is None else jnp.split(each, heads // slice_heads, axis=2) for each in whole))


def as_bytes(packed: PackedPages) -> PackedPages:
    """Returns fp8 values as their bits, since some transports do not know the dtype."""
    values = packed.values
    return packed._replace(values=bits_of(values)) if values.dtype == jnp.float8_e4m3fn else packed


def _packed(pools: Sequence[Pool], pages: Array, wire: str, *, digests: bool) -> PackedPages:
    packed = pack_kv_pages(pools, pages.reshape(-1), wire=wire, digests=digests)
    if pages.ndim == 1:
        return packed
    return reshaped(packed, pages.shape)


def reshaped(packed: PackedPages, leading: tuple[int, ...]) -> PackedPages:
    """Returns the same pages with `leading` dimensions instead of [layers, n]."""
    values, scales, digests = (None if each is None else each.reshape(*leading, *each.shape[2:]) for each in packed)
    assert values is not None
    return PackedPages(values, scales, digests)


def _lost(pools: Sequence[Any], pages: Array, wire: str) -> Array:
    """Returns the quantisation error of each layer, f32[layers]."""
    if pages.ndim == 1:
        return wire_error(pools, pages, wire)
    return jnp.concatenate([wire_error(pools, layer, wire) for layer in pages])


def are_intact(slices: HeadSlices, *, error_bound: float) -> Array:
    """Returns bool[1] for one shard: every digest matches its page and no error is over the bound. If there are fewer
    digests than pages, they are those of every `SAMPLE`-th page."""
    values, _, digests, errors = slices
    good = jnp.bool_(True)
    for index, sent in enumerate(digests):
        step = 1 if sent.shape[1] == values[index].shape[1] else SAMPLE
        good &= jnp.all(_digests_of(slices, index, step) == sent)
    for lost in errors:
        good &= jnp.all(lost <= error_bound)
    return good[None]


def fold_shard(slices: HeadSlices, digests: Digests) -> list[Array]:
    """Recomputes the digests of one shard's slices as `pack_shard` would have sent them."""
    step = SAMPLE if digests is Digests.SAMPLED else 1
    return [_digests_of(slices, index, step) for index in range(len(slices.values))]


def _digests_of(slices: HeadSlices, index: int, step: int) -> Array:
    """Computes the digests of every `step`-th page of one slice."""
    scales = slices.scales[index][:, ::step] if slices.scales else None
    return digest_pages(slices.values[index][:, ::step], scales)


def insert_shard(pools: list[Pool], pages: Array, slices: HeadSlices) -> list[Pool]:
    """Joins the head slices of a shard, recuts them to the pools' page size and writes the pages in place. `pools` and
    `pages` have the form that `pack_shard` takes."""
    page_size = stored(pools[0]).shape[3]
    packed = PackedPages(_joined(slices.values), _joined(slices.scales) if slices.scales else None, None)
    packed = recut(packed, page_size)
    if pages.ndim > 1:
        packed = reshaped(packed, (1, pages.size))
    held: Any = pools
    return unpack_kv_pages(held, packed, pages.reshape(-1), digests=False)[0]


def _joined(slices: list[Array]) -> Array:
    return slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=2)


def recut(packed: PackedPages, page_size: int) -> PackedPages:
    """Recuts pages of consecutive tokens into pages of `page_size` tokens, without digests."""
    values, scales, _ = packed
    parts, size = values.shape[3:5]
    if size == page_size:
        return PackedPages(values, scales, None)
    if scales is not None:
        layers, count, heads, _ = scales.shape
        scales = _recut_rows(scales.reshape(layers, count, heads, parts, size, 1), page_size)
        scales = scales.reshape(*scales.shape[:3], parts * page_size)
    return PackedPages(_recut_rows(values, page_size), scales, None)


def _recut_rows(rows: Array, page_size: int) -> Array:
    """Recuts [L, n, heads, parts, size, D] to [L, n * size / page_size, heads, parts, page_size, D]. All pages are
    full."""
    layers, count, heads, parts, size, width = rows.shape
    assert count * size % page_size == 0, (rows.shape, page_size)
    tokens = rows.transpose(0, 1, 4, 2, 3, 5).reshape(layers, -1, page_size, heads, parts, width)
    return tokens.transpose(0, 1, 3, 4, 2, 5)


# Which layers may be quantised for the transfer: those whose measured error is within the bound.
#
# The error of a pack is computed with it and read once it is ready, without waiting. Quantised packs sent in the
# meantime are refused at the destination if over the bound (`are_intact`) and sent again raw, so none is ever accepted.

KEPT = 64  # packs whose errors are not read yet; the errors of older ones are checked only at the destination


class ErrorMonitor:
    """Decides which layers of one source may be quantised. Only the packing thread calls it. All processes of a mesh
    must pack alike. The leader decides for each part of a transfer from the errors of its own shards (`lead`), and the
    other processes apply its decision (`follow`). The destination refuses their shards that are over the bound."""

    def __init__(self, error_bound: float) -> None:
        self.error_bound = error_bound
        # layer ranges that are sent raw from now on, and the error that was measured
        self.over: dict[range, float] = {}
        self._led = False  # the decision for this part is fixed
        self._follows = False
        self._watched: deque[tuple[range, Sequence[Array]]] = deque(maxlen=KEPT)

    def allows(self, layers: range) -> bool:
        if not self._led:
            self._read_errors()
        return not any(set(run) & set(layers) for run in self.over)

    def lead(self) -> list[list[int]]:
        """Fixes the decision until the next call, from the errors known now. Returns the [start, stop) of layers sent
        raw."""
        self._read_errors()
        self._led = True
        return sorted([run.start, run.stop] for run in self.over)

    def follow(self, raw: Sequence[Sequence[int]]) -> None:
        """Applies the leader's decision for this part."""
        self._led = self._follows = True
        self.over = {range(first, stop): math.inf for first, stop in raw}

    def watch(self, layers: range, errors: Sequence[Array]) -> None:
        """Queues the errors of a pack, f32 [L, 1, heads] each, which need not be computed yet."""
        if not self._follows:
            self._watched.append((layers, errors))

    def _read_errors(self) -> None:
        while self._watched and _are_there(self._watched[0][1]):
            layers, errors = self._watched.popleft()
            worst = max(float(np.asarray(shard.data).max()) for array in errors for shard in array.addressable_shards)
            if not worst <= self.error_bound:
                self.over[layers] = max(worst, self.over.get(layers, 0.0))


def _are_there(arrays: Sequence[Any]) -> bool:
    return all(array.is_ready() for array in arrays)


SLICE_SPEC = PartitionSpec(None, None, AXIS)  # head slices are described at `HeadSlices`


@dataclass(frozen=True)
class ReceivedSlices:
    """Some pages of some layers that have arrived or are on the way, as slices of the destination's heads."""

    stage: int  # stage of the destination
    layers: range  # layers of the model
    slices: HeadSlices
    pages: np.ndarray  # i32[n], destination pages, 0 where padded


class TransferPrograms:
    """One submesh's programs for sending and receiving pages; stages that share a submesh share them. A TPU or GPU
    computes digests while it packs at no extra cost. A CPU reads the packed pages once more, so its digests are a
    separate program that runs while the numbers are already being sent."""

    def __init__(
        self, submesh: StageMesh, digests: Digests = Digests.FULL, error_bound: float = 1.0, *, scaled: bool = False
    ) -> None:
        """Declares the programs of `submesh`. `error_bound` is the largest accepted relative error of a layer that was
        quantised for the transfer. `scaled` is True if pages are quantised."""
        self.submesh, self.digests = submesh, digests
        self.folds_apart = submesh.devices[0].platform == "cpu" and digests is not Digests.OFF
        self._packs: dict[tuple[int, str, str], Program] = {}
        self.fold_program = submesh.program(
            partial(fold_shard, digests=digests), (SLICE_SPEC,), SLICE_SPEC, as_stored=True
        )
        formats = pool_format(submesh, scaled=scaled), None
        self.insert_program = submesh.program(
            insert_pages,
            (POOL_SPEC, WHOLE, SLICE_SPEC),
            (POOL_SPEC, WHOLE),
            donate=(0,),
            out_formats=formats,
            as_stored=True,
        )
        self.check_program = submesh.program(
            partial(are_intact, error_bound=error_bound), (SLICE_SPEC,), PartitionSpec(AXIS), as_stored=True
        )

    def pack(self, pools: Sequence[Pool], pages: np.ndarray, slice_heads: int, wire: str, dtype: str) -> HeadSlices:
        """Packs pages of some layers into head slices; each array is one slice of every source shard. `pages` are as
        `pools.places_in` returns them."""
        packed = self.pack_program(slice_heads, wire, dtype)(list(pools), self.submesh.put(pages))
        return packed._replace(digests=self.fold_program(packed.numbers)) if self.folds_apart else packed

    def pack_program(self, slice_heads: int, wire: str, dtype: str) -> Program:
        key = slice_heads, wire, dtype
        if key not in self._packs:
            digests = Digests.OFF if self.folds_apart else self.digests
            pack = partial(pack_shard, slice_heads=slice_heads, wire=wire, dtype=dtype, digests=digests)
            self._packs[key] = self.submesh.program(pack, (POOL_SPEC, WHOLE), SLICE_SPEC, as_stored=True)
        return self._packs[key]

    def insert(self, pools: Sequence[Pool], pages: np.ndarray, landed: ReceivedSlices) -> list[Pool]:
        """Returns the pools of `landed.layers` (donated) with its pages written. `pages` as `pools.places_in` returns
        them."""
        return self.insert_program(list(pools), self.submesh.put(pages), landed.slices.numbers)[0]

    def check(self, landed: ReceivedSlices) -> Array | None:
        """Returns bool[tp], True for each shard with intact slices; None if neither digests nor errors were sent."""
        slices = landed.slices
        return self.check_program(slices) if slices.digests or slices.errors else None

    @property
    def programs(self) -> list[Program]:
        return [self.insert_program, self.check_program, self.fold_program, *self._packs.values()]


def insert_pages(pools: list[Pool], pages: Array, slices: HeadSlices) -> tuple[list[Pool], Array]:
    """Runs `insert_shard`; the second result is only there to be awaited."""
    return insert_shard(pools, pages, slices), pages.reshape(-1)[:1]


@dataclass(frozen=True)
class PackedMove:
    """The packed pages of one move of the plan, still at the source."""

    move: Move
    slices: HeadSlices  # one array per slice of all source shards and kind, cut on heads
    pages: np.ndarray  # i32[n], destination pages, 0 where padded

    @property
    def stage(self) -> int:
        """Returns the stage of the destination."""
        return self.move.route.destination_stage

    @property
    def layers(self) -> range:
        """Returns the layers of the model."""
        return self.move.route.layers

    @property
    def width(self) -> int:
        """Returns the number of single-device arrays per destination shard, padding included."""
        return self.move.route.heads.slices_per_destination * len(self.slices.kinds)

    @property
    def device_arrays(self) -> list[Array]:
        """Returns the single-device arrays: kind by kind those for destination shard 0, then those for shard 1, and so
        on. Padding slices and shards of other processes have none."""
        shards = range(len(self.move.route.heads.slices))
        return [each for shard in shards for each in self.arrays_for(shard) if each is not None]

    def arrays_for(self, shard: int) -> list[Array | None]:
        """Returns the arrays for one destination shard, kind by kind; None if another process has the source shard."""
        row = [each for each in self.move.route.heads.slices[shard] if each is not None]
        return [shards_here(kind[each.index]).get(each.shard) for kind in self.slices if kind for each in row]


def shapes_of(stages: Sequence[PagesOfStage]) -> tuple[StageShape, ...]:
    return tuple(map(_shape_of, stages))


def _shape_of(stage: PagesOfStage) -> StageShape:
    held = stage.layers, stage.submesh.tp, stage.layout.page_size, stage.layout.dtype
    return StageShape(*held, stage.draft, stage.layout.num_kv_heads if stage.draft else 0)


def pack_pages(
    source: Sequence[PagesOfStage],
    programs: dict[StageMesh, TransferPrograms],
    shapes: Sequence[StageShape],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
    wire: str = RAW,
    monitor: ErrorMonitor | None = None,
) -> list[PackedMove]:
    """Packs the pages of `layers` (None: all) for stages of these shapes, in program order; returns without waiting.
    The two sides may cut layers and heads differently. The page lists name the same tokens in pages of each side's own
    size. `programs` are the source's. Layers that `monitor` does not allow are sent raw."""
    wanted, number = None if layers is None else range(*layers), (len(source_pages), len(destination_pages))
    plan = plan_transfer(shapes_of(source), tuple(shapes), source[0].layout.num_kv_heads, number, wanted)
    packed = []
    for move in plan.moves:
        stage_pages = source[move.route.source_stage]
        if not stage_pages.submesh.local_devices:
            continue  # another process packs it
        kind = wire if monitor is None or monitor.allows(move.route.layers) else RAW
        slices = _pack(stage_pages, programs[stage_pages.submesh], move, source_pages, kind)
        if monitor is not None and kind != RAW:
            monitor.watch(move.route.layers, slices.errors)
        size = move.span.groups * move.route.group.destination
        packed.append(PackedMove(move, slices, padded(destination_pages[slice(*move.span.destination)], size)))
    return packed


def _pack(
    stage_pages: PagesOfStage, programs: TransferPrograms, move: Move, source_pages: Sequence[int], wire: str
) -> HeadSlices:
    route, span = move.route, move.span
    pages = padded(source_pages[slice(*span.source)], span.groups * route.group.source)
    pools, places = stage_pages.pools[pools_of(stage_pages, route.layers)], places_in(stage_pages, route.layers, pages)
    return programs.pack(pools, places, route.heads.slice_heads, wire, route.dtype)


def ship_pages(
    source: Sequence[PagesOfStage],
    programs: dict[StageMesh, TransferPrograms],
    destination: Sequence[PagesOfStage],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
    wire: str = RAW,
    monitor: ErrorMonitor | None = None,
) -> tuple[list[ReceivedSlices], list[PackedMove]]:
    """Packs as `pack_pages` and starts the transfer to stages of this process. Returns the slices on their way and the
    packed pages at the source."""
    shapes = shapes_of(destination)
    packed = pack_pages(source, programs, shapes, source_pages, destination_pages, layers, wire, monitor)
    here = [each for each in packed if destination[each.stage].submesh.local_devices]
    return [send(each, destination[each.stage]) for each in here], packed


def null_lists(group: PageGroup, groups: int) -> tuple[list[int], list[int]]:
    """Returns page lists of both sides with null pages alone, for compiling the programs of a move of this size."""
    return [NULL_PAGE] * (groups * group.source), [NULL_PAGE] * (groups * group.destination)


def padded(pages: Sequence[int], size: int) -> np.ndarray:
    """Returns i32[size]: the pages, then null pages."""
    filled = np.zeros(size, np.int32)
    filled[: len(pages)] = pages
    return filled


def slice_shapes(
    layout: KVLayout, dtype: str, layers: int, pages: int, heads: HeadPlan, digests: Digests, wire: str = RAW
) -> HeadSlices:
    """Returns the shapes of the arrays for one destination shard of a move of `layers` layers and `pages` pages.
    `layout` is the source's; `dtype` is that of the destination's pages."""
    shape = (2, heads.slice_heads, layout.parts, layout.page_size, layout.head_dim)
    pools = [pool_of(layout, shape, (*shape[:2], layout.parts * layout.page_size))] * layers
    ids = jax.ShapeDtypeStruct((pages,), jnp.int32)
    dtype = narrower(layout.dtype, dtype)
    pack = partial(pack_shard, slice_heads=heads.slice_heads, wire=wire, dtype=dtype, digests=digests)
    with traced_for("cpu"):  # shapes are the same on every platform; the CPU code is traced fastest
        slices = jax.eval_shape(pack, pools, ids)
    return HeadSlices(*(kind * heads.slices_per_destination for kind in slices))


def check_landed(
    stages: Sequence[PagesOfStage], programs: dict[StageMesh, TransferPrograms], landed: Sequence[ReceivedSlices]
) -> list[Array]:
    """Starts to compare digests and errors. Returns bool[tp] for each move that brought some. `programs` are the
    destination's."""
    verdicts = [programs[stages[each.stage].submesh].check(each) for each in landed]
    return [verdict for verdict in verdicts if verdict is not None]


def insert_landed(
    stages: Sequence[PagesOfStage], programs: dict[StageMesh, TransferPrograms], landed: Sequence[ReceivedSlices]
) -> None:
    """Writes the received slices into the pools of their stages, in place. `programs` are the destination's."""
    for each in landed:
        stage = stages[each.stage]
        pool_slice, places = pools_of(stage, each.layers), places_in(stage, each.layers, each.pages)
        stage.pools[pool_slice] = programs[stage.submesh].insert(stage.pools[pool_slice], places, each)


def send(packed: PackedMove, stage: PagesOfStage) -> ReceivedSlices:
    """Starts one put of every array to its destination device, shard by shard; returns without waiting. If the stage
    spans processes, only the shards of this process are sent."""
    kinds, seats = packed.slices.kinds, DestinationDevices.of(stage, packed.width, len(packed.slices.kinds))
    arrays = [array for shard in seats.shards for array in packed.arrays_for(shard)]
    assert None not in arrays, f"stage {packed.stage} takes shards of another process, which only a transport brings"
    arrays = jax.device_put(arrays, seats.devices)
    return ReceivedSlices(packed.stage, packed.layers, seats.joined(arrays, kinds), packed.pages)


@dataclass(frozen=True)
class DestinationDevices:
    """The destination devices of one move's arrays, for the shards of this process."""

    submesh: StageMesh
    padding: list[list[bool]]  # [shard][array]: True if the array is padding and not sent

    @staticmethod
    def of(stage: PagesOfStage, width: int, kinds: int) -> DestinationDevices:
        """Returns the devices at a stage whose shards take `width` arrays each, of `kinds` kinds."""
        padded = padded_slices(stage.layout.num_kv_heads, stage.submesh.tp, width // kinds)
        return DestinationDevices(stage.submesh, [row * kinds for row in padded])

    @property
    def shards(self) -> list[int]:
        """Returns the shard indices of this process, in order."""
        return [self.submesh.devices.index(device) for device in self.submesh.local_devices]

    @property
    def devices(self) -> list[Device]:
        return [device for device, row in self._rows for padding in row if not padding]

    @property
    def _rows(self) -> list[tuple[Device, list[bool]]]:
        return [(self.submesh.devices[shard], self.padding[shard]) for shard in self.shards]

    def joined(self, arrays: Sequence[Array], kinds: Sequence[str]) -> HeadSlices:
        """Joins received arrays into the destination's slices: slice j of all its shards becomes one array. Padding
        becomes zeros of the shape of its kind; their digest is 0."""
        received, number = iter(arrays), len(self.padding[0]) // len(kinds)
        rows = [[None if each else next(received) for each in padding] for _, padding in self._rows]
        like = [_first(each for row in rows for each in row[start : start + number])
                for start in range(0, number * len(kinds), number)]  # fmt: skip
        columns = [
            self._column(column, like[position // number]) for position, column in enumerate(zip(*rows, strict=True))
        ]
        return by_kind([self.submesh.join(column, SLICE_SPEC, axis=2) for column in columns], kinds)

    def _column(self, column: tuple[Array | None, ...], like: Array) -> list[Array]:
        rows = zip(self._rows, column, strict=True)
        return [_zeros(like, device) if each is None else each for (device, _), each in rows]


def _first(arrays: Iterable[Array | None]) -> Array:
    return next(each for each in arrays if each is not None)


def _zeros(like: Array, device: Device) -> Array:
    return jax.device_put(np.zeros(like.shape, like.dtype), device)
