"""The executor of one worker on its devices, for every role.

`MeshExecutor` owns weights and pages and runs plans; it takes no scheduling decisions. A worker with stages has one
submesh per stage. A prefill worker without stages has one submesh for all of its layer groups. All other code is shared
(`layer_group.py`, `prefill.py`, `decode.py`, and `jdisagg/kv` for shipments).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from jdisagg.core.events import WireCost
from jdisagg.core.layout.kv_layout import NULL_PAGE, DraftPages, KVLayout
from jdisagg.core.layout.reshard import PageGroup, StageShape, group_pages, plan_transfer
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.request import Attempt
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.tiers import PageMove
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.programs import (
    ProgramTable,
    Progress,
    null_batch,
    room_of,
    run_null,
    submeshes_of,
    transfer_programs_of,
)
from jdisagg.engine.ring import LoadedRing, RingRunner
from jdisagg.engine.ring_declarations import RingTable
from jdisagg.engine.runner import Runner
from jdisagg.engine.spec.draft_layers import DraftLayers, DraftModel, open_draft
from jdisagg.engine.spec.eagle import EagleLayerGroup
from jdisagg.kv.pools import PagesOfStage
from jdisagg.kv.shipping import (
    ErrorMonitor,
    PackedMove,
    ReceivedSlices,
    TransferPrograms,
    check_landed,
    insert_landed,
    null_lists,
    pack_pages,
    shapes_of,
    ship_pages,
)
from jdisagg.kv.tiers.records import RecordLayout, fill_records, land_records
from jdisagg.model.draft_head import HeadModel
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.model.looped_params import load_for_platform, load_held, whole_stage
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.reshard import HeldWeights
from jdisagg.model.ring_params import load_ring
from jdisagg.model.sources import TensorSource
from jdisagg.parallel.submesh import Device, RingMesh, StageMesh, shards_here

# Moves pages between HBM and the records of lower tiers: the device side of `kv/tiers`.


@dataclass(frozen=True)
class PackedPages:
    """Pages that were packed as records, in program order."""

    form: RecordLayout
    packed: list[PackedMove]
    count: int
    error_bound: float

    def read(self) -> tuple[np.ndarray, bool]:
        """Returns (records u8[n, record_bytes], True if they may be kept); blocks until they are packed."""
        records = self.form.empty(self.count)
        return records, fill_records(self.form, records, self.packed, self.error_bound)


class TierPages:
    """Packs and inserts the pages of one worker that move to and from tiers below HBM."""

    def __init__(
        self,
        config: WorkerConfig,
        stages: Sequence[PagesOfStage],
        programs: Mapping[StageMesh, TransferPrograms],
        draft: DraftPages | None = None,
    ) -> None:
        """Takes the pools by stage; draft: set if the last stage's pages are a draft model's."""
        self.config, self.stages, self.programs = config, stages, dict(programs)
        self.form = RecordLayout(stages[0].layout, config.tier_wire, config.digests, draft)

    def pack(self, pages: Sequence[int]) -> PackedPages:
        """Dispatches the packing of the pages in program order and returns at once."""
        wire = self.config.tier_wire
        packed = pack_pages(self.stages, self.programs, self.form.shapes, pages, pages, wire=wire)
        return PackedPages(self.form, packed, len(pages), self.config.error_bound)

    def land(self, pages: Sequence[int], records: np.ndarray, good: Sequence[bool]) -> list[ReceivedSlices]:
        """Starts the copy of records to the devices, for these pages; a record that is not `good` goes to the null
        page."""
        places = [page if fine else NULL_PAGE for page, fine in zip(pages, good, strict=True)]
        if not all(good):
            records[np.flatnonzero(~np.array(good))] = 0
        shapes, number = shapes_of(self.stages), len(pages)
        plan = plan_transfer(self.form.shapes, shapes, self.form.layout.num_kv_heads, (number, number))
        return land_records(self.form, records, places, self.stages, plan.moves)


TIMINGS = 3  # runs of one pack; the shortest is reported


@dataclass(frozen=True)
class MeshShipment:
    """Packed pages in transfer; see `executor.Shipment`."""

    transfer: KVTransfer
    landed: list[ReceivedSlices]
    packed: list[PackedMove]

    def wait_packed(self) -> None:
        jax.block_until_ready([each.slices for each in self.packed])

    def wait(self) -> None:
        jax.block_until_ready([each.slices for each in self.landed])

    @property
    def packed_bytes(self) -> int:
        return sum(array.nbytes for each in self.packed for array in jax.tree.leaves(each.slices))


class LandedShipment(Protocol):
    """A shipment that has arrived at its destination, from any kind of source."""

    @property
    def transfer(self) -> KVTransfer: ...

    @property
    def landed(self) -> list[ReceivedSlices]: ...


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory and program counts of an executor, for reports."""

    weights_bytes: int
    pool_bytes: int
    num_programs: int  # compiled so far


LoadStage = Callable[[TensorSource, StageSpec], StageParams]


@dataclass(frozen=True)
class ExecutorSpec:
    """The arguments that an executor was made with; a reshape makes another executor from them on the same devices."""

    source: TensorSource
    layout: KVLayout
    layers: tuple[range, ...]
    devices: tuple[Device, ...]
    dtype: DTypeLike
    weights: WeightFormat
    grammars: CompiledGrammars | None
    draft: DraftModel | HeadModel | None = None  # the draft model or draft head


class MeshExecutor:
    """An `Executor` on a mesh of devices."""

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelConfig,
        source: TensorSource,
        layout: KVLayout,
        layers: Sequence[range],
        devices: Sequence[Device],
        dtype: DTypeLike,
        weights: WeightFormat = AS_MADE,
        grammars: CompiledGrammars | None = None,
        load: LoadStage | None = None,
        draft: DraftModel | HeadModel | None = None,
    ) -> None:
        """Loads the weights (by `load`) and allocates the pages; `warm` must follow before the first plan. `layers` are
        the ranges of layers of this worker's stages, or of its layer groups; `devices` are this worker's, stage-major.
        KV pages have the layout's dtype."""
        self.config, self.model = config, model
        self.place = ExecutorSpec(source, layout, tuple(layers), tuple(devices), dtype, weights, grammars, draft)
        self.error_monitor = ErrorMonitor(config.error_bound)
        self.ring: LoadedRing | None = None
        room = room_of(config, dtype)
        if config.is_ring:
            cut, mesh = ring_cut(model, config.decode.n), RingMesh(devices, config.decode.n)
            assert tuple(layers) == cut.runs, (layers, cut.runs)
            params = load_ring(source, model, cut, mesh, dtype, weights)
            self.ring = LoadedRing(config, model, layout, cut, mesh, params, room)
            self.layer_groups: list[Any] = list(self.ring.stages)
        else:
            submeshes = submeshes_of(config, len(layers), devices)
            cuts = list(zip(layers, submeshes, strict=True))
            load = load or (load_for_platform if room is None else load_stage)  # layers with adapters cannot be looped
            specs = [StageSpec(model, run, submesh.mesh, dtype, weights) for run, submesh in cuts]
            self.layer_groups = [
                self._group(load(source, spec), run, submesh) for spec, (run, submesh) in zip(specs, cuts, strict=True)
            ]
        self.transfer_programs = transfer_programs_of(config, [group.submesh for group in self.layer_groups], layout)
        self.runner = self._runner()
        kept = None if self.draft is None or not self.draft.kept else self.draft.pages
        self.tier_pages = TierPages(config, self.pages, self.transfer_programs, kept)
        self.table = self._table()
        self.warmed: dict[Any, DeclaredProgram] = {}  # by key
        self._warming = Lock()  # peers warm this executor's inserts, and pools are written in place

    def _group(self, params: StageParams, run: range, submesh: StageMesh) -> LayerGroup:
        place, room = self.place, room_of(self.config, self.place.dtype)
        parts = params, self.model, run, submesh, place.layout
        if not isinstance(place.draft, HeadModel) or run.stop < self.model.num_layers:
            return LayerGroup(*parts, self.config.num_pages, room)
        return EagleLayerGroup(*parts, self.config, place.draft, place.dtype, room)

    def _adapters(self) -> AdapterSlots | None:
        owners = [self.ring] if self.ring is not None else self.layer_groups
        programs = [owner.adapters for owner in owners if owner.adapters is not None]
        config = self.config
        return AdapterSlots(self.model, programs, config.max_loras, config.max_lora_rank) if programs else None

    def _runner(self) -> Runner | RingRunner:
        if self.ring is not None:
            return RingRunner(self.ring, self.config, self.place.grammars, self._adapters())
        parts = self.layer_groups, self.config, self.model.vocab_size, self.place.grammars
        return Runner(
            *parts, self._adapters(), open_draft(self.place, self.config, self.model, self.layer_groups[-1].submesh)
        )

    @property
    def draft(self) -> DraftLayers | None:
        """Returns the draft model's layers, or None if this executor runs no draft model."""
        return self.runner.draft

    def owner(self, declared: DeclaredProgram) -> Any:
        """Returns the owner of the weights and pools that the program reads: a layer group, the ring or the draft
        model. A stage number behind the last layer group stands for the ring or the draft model."""
        behind = declared.stage == len(self.layer_groups)  # the ring, or the draft model
        return (self.ring or self.draft) if behind else self.layer_groups[declared.stage]

    def _table(self) -> ProgramTable:
        sizes = self.config, self.model, self.place.layout, self.place.dtype
        owners: Any = self.layer_groups, self.transfer_programs, self.runner.prefiller, self.runner.decoder
        if self.ring is not None:
            return RingTable(*sizes, *owners, ring=self.ring)
        return ProgramTable(*sizes, *owners, draft=self.draft, **self.runner.programs)

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        return self.runner.run(plan, group_done)

    def open_gates(self, attempt: Attempt) -> None:
        self.runner.gates.open(attempt)

    def ship(self, transfer: KVTransfer, destination: MeshExecutor) -> MeshShipment:
        pages = transfer.source_pages, transfer.destination_pages
        how = transfer.layers, transfer.wire, self.error_monitor
        landed, packed = ship_pages(self.pages, self.transfer_programs, destination.pages, *pages, *how)
        return MeshShipment(transfer, landed, packed)

    def pack(self, transfer: KVTransfer, shapes: Sequence[StageShape]) -> list[PackedMove]:
        """Packs the pages for destination stages of these shapes, in program order."""
        pages = transfer.source_pages, transfer.destination_pages
        how = transfer.layers, transfer.wire, self.error_monitor
        return pack_pages(self.pages, self.transfer_programs, shapes, *pages, *how)

    def pack_pages(self, pages: Sequence[int]) -> PackedPages:
        return self.tier_pages.pack(pages)

    def land_pages(self, move: PageMove, records: np.ndarray, good: Sequence[bool]) -> MeshShipment:
        pages, worker = move.destination_pages, self.config.worker
        transfer = KVTransfer(move.owner, worker, worker, (), pages, len(pages) * self.config.page_size)
        return MeshShipment(transfer, self.tier_pages.land(pages, records, good), [])

    def check(self, shipment: LandedShipment) -> Callable[[], bool] | None:
        verdicts = check_landed(self.pages, self.transfer_programs, shipment.landed)
        here = [shard for each in verdicts for shard in shards_here(each).values()]
        return (lambda: all(np.asarray(shard).all() for shard in here)) if verdicts else None

    def drop(self, shipment: LandedShipment) -> None:
        """Drops a shipment that is not inserted; its memory is freed with its arrays."""

    def insert(self, shipment: LandedShipment) -> None:
        if self.draft is not None and self.draft.kept:
            self.draft.arrived(shipment.transfer, [each.layers for each in shipment.landed])
        insert_landed(self.pages, self.transfer_programs, shipment.landed)
        self.runner.gates.inserted(shipment.transfer)

    @property
    def pages(self) -> list[PagesOfStage]:
        """Returns the KV pages of each layer group, in layer order, then those of the draft model that are shipped with
        them."""
        kept = [] if self.draft is None or not self.draft.kept else [self.draft.kv]
        return [*(group.kv for group in self.layer_groups), *kept]

    @property
    def expert_loads(self) -> list[ExpertLoad]:
        """Returns the token counts of the experts, per layer group that has experts."""
        return [group.load for group in self.layer_groups if group.sparse]

    # ------------------------------------------------------------ warm-up

    def warm(
        self,
        progress: Progress = lambda label, done, total: None,
        peers: Sequence[MeshExecutor] = (),
        more: Sequence[DeclaredProgram] = (),
    ) -> None:
        """Compiles every declared program by running it on null pages and idle slots; more: further programs of the
        table.

        `peers` are the executors this one ships to; their inserts are compiled too. `progress(label, done, total)` is
        called before each program and once after the last, with done == total. Programs that are warm already are
        skipped.
        """
        declared = [(self, each) for each in [*self.table.steps(), *self.table.transfers.tier_moves(), *more]]
        for peer in peers:
            declared += [(self, each) for each in self.table.departures(peer.table.shapes)]
            declared += [(peer, each) for each in peer.table.arrivals(self.table.shapes)]
        declared = [each for each in declared if each[1].submesh.local_devices]  # others run in other processes
        cold = {each.key: (executor, each) for executor, each in declared if each.key not in executor.warmed}
        for done, (executor, each) in enumerate(cold.values()):
            progress(each.label if executor is self else f"{executor.config.worker} {each.label}", done, len(cold))
            executor.warm_one(each)
        progress("ready", len(cold), len(cold))

    def warm_one(self, declared: DeclaredProgram) -> None:
        """Compiles one program of this executor's table by running it; does nothing if it is warm."""
        with self._warming:
            if declared.key not in self.warmed:
                jax.block_until_ready(run_null(self.owner(declared), declared, null_batch(declared)))
                self.warmed[declared.key] = declared

    def group_to(self, peer: WorkerConfig) -> PageGroup:
        return group_pages(self.config.page_size, peer.page_size)

    def time_packs(self, shapes: Sequence[StageShape]) -> tuple[WireCost, ...]:
        """Measures the cost of packing a page with each codec, on warm programs and idle devices. shapes: the stages of
        a peer."""
        group = group_pages(self.config.page_size, shapes[0].page_size)
        nulls = null_lists(group, group.buckets()[-1])

        def pack(wire: str) -> list[PackedMove]:
            return pack_pages(self.pages, self.transfer_programs, shapes, *nulls, wire=wire)

        return tuple(wire_cost(wire, partial(pack, wire), len(nulls[0])) for wire in self.config.wires)

    def recompiles(self) -> int:
        """Returns how many programs were compiled outside `warm`; above 0 if a shape or placement was undeclared."""
        declared = Counter(id(each.program) for each in self.warmed.values())
        return sum(max(0, each.num_compiled - declared[id(each)]) for each in self.table.owned)

    @property
    def num_compiled(self) -> int:
        return sum(program.num_compiled for program in self.table.owned)

    def figures(self) -> MemoryStats:
        if self.ring is not None:
            return MemoryStats(self.ring.params.num_bytes, self.ring.kv.num_bytes, self.num_compiled)
        return MemoryStats(
            sum(group.params.num_bytes for group in self.layer_groups),
            sum(group.kv.num_bytes for group in self.layer_groups),
            self.num_compiled,
        )


def wire_cost(wire: str, pack: Callable[[], list[PackedMove]], pages: int) -> WireCost:
    """Measures the cost of one page if `pages` are packed at once: the shortest of TIMINGS runs, and the bytes."""
    seconds, size = [], 0
    for _ in range(TIMINGS):
        began_s = time.perf_counter()
        packed = jax.block_until_ready([array for each in pack() for array in each.device_arrays])
        seconds.append(time.perf_counter() - began_s)
        size = sum(array.nbytes for array in packed)
    return WireCost(wire, min(seconds) / pages, size // pages)


# Reshaping: makes a new executor on the devices of an old one. Weights are resharded in place; pages are new and empty.
#
# The old executor is unusable afterwards. Its pages are freed first to make room, and each weight is freed as soon as
# its new shards exist.


@dataclass(frozen=True, slots=True)
class ReshapeTarget:
    """The target of a reshape: the worker's sizes, its KV layout and the layers of its stages or layer groups."""

    config: WorkerConfig
    layout: KVLayout
    layers: tuple[range, ...]


def shape_of(executor: MeshExecutor) -> ReshapeTarget:
    return ReshapeTarget(executor.config, executor.place.layout, executor.place.layers)


def reshaped(executor: MeshExecutor, shape: ReshapeTarget) -> tuple[MeshExecutor, HeldWeights]:
    """Returns (a new executor on the same devices, the weights that were moved and those that were read again)."""
    held, place = HeldWeights(), executor.place
    for group in executor.layer_groups:
        group.kv.pools.clear()
    _give_up_draft(executor)
    for group in executor.layer_groups:
        spec = StageSpec(executor.model, group.layers, group.submesh.mesh, place.dtype, place.weights)
        held.add(whole_stage(group.given_up(), spec), spec)
    return _make_executor(executor, shape, held), held


def read_anew(executor: MeshExecutor, shape: ReshapeTarget) -> MeshExecutor:
    """Returns the executor after a reshape failed half way; all weights are read from their source again."""
    for group in executor.layer_groups:
        group.params.leaves.clear()
        group.kv.pools.clear()
    _give_up_draft(executor)
    return _make_executor(executor, shape, None)


def _give_up_draft(executor: MeshExecutor) -> None:
    """Frees the draft model. It is small and is loaded again if the new executor decodes."""
    if executor.draft is not None:
        executor.draft.params.leaves.clear()
        executor.draft.kv.pools.clear()


def _make_executor(executor: MeshExecutor, shape: ReshapeTarget, held: HeldWeights | None) -> MeshExecutor:
    place = replace(executor.place, layout=shape.layout, layers=shape.layers)
    parts = place.source, place.layout, place.layers, place.devices, place.dtype, place.weights, place.grammars
    if held is None:
        return MeshExecutor(shape.config, executor.model, *parts, draft=place.draft)
    load = held.load if shape.config.max_loras else partial(load_held, held)
    return MeshExecutor(shape.config, executor.model, *parts, load=load, draft=place.draft)


Owned = tuple[MeshExecutor, DeclaredProgram]


def programs_with(executor: MeshExecutor, others: Sequence[MeshExecutor]) -> Iterator[Owned]:
    """Yields an executor's steps and the programs for KV transfers with the others, each with the executor that runs
    it."""
    yield from ((executor, each) for each in [*executor.table.steps(), *executor.table.transfers.tier_moves()])
    for other in others:
        roles = executor.config.role, other.config.role
        if roles == (Role.PREFILL, Role.DECODE):
            yield from _between(executor, other)
        elif roles == (Role.DECODE, Role.PREFILL):
            yield from _between(other, executor)


def _between(source: MeshExecutor, destination: MeshExecutor) -> Iterator[Owned]:
    yield from ((source, each) for each in source.table.departures(destination.table.shapes))
    yield from ((destination, each) for each in destination.table.arrivals(source.table.shapes))


def compile_cold(programs: Sequence[Owned]) -> list[Owned]:
    """Compiles the programs that are not warm, from the compilation cache if they are in it; runs nothing. Returns
    these programs; a call of each is quick from now on."""
    cold = {each.key: (executor, each) for executor, each in programs if each.key not in executor.warmed}
    for _, each in cold.values():
        each.program.lower(*each.arguments).compile()
    return list(cold.values())
