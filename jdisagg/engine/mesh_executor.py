"""`MeshExecutor`: one worker's devices, for every role. It owns weights and pages, runs plans, and decides nothing.

A worker with stages has one submesh a stage, a prefill worker without them one for all its layer groups; everything
else is the same code (`layer_group.py`, `prefill.py`, `decode.py`, and `jdisagg/kv` for shipments).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from jdisagg.core.events import WireCost
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.reshard import PageGroup, StageShape, group_pages
from jdisagg.core.layout.stages import ring_cut
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.request import Attempt
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.tiers import PageMove
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.draft_layers import DraftLayers, DraftModel, open_draft
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.headed_group import HeadedGroup
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.programs import ProgramTable, room_of, submeshes_of
from jdisagg.engine.ring_declarations import RingTable
from jdisagg.engine.ring_runner import LoadedRing, RingRunner
from jdisagg.engine.runner import Runner
from jdisagg.engine.tier_pages import PackedPages, TierPages
from jdisagg.engine.transfer_declarations import transfer_programs_of
from jdisagg.engine.warmup import Progress, null_batch, run_null
from jdisagg.kv.pools import PagesOfStage
from jdisagg.kv.shipping import (
    ErrorMonitor,
    LandedKV,
    PackedKV,
    check_landed,
    insert_landed,
    null_lists,
    pack_pages,
    ship_pages,
)
from jdisagg.model.draft_head import HeadModel
from jdisagg.model.grammars.grammars import Grammars
from jdisagg.model.looped_params import load_for_platform
from jdisagg.model.params import StageParams, StageSpec, load_stage
from jdisagg.model.ring_params import load_ring
from jdisagg.model.sources import Source
from jdisagg.parallel.submesh import Device, RingMesh, Submesh, shards_here

TIMINGS = 3  # of one pack; the least counts


@dataclass(frozen=True)
class MeshShipment:
    """Packed pages on their way; see `executor.Shipment`."""

    transfer: KVTransfer
    landed: list[LandedKV]
    packed: list[PackedKV]

    def wait_packed(self) -> None:
        jax.block_until_ready([each.slices for each in self.packed])

    def wait(self) -> None:
        jax.block_until_ready([each.slices for each in self.landed])

    @property
    def packed_bytes(self) -> int:
        return sum(array.nbytes for each in self.packed for array in jax.tree.leaves(each.slices))


class Landed(Protocol):
    """A shipment at its destination, wherever it came from."""

    @property
    def transfer(self) -> KVTransfer: ...

    @property
    def landed(self) -> list[LandedKV]: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """What an executor holds, for people."""

    weights_bytes: int
    pool_bytes: int
    num_programs: int  # compiled so far


LoadStage = Callable[[Source, StageSpec], StageParams]


@dataclass(frozen=True)
class Place:
    """What a machine was made of: from these another can be made on the same devices."""

    source: Source
    layout: KVLayout
    layers: tuple[range, ...]
    devices: tuple[Device, ...]
    dtype: DTypeLike
    weights: WeightFormat
    grammars: Grammars | None
    draft: DraftModel | HeadModel | None = None  # that guesses what is drawn


class MeshExecutor:
    """Implements `executor.Executor`."""

    def __init__(
        self,
        config: WorkerConfig,
        model: ModelConfig,
        source: Source,
        layout: KVLayout,
        layers: Sequence[range],
        devices: Sequence[Device],
        dtype: DTypeLike,
        weights: WeightFormat = AS_MADE,
        grammars: Grammars | None = None,
        load: LoadStage | None = None,
        draft: DraftModel | HeadModel | None = None,
    ) -> None:
        """Reads the weights (by `load`) and allocates the pages; `warm` must follow before the first plan.

        `layers` are the runs of layers of this worker's stages, or of its layer groups; `devices` are this worker's,
        stage-major. KV pages have the layout's dtype.
        """
        self.config, self.model = config, model
        self.place = Place(source, layout, tuple(layers), tuple(devices), dtype, weights, grammars, draft)
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
            load = load or (load_for_platform if room is None else load_stage)  # rows' adapters go layer by layer
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
        self._warming = Lock()  # a machine's peers warm what it receives by; pools are written in place

    def _group(self, params: StageParams, run: range, submesh: Submesh) -> LayerGroup:
        place, room = self.place, room_of(self.config, self.place.dtype)
        parts = params, self.model, run, submesh, place.layout
        if not isinstance(place.draft, HeadModel) or run.stop < self.model.num_layers:
            return LayerGroup(*parts, self.config.num_pages, room)
        return HeadedGroup(*parts, self.config, place.draft, place.dtype, room)

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
        """The model that guesses, or reads prompts for others, where there is one."""
        return self.runner.draft

    def owner(self, declared: DeclaredProgram) -> Any:
        """What holds the weights and pools that the program reads: a layer group, or what stands behind its stages."""
        behind = declared.stage == len(self.layer_groups)  # the ring, or the model that guesses
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

    def pack(self, transfer: KVTransfer, shapes: Sequence[StageShape]) -> list[PackedKV]:
        """Packs what is to leave for stages of these shapes, now in program order."""
        pages = transfer.source_pages, transfer.destination_pages
        how = transfer.layers, transfer.wire, self.error_monitor
        return pack_pages(self.pages, self.transfer_programs, shapes, *pages, *how)

    def pack_pages(self, pages: Sequence[int]) -> PackedPages:
        return self.tier_pages.pack(pages)

    def land_pages(self, move: PageMove, records: np.ndarray, good: Sequence[bool]) -> MeshShipment:
        pages, worker = move.destination_pages, self.config.worker
        transfer = KVTransfer(move.owner, worker, worker, (), pages, len(pages) * self.config.page_size)
        return MeshShipment(transfer, self.tier_pages.land(pages, records, good), [])

    def check(self, shipment: Landed) -> Callable[[], bool] | None:
        verdicts = check_landed(self.pages, self.transfer_programs, shipment.landed)
        here = [shard for each in verdicts for shard in shards_here(each).values()]
        return (lambda: all(np.asarray(shard).all() for shard in here)) if verdicts else None

    def drop(self, shipment: Landed) -> None:
        """It goes with its arrays."""

    def insert(self, shipment: Landed) -> None:
        if self.draft is not None and self.draft.kept:
            self.draft.arrived(shipment.transfer, [each.layers for each in shipment.landed])
        insert_landed(self.pages, self.transfer_programs, shipment.landed)
        self.runner.gates.inserted(shipment.transfer)

    @property
    def pages(self) -> list[PagesOfStage]:
        """The KV pages of each layer group, in layer order, and behind them a draft's that go with them."""
        kept = [] if self.draft is None or not self.draft.kept else [self.draft.kv]
        return [*(group.kv for group in self.layer_groups), *kept]

    @property
    def expert_loads(self) -> list[ExpertLoad]:
        """What tokens its layers' experts were sent, group by group."""
        return [group.load for group in self.layer_groups if group.sparse]

    # ------------------------------------------------------------ warm-up

    def warm(
        self,
        progress: Progress = lambda label, done, total: None,
        peers: Sequence[MeshExecutor] = (),
        more: Sequence[DeclaredProgram] = (),
    ) -> None:
        """Compiles every declared program by running it on null pages and idle slots, and `more` of its table.

        `peers` are the executors this one ships to (their inserts are compiled too). `progress(label, done, total)` is
        called before each program and once after the last, with done == total. What is warm already is not run again.
        """
        declared = [(self, each) for each in [*self.table.steps(), *self.table.transfers.tier_moves(), *more]]
        for peer in peers:
            declared += [(self, each) for each in self.table.departures(peer.table.shapes)]
            declared += [(peer, each) for each in peer.table.arrivals(self.table.shapes)]
        declared = [each for each in declared if each[1].submesh.local_devices]  # the others are other processes'
        cold = {each.key: (machine, each) for machine, each in declared if each.key not in machine.warmed}
        for done, (machine, each) in enumerate(cold.values()):
            progress(each.label if machine is self else f"{machine.config.worker} {each.label}", done, len(cold))
            machine.warm_one(each)
        progress("ready", len(cold), len(cold))

    def warm_one(self, declared: DeclaredProgram) -> None:
        """Compiles a program of this machine's table by running it; nothing is done where it is warm."""
        with self._warming:
            if declared.key not in self.warmed:
                jax.block_until_ready(run_null(self.owner(declared), declared, null_batch(declared)))
                self.warmed[declared.key] = declared

    def group_to(self, peer: WorkerConfig) -> PageGroup:
        return group_pages(self.config.page_size, peer.page_size)

    def time_packs(self, shapes: Sequence[StageShape]) -> tuple[WireCost, ...]:
        """What a page costs as each wire, on warm programs with nothing else under way; shapes: of a peer's stages."""
        group = group_pages(self.config.page_size, shapes[0].page_size)
        nulls = null_lists(group, group.buckets()[-1])

        def pack(wire: str) -> list[PackedKV]:
            return pack_pages(self.pages, self.transfer_programs, shapes, *nulls, wire=wire)

        return tuple(wire_cost(wire, partial(pack, wire), len(nulls[0])) for wire in self.config.wires)

    def recompiles(self) -> int:
        """Programs that were compiled and not by `warm`; stays 0 unless a shape or a placement was left undeclared."""
        declared = Counter(id(each.program) for each in self.warmed.values())
        return sum(max(0, each.num_compiled - declared[id(each)]) for each in self.table.owned)

    @property
    def num_compiled(self) -> int:
        return sum(program.num_compiled for program in self.table.owned)

    def figures(self) -> Figures:
        if self.ring is not None:
            return Figures(self.ring.params.num_bytes, self.ring.kv.num_bytes, self.num_compiled)
        return Figures(
            sum(group.params.num_bytes for group in self.layer_groups),
            sum(group.kv.num_bytes for group in self.layer_groups),
            self.num_compiled,
        )


def wire_cost(wire: str, pack: Callable[[], list[PackedKV]], pages: int) -> WireCost:
    """Of a page, where so many are packed at once."""
    seconds, size = [], 0
    for _ in range(TIMINGS):
        began_s = time.perf_counter()
        packed = jax.block_until_ready([array for each in pack() for array in each.device_arrays])
        seconds.append(time.perf_counter() - began_s)
        size = sum(array.nbytes for array in packed)
    return WireCost(wire, min(seconds) / pages, size // pages)
