"""KV on its way: pages packed into few arrays cut in head slices, put shard by shard, joined and scattered on arrival.

The plan of `core/layout/reshard.py` says what moves. Each move is three steps, all asynchronous: a pack (program of the
source), one put of all shards and slices (no reshard in flight), and an insert (donated program of the destination).
Page counts are padded to buckets with the null page. A digest of every page, layer and head travels
beside them, and the destination compares before it inserts; numbers that were quantised for the way bring what that
lost, and are refused over a bound.
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
from jdisagg.parallel.submesh import AXIS, WHOLE, Device, Program, Submesh, shards_here
from pallas_kernels import PackedPages, QuantizedPages, digest_pages, pack_kv_pages, unpack_kv_pages, wire_error
from pallas_kernels.platforms import traced_for
from pallas_kernels.quantized import stored
from pallas_kernels.wire_format import Pool, bits_of

# What one shard runs to send pages and to take them: packed, cut in head slices, checked, cut anew, written in
# place.
#
# A head slice is some heads of some pages of some layers, as one to four arrays whose axis 2 counts heads
# (`HeadSlices`). Pages travel as they are at the source; where the destination's are of another size, it cuts
# them anew when it writes them.

SAMPLE = 8  # pages a digest, where they are sampled
PAGE_WIRES = {"int8": "int8", "float8_e4m3fn": "fp8"}  # whose numbers pages of these dtypes hold


class HeadSlices(NamedTuple):
    """Arrays of one shard or submesh by kind; each list is in the order of heads, empty where nothing of it came."""

    values: list[Array]  # [L, n, heads, parts, page_size, D'], parts 2 or for latents 1
    scales: list[Array]  # f32 [L, n, heads, parts * page_size], where values are quantised
    digests: list[Array]  # u32 [L, pages that have one, heads]
    errors: list[Array]  # f32 [L, 1, heads]: what quantising lost (each head says what its shard's layer did)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds that came."""
        return tuple(name for name, arrays in zip(self._fields, self, strict=True) if arrays)

    @property
    def numbers(self) -> HeadSlices:
        """What is written into pages, without what only tells whether it may be."""
        return HeadSlices(self.values, self.scales, [], [])


def by_kind(arrays: Sequence[Array], kinds: Sequence[str]) -> HeadSlices:
    """As many arrays of each of these kinds, kind by kind -> the same by name."""
    number = len(arrays) // len(kinds)
    found = {kind: list(arrays[index * number : (index + 1) * number]) for index, kind in enumerate(kinds)}
    return HeadSlices(*(found.get(kind, []) for kind in HeadSlices._fields))


def pack_shard(
    pools: Sequence[Pool], pages: Array, *, slice_heads: int, wire: str, dtype: str, digests: Digests
) -> HeadSlices:
    """Pools of some layers and i32[n], or one pool of all of them and i32[layers, n] -> head slices of `slice_heads`
    heads.

    dtype: of raw numbers on their way, no wider than the pools'. Numbers for quantised pages are made what these hold
    before they leave: nobody asks what that loses. Those of quantised pages travel with scales, whoever takes them.
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
    """Numbers of fp8 as their bits: not everything on the way knows the type."""
    values = packed.values
    return packed._replace(values=bits_of(values)) if values.dtype == jnp.float8_e4m3fn else packed


def _packed(pools: Sequence[Pool], pages: Array, wire: str, *, digests: bool) -> PackedPages:
    packed = pack_kv_pages(pools, pages.reshape(-1), wire=wire, digests=digests)
    if pages.ndim == 1:
        return packed
    return reshaped(packed, pages.shape)


def reshaped(packed: PackedPages, leading: tuple[int, ...]) -> PackedPages:
    """The same pages with other leading dimensions than [layers, n]."""
    values, scales, digests = (None if each is None else each.reshape(*leading, *each.shape[2:]) for each in packed)
    assert values is not None
    return PackedPages(values, scales, digests)


def _lost(pools: Sequence[Any], pages: Array, wire: str) -> Array:
    """f32[layers]."""
    if pages.ndim == 1:
        return wire_error(pools, pages, wire)
    return jnp.concatenate([wire_error(pools, layer, wire) for layer in pages])


def are_intact(slices: HeadSlices, *, error_bound: float) -> Array:
    """bool[1] of one shard: every digest is that of its page, and no error is over the bound.

    Fewer digests than pages: of every `SAMPLE`th.
    """
    values, _, digests, errors = slices
    good = jnp.bool_(True)
    for index, sent in enumerate(digests):
        step = 1 if sent.shape[1] == values[index].shape[1] else SAMPLE
        good &= jnp.all(_digests_of(slices, index, step) == sent)
    for lost in errors:
        good &= jnp.all(lost <= error_bound)
    return good[None]


def fold_shard(slices: HeadSlices, digests: Digests) -> list[Array]:
    """What `pack_shard` would have sent as the digests of these slices of one shard, read anew."""
    step = SAMPLE if digests is Digests.SAMPLED else 1
    return [_digests_of(slices, index, step) for index in range(len(slices.values))]


def _digests_of(slices: HeadSlices, index: int, step: int) -> Array:
    """Of every `step`-th page of one slice."""
    scales = slices.scales[index][:, ::step] if slices.scales else None
    return digest_pages(slices.values[index][:, ::step], scales)


def insert_shard(pools: list[Pool], pages: Array, slices: HeadSlices) -> list[Pool]:
    """Joins the head slices of a shard, cuts them into pages of the pools' size and writes those in place; pools and
    pages as `pack_shard` takes them."""
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
    """Pages of consecutive tokens -> the same tokens in pages of `page_size`, digests dropped."""
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
    """[L, n, heads, parts, size, D] -> [L, n * size / page_size, heads, parts, page_size, D]; they fill whole pages."""
    layers, count, heads, parts, size, width = rows.shape
    assert count * size % page_size == 0, (rows.shape, page_size)
    tokens = rows.transpose(0, 1, 4, 2, 3, 5).reshape(layers, -1, page_size, heads, parts, width)
    return tokens.transpose(0, 1, 3, 4, 2, 5)


# Which layers may travel quantised: those that have not been seen to lose more than the bound.
#
# What a pack lost is computed beside it and read when it is there: nobody waits. What left meanwhile is refused
# where it lands (`packing.are_intact`) and shipped again raw, so that nothing over the bound is ever taken.

KEPT = 64  # packs whose errors are not read yet; what older ones lost is seen at the destination alone


class ErrorMonitor:
    """Of one source. Called from the one thread that packs.

    Where a source is a mesh over processes, all must pack alike: its leader decides by what its own shards lost, part
    by part (`lead`), and the others do as it says (`follow`). What their shards lose is refused where it lands.
    """

    def __init__(self, error_bound: float) -> None:
        self.error_bound = error_bound
        self.over: dict[range, float] = {}  # runs of layers that go raw from now on, and the error that was seen
        self._led = False  # whether what is raw was settled for this part
        self._follows = False
        self._watched: deque[tuple[range, Sequence[Array]]] = deque(maxlen=KEPT)

    def allows(self, layers: range) -> bool:
        if not self._led:
            self._read_errors()
        return not any(set(run) & set(layers) for run in self.over)

    def lead(self) -> list[list[int]]:
        """Decides by what is known now until it is called again: the runs of layers that go raw."""
        self._read_errors()
        self._led = True
        return sorted([run.start, run.stop] for run in self.over)

    def follow(self, raw: Sequence[Sequence[int]]) -> None:
        """Decides as the leader did for this part."""
        self._led = self._follows = True
        self.over = {range(first, stop): math.inf for first, stop in raw}

    def watch(self, layers: range, errors: Sequence[Array]) -> None:
        """errors: f32 [L, 1, heads] each, perhaps not computed yet."""
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


SLICE_SPEC = PartitionSpec(None, None, AXIS)  # see `packing.py` for what head slices are


@dataclass(frozen=True)
class LandedKV:
    """Some pages of some layers, landed or about to: slices as the destination holds them, cut on heads."""

    stage: int  # of the destination
    layers: range  # of the model
    slices: HeadSlices
    pages: np.ndarray  # i32[n], destination pages, 0 where padded


class TransferPrograms:
    """One submesh's programs for sending and taking pages; stages that share a submesh share them.

    A TPU or GPU folds digests while it packs, for nothing. A CPU reads what was packed once more, so there they are a
    program of their own, and numbers leave while it runs.
    """

    def __init__(
        self, submesh: Submesh, digests: Digests = Digests.FULL, error_bound: float = 1.0, *, scaled: bool = False
    ) -> None:
        """error_bound: the relative error of a layer over which what was quantised for the way is not intact. scaled:
        whether pages are quantised."""
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
        """Pools of some layers, and pages as `pools.places_in` -> head slices, each array one slice of every source
        shard."""
        packed = self.pack_program(slice_heads, wire, dtype)(list(pools), self.submesh.put(pages))
        return packed._replace(digests=self.fold_program(packed.numbers)) if self.folds_apart else packed

    def pack_program(self, slice_heads: int, wire: str, dtype: str) -> Program:
        key = slice_heads, wire, dtype
        if key not in self._packs:
            digests = Digests.OFF if self.folds_apart else self.digests
            pack = partial(pack_shard, slice_heads=slice_heads, wire=wire, dtype=dtype, digests=digests)
            self._packs[key] = self.submesh.program(pack, (POOL_SPEC, WHOLE), SLICE_SPEC, as_stored=True)
        return self._packs[key]

    def insert(self, pools: Sequence[Pool], pages: np.ndarray, landed: LandedKV) -> list[Pool]:
        """The pools of `landed.layers`, donated, and its pages as `pools.places_in` -> the same with them written."""
        return self.insert_program(list(pools), self.submesh.put(pages), landed.slices.numbers)[0]

    def check(self, landed: LandedKV) -> Array | None:
        """bool[tp]: whether what landed on each shard may be taken; None where nothing came to tell it by."""
        slices = landed.slices
        return self.check_program(slices) if slices.digests or slices.errors else None

    @property
    def programs(self) -> list[Program]:
        return [self.insert_program, self.check_program, self.fold_program, *self._packs.values()]


def insert_pages(pools: list[Pool], pages: Array, slices: HeadSlices) -> tuple[list[Pool], Array]:
    """`insert_shard`; the second result only says that it is done."""
    return insert_shard(pools, pages, slices), pages.reshape(-1)[:1]


@dataclass(frozen=True)
class PackedKV:
    """What one move of the plan takes, packed and still at the source."""

    move: Move
    slices: HeadSlices  # an array a slice of all source shards and kind, cut on heads
    pages: np.ndarray  # i32[n], destination pages, 0 where padded

    @property
    def stage(self) -> int:
        """Of the destination."""
        return self.move.route.destination_stage

    @property
    def layers(self) -> range:
        """Of the model."""
        return self.move.route.layers

    @property
    def width(self) -> int:
        """Arrays of one device for each destination shard, those that are padding among them."""
        return self.move.route.heads.slices_per_destination * len(self.slices.kinds)

    @property
    def device_arrays(self) -> list[Array]:
        """Arrays of one device each: those for destination shard 0, kind by kind, then those of shard 1, ...

        There are none for slices that are padding, nor of shards that other processes hold.
        """
        shards = range(len(self.move.route.heads.slices))
        return [each for shard in shards for each in self.arrays_for(shard) if each is not None]

    def arrays_for(self, shard: int) -> list[Array | None]:
        """Those for one destination shard, kind by kind; None where another process holds the source's shard."""
        row = [each for each in self.move.route.heads.slices[shard] if each is not None]
        return [shards_here(kind[each.index]).get(each.shard) for kind in self.slices if kind for each in row]


def shapes_of(stages: Sequence[PagesOfStage]) -> tuple[StageShape, ...]:
    return tuple(map(_shape_of, stages))


def _shape_of(stage: PagesOfStage) -> StageShape:
    held = stage.layers, stage.submesh.tp, stage.layout.page_size, stage.layout.dtype
    return StageShape(*held, stage.draft, stage.layout.num_kv_heads if stage.draft else 0)


def pack_pages(
    source: Sequence[PagesOfStage],
    programs: dict[Submesh, TransferPrograms],
    shapes: Sequence[StageShape],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
    wire: str = RAW,
    monitor: ErrorMonitor | None = None,
) -> list[PackedKV]:
    """Packs the pages of `layers` (None: all), now in program order, for stages of these shapes; returns at once.

    The two sides may cut layers and heads differently, and `layers` as well; the page lists hold the same tokens in
    pages of their own ends' sizes. `programs` are the source's. Layers that `monitor` does not allow go raw.
    """
    wanted, number = None if layers is None else range(*layers), (len(source_pages), len(destination_pages))
    plan = plan_transfer(shapes_of(source), tuple(shapes), source[0].layout.num_kv_heads, number, wanted)
    packed = []
    for move in plan.moves:
        held = source[move.route.source_stage]
        if not held.submesh.local_devices:
            continue  # another process packs it
        kind = wire if monitor is None or monitor.allows(move.route.layers) else RAW
        slices = _pack(held, programs[held.submesh], move, source_pages, kind)
        if monitor is not None and kind != RAW:
            monitor.watch(move.route.layers, slices.errors)
        size = move.span.groups * move.route.group.destination
        packed.append(PackedKV(move, slices, padded(destination_pages[slice(*move.span.destination)], size)))
    return packed


def _pack(
    held: PagesOfStage, programs: TransferPrograms, move: Move, source_pages: Sequence[int], wire: str
) -> HeadSlices:
    route, span = move.route, move.span
    pages = padded(source_pages[slice(*span.source)], span.groups * route.group.source)
    pools, places = held.pools[pools_of(held, route.layers)], places_in(held, route.layers, pages)
    return programs.pack(pools, places, route.heads.slice_heads, wire, route.dtype)


def ship_pages(
    source: Sequence[PagesOfStage],
    programs: dict[Submesh, TransferPrograms],
    destination: Sequence[PagesOfStage],
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    layers: tuple[int, int] | None = None,
    wire: str = RAW,
    monitor: ErrorMonitor | None = None,
) -> tuple[list[LandedKV], list[PackedKV]]:
    """Packs as `pack_pages` and starts all on its way to stages of this process; the second result is at the source."""
    shapes = shapes_of(destination)
    packed = pack_pages(source, programs, shapes, source_pages, destination_pages, layers, wire, monitor)
    here = [each for each in packed if destination[each.stage].submesh.local_devices]
    return [send(each, destination[each.stage]) for each in here], packed


def null_lists(group: PageGroup, groups: int) -> tuple[list[int], list[int]]:
    """Page lists of both ends for a move of this size that touches nothing: to compile its programs by."""
    return [NULL_PAGE] * (groups * group.source), [NULL_PAGE] * (groups * group.destination)


def padded(pages: Sequence[int], size: int) -> np.ndarray:
    """i32[size]: the pages, then null pages."""
    filled = np.zeros(size, np.int32)
    filled[: len(pages)] = pages
    return filled


def slice_shapes(
    layout: KVLayout, dtype: str, layers: int, pages: int, heads: HeadPlan, digests: Digests, wire: str = RAW
) -> HeadSlices:
    """The arrays for one destination shard, as shapes, of a move of `layers` layers and `pages` pages.

    layout: of the source; dtype: of the destination's pages.
    """
    shape = (2, heads.slice_heads, layout.parts, layout.page_size, layout.head_dim)
    pools = [pool_of(layout, shape, (*shape[:2], layout.parts * layout.page_size))] * layers
    ids = jax.ShapeDtypeStruct((pages,), jnp.int32)
    dtype = narrower(layout.dtype, dtype)
    pack = partial(pack_shard, slice_heads=heads.slice_heads, wire=wire, dtype=dtype, digests=digests)
    with traced_for("cpu"):  # shapes are the same on every platform: those of the code that is traced fastest
        slices = jax.eval_shape(pack, pools, ids)
    return HeadSlices(*(kind * heads.slices_per_destination for kind in slices))


def check_landed(
    stages: Sequence[PagesOfStage], programs: dict[Submesh, TransferPrograms], landed: Sequence[LandedKV]
) -> list[Array]:
    """Starts to compare digests and errors: bool[tp] for each that came with some. `programs`: the destination's."""
    verdicts = [programs[stages[each.stage].submesh].check(each) for each in landed]
    return [verdict for verdict in verdicts if verdict is not None]


def insert_landed(
    stages: Sequence[PagesOfStage], programs: dict[Submesh, TransferPrograms], landed: Sequence[LandedKV]
) -> None:
    """Scatters what has landed into the pools of its stages, in place. `programs`: the destination's."""
    for each in landed:
        stage = stages[each.stage]
        held, places = pools_of(stage, each.layers), places_in(stage, each.layers, each.pages)
        stage.pools[held] = programs[stage.submesh].insert(stage.pools[held], places, each)


def send(packed: PackedKV, stage: PagesOfStage) -> LandedKV:
    """Starts every array on its way to its destination device, shards as they are in one put; returns at once.

    Of a stage that spans processes, to the shards of this one.
    """
    kinds, seats = packed.slices.kinds, Seats.of(stage, packed.width, len(packed.slices.kinds))
    arrays = [array for shard in seats.shards for array in packed.arrays_for(shard)]
    assert None not in arrays, f"stage {packed.stage} takes shards of another process, which only a transport brings"
    arrays = jax.device_put(arrays, seats.devices)
    return LandedKV(packed.stage, packed.layers, seats.joined(arrays, kinds), packed.pages)


@dataclass(frozen=True)
class Seats:
    """Where the device arrays of one move go at its destination, one by one: to the shards of this process."""

    submesh: Submesh
    padding: list[list[bool]]  # [shard][array]: no array comes for it

    @staticmethod
    def of(stage: PagesOfStage, width: int, kinds: int) -> Seats:
        """At a stage whose shards take `width` arrays each, of so many kinds."""
        padded = padded_slices(stage.layout.num_kv_heads, stage.submesh.tp, width // kinds)
        return Seats(stage.submesh, [row * kinds for row in padded])

    @property
    def shards(self) -> list[int]:
        """Of this process, in order."""
        return [self.submesh.devices.index(device) for device in self.submesh.local_devices]

    @property
    def devices(self) -> list[Device]:
        return [device for device, row in self._rows for padding in row if not padding]

    @property
    def _rows(self) -> list[tuple[Device, list[bool]]]:
        return [(self.submesh.devices[shard], self.padding[shard]) for shard in self.shards]

    def joined(self, arrays: Sequence[Array], kinds: Sequence[str]) -> HeadSlices:
        """Arrays that have arrived -> the destination's slices: slice j of all its shards as one array.

        Padding is zeros, whose digest is 0, of the shape that all arrays of a kind have.
        """
        came, number = iter(arrays), len(self.padding[0]) // len(kinds)
        rows = [[None if each else next(came) for each in padding] for _, padding in self._rows]
        like = [_first(each for row in rows for each in row[place : place + number])
                for place in range(0, number * len(kinds), number)]  # fmt: skip
        columns = [self._column(column, like[place // number]) for place, column in enumerate(zip(*rows, strict=True))]
        return by_kind([self.submesh.join(column, SLICE_SPEC, axis=2) for column in columns], kinds)

    def _column(self, column: tuple[Array | None, ...], like: Array) -> list[Array]:
        rows = zip(self._rows, column, strict=True)
        return [_zeros(like, device) if each is None else each for (device, _), each in rows]


def _first(arrays: Iterable[Array | None]) -> Array:
    return next(each for each in arrays if each is not None)


def _zeros(like: Array, device: Device) -> Array:
    return jax.device_put(np.zeros(like.shape, like.dtype), device)
