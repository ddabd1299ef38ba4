"""Declares every device program of a worker.

Warm-up runs these programs, `jdisagg aot` compiles them for chips that are not attached, the profiler times them, and
the count of recompiles is compared with them. A `ProgramTable` is built from a worker's sizes and the owners of its
jitted functions. The owners hold weights and pages (`MeshExecutor`) or shapes alone (`abstract_table`). A program that
is added to a step must be added to `steps`: a test serves a mixed load with executors that were never warmed and
compares what they compile with this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdisagg.core.layout.kv_layout import DraftPages, KVLayout
from jdisagg.core.layout.reshard import Route, StageShape, draft_shape, plan_routes
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.worker_config import RAW, Digests, WorkerConfig
from jdisagg.engine.adapter_slots import declared_fills
from jdisagg.engine.declaration import DeclaredProgram, abstract, local_bytes, whole
from jdisagg.engine.decode import DrawPrograms
from jdisagg.engine.draw_declarations import SamplingShapes, declared_draws, declared_first_draws
from jdisagg.engine.layer_group import LayerGroup, LayerGroupPrograms
from jdisagg.engine.multi_step import MultiStepPrograms, declared_multi_step
from jdisagg.engine.prefill import FirstDrawPrograms
from jdisagg.engine.ring import LoadedRing
from jdisagg.engine.spec.draft_declarations import declared_drafts, declared_reading
from jdisagg.engine.spec.draft_layers import DraftLayers
from jdisagg.engine.spec.drafting import DraftPrograms
from jdisagg.engine.spec.eagle import declared_heads, gathers_of, scored_bytes
from jdisagg.engine.spec.forced import ForcedPrograms, declared_forced
from jdisagg.kv.pools import PagePoolLayout, abstract_pools
from jdisagg.kv.shipping import SLICE_SPEC, HeadSlices, TransferPrograms, slice_shapes
from jdisagg.kv.tiers.records import RecordLayout, kept_slices
from jdisagg.model.looped_params import abstract_for_platform
from jdisagg.model.lora import AdapterCapacity, room_for
from jdisagg.model.params import StageSpec, abstract_stage_params
from jdisagg.parallel.submesh import Device, Program, StageMesh, placed

# Declared programs of KV transfers: between workers, and to and from records below HBM.


class PagedGroup(Protocol):
    """A layer group, or another owner of layers with KV pages."""

    @property
    def kv_layers(self) -> range: ...
    @property
    def submesh(self) -> StageMesh: ...
    @property
    def joined(self) -> bool: ...


@dataclass(frozen=True)
class TransferStage:
    """The KV pages of one stage, as transfers describe them."""

    group: PagedGroup
    layout: KVLayout
    draft: DraftPages | None = None  # set if the pages are a draft model's; None: the served model's

    @property
    def shape(self) -> StageShape:
        """Returns the description of this stage that the other end of a transfer needs."""
        tp = self.group.submesh.tp
        if self.draft is not None:
            return draft_shape(self.draft, tp)
        return StageShape(self.group.kv_layers, tp, self.layout.page_size, self.layout.dtype)

    def page_bytes(self, layers: int) -> int:
        """Returns the bytes that one page of `layers` layers has on one device."""
        return layers * self.layout.layer_page_bytes(self.group.submesh.tp)


@dataclass(frozen=True)
class TransferTable:
    """The declared programs of one worker's KV transfers."""

    config: WorkerConfig
    kept: Sequence[TransferStage]
    programs: Mapping[StageMesh, TransferPrograms]

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        return tuple(each.shape for each in self.kept)

    @property
    def num_kv_heads(self) -> int:
        return self.kept[0].layout.num_kv_heads

    def departures(self, shapes: Sequence[StageShape], wires: Sequence[str]) -> list[DeclaredProgram]:
        """Returns the pack programs for destination stages of these shapes, for all bucket sizes and codecs, with the
        arguments of `pack_pages`."""
        return [
            each
            for route in plan_routes(self.shapes, tuple(shapes), self.num_kv_heads)
            for wire in wires
            for groups in route.group.buckets()
            for each in self._packs(route, wire, groups)
        ]

    def arrivals(
        self, shapes: Sequence[StageShape], wires: Sequence[str], *, records: bool = False
    ) -> list[DeclaredProgram]:
        """Returns the check and insert programs for KV from stages of these shapes; records: for KV read from a lower
        tier."""
        return [
            each
            for route in plan_routes(tuple(shapes), self.shapes, self.num_kv_heads)
            for wire in wires
            for groups in route.group.buckets()
            for each in self._inserts(shapes[route.source_stage], route, wire, groups, records=records)
        ]

    def tier_moves(self) -> list[DeclaredProgram]:
        """Returns the programs that move pages to and from tiers below HBM; empty if the worker has none."""
        if not self.config.has_tiers:
            return []
        form = RecordLayout(self.kept[0].layout, draft=self.kept[-1].draft)
        records, wires = form.shapes, (self.config.tier_wire,)
        return [*self.departures(records, wires), *self.arrivals(records, wires, records=True)]

    def _packs(self, route: Route, wire: str, groups: int) -> Iterator[DeclaredProgram]:
        held, pages = self.kept[route.source_stage], groups * route.group.source
        submesh, heads, number = held.group.submesh, route.heads, len(route.layers)
        programs, moved = self.programs[submesh], pages * held.page_bytes(number)
        program = programs.pack_program(heads.slice_heads, wire, route.dtype)
        yield DeclaredProgram(
            "pack",
            route.source_stage,
            pages,
            program,
            (places_for(held.group, number, pages),),
            submesh,
            route.layers,
            pools=pools_for(held.group, held.layout, self.config.num_pages, number),
            traits=_traits(wire),
            batch_bytes=2 * moved,
        )
        if programs.folds_apart:
            cut = slice_shapes(held.layout, route.dtype, number, pages, heads, Digests.OFF, wire).numbers
            slices = landed(HeadSlices(*(kind[:1] * heads.slices_per_source for kind in cut)), submesh)
            place = route.source_stage, pages, programs.fold_program, (slices,), submesh, route.layers
            yield DeclaredProgram("digest", *place, traits=_traits(wire), batch_bytes=moved)

    def _inserts(
        self, source: StageShape, route: Route, wire: str, groups: int, *, records: bool
    ) -> Iterator[DeclaredProgram]:
        stage, pages = route.destination_stage, groups * route.group.source
        held, number = self.kept[stage], len(route.layers)
        submesh = held.group.submesh
        form = replace(held.layout, page_size=source.page_size, dtype=source.dtype)
        cut = slice_shapes(form, held.layout.dtype, number, pages, route.heads, self.config.digests, wire)
        if records:
            cut = kept_slices(cut, self.config.digests)
        programs, slices = self.programs[submesh], landed(cut, submesh)
        taken = groups * route.group.destination
        pools = pools_for(held.group, held.layout, self.config.num_pages, number)
        moved = taken * held.page_bytes(number)
        place, traits = (submesh, route.layers), _traits(wire)
        if slices.digests or slices.errors:
            program = programs.check_program
            yield DeclaredProgram("check", stage, pages, program, (slices,), *place, traits=traits, batch_bytes=moved)
        yield DeclaredProgram(
            "insert",
            stage,
            pages,
            programs.insert_program,
            (places_for(held.group, number, taken), slices.numbers),
            *place,
            pools=pools,
            traits=traits,
            batch_bytes=2 * moved,
            donated_bytes=sum(map(local_bytes, jax.tree.leaves(pools))),
        )


def pools_for(group: PagedGroup, layout: KVLayout, num_pages: int, layers: int) -> list[jax.ShapeDtypeStruct]:
    held = len(group.kv_layers) if group.joined else layers
    return abstract_pools(layout, held, num_pages, group.submesh, joined=group.joined)


def places_for(group: PagedGroup, layers: int, pages: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the page indices, as `pools.places_in` makes them."""
    return whole(group.submesh, (layers, pages) if group.joined else (pages,))


def transfer_programs_of(
    config: WorkerConfig, submeshes: Sequence[StageMesh], layout: KVLayout
) -> dict[StageMesh, TransferPrograms]:
    checked = config.digests, config.error_bound
    return {submesh: TransferPrograms(submesh, *checked, scaled=layout.scaled) for submesh in submeshes}


def landed(slices: HeadSlices, submesh: StageMesh) -> HeadSlices:
    """Returns the shapes of one shard's slices as the submesh holds them: split over heads, axis 2."""
    cut = submesh.sharding(SLICE_SPEC)

    def whole(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*each.shape[:2], each.shape[2] * submesh.tp, *each.shape[3:])
        return jax.ShapeDtypeStruct(shape, each.dtype, sharding=cut)

    return jax.tree.map(whole, slices)


def _traits(wire: str) -> tuple[str, ...]:
    return () if wire == RAW else (wire,)


@dataclass(frozen=True)
class ProgramTable:
    """The declared programs of one worker; `steps` are its own, `departures` and `arrivals` those of KV transfers."""

    config: WorkerConfig
    model: ModelConfig
    layout: KVLayout
    dtype: DTypeLike
    layer_groups: Sequence[LayerGroupPrograms]
    transfer_programs: Mapping[StageMesh, TransferPrograms]
    first_draws: FirstDrawPrograms | None  # None if the worker computes no prompts
    draws: DrawPrograms | None  # None if the worker does not decode
    draft: DraftLayers | None = field(default=None, kw_only=True)  # the draft model, if it is loaded
    drafts: DraftPrograms | None = field(default=None, kw_only=True)  # None if no row samples several tokens
    forced: ForcedPrograms | None = field(default=None, kw_only=True)  # None: one forced token per step
    turns: MultiStepPrograms | None = field(default=None, kw_only=True)  # None if a dispatch is a single decode step

    @property
    def owned(self) -> list[Program]:
        """Returns the jitted functions of all owners; each knows what it was compiled for."""
        draft = self.draft if self.drafts is None else None  # `self.drafts` includes the draft model's programs
        draws = self.first_draws, self.draws, self.drafts, self.forced, self.turns, draft
        owners = *self.layer_groups, *self.transfer_programs.values(), *draws
        return [program for owner in owners if owner is not None for program in owner.programs]

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        return self.transfers.shapes

    @property
    def transfers(self) -> TransferTable:
        kept = [TransferStage(group, self.layout) for group in self.layer_groups]
        if self.draft is not None and self.draft.kept:
            kept.append(TransferStage(self.draft, self.draft.pages.layout, self.draft.pages))
        return TransferTable(self.config, kept, self.transfer_programs)

    def steps(self) -> list[DeclaredProgram]:
        """Returns the programs of every step that the worker may run: per layer group, then those that sample."""
        found: list[DeclaredProgram] = []
        if self.first_draws is not None:
            found += [each for tokens in self.config.prefill_buckets for each in self._prefills(tokens)]
            found += declared_first_draws(self.first_draws, self._drawn(self.config.max_chunk_seqs))
            if self.draft is not None and self.draft.kept:
                found += declared_reading(self.draft, len(self.layer_groups), self.config.prefill_buckets)
        if self.draws is not None:
            slots = self.config.stage_slots
            steps = [each for width in self.config.table_buckets for each in self._decodes("decode", width, slots)]
            found += [*steps, *(each for step in steps if self.turns for each in declared_multi_step(self.turns, step))]
            found += declared_draws(self.draws, self._drawn(slots))
            if self.drafts is not None:
                found += self._verified(self.drafts)
            if self.forced is not None:
                found += self._forced(self.forced)
        if self.config.mixed_steps and self.first_draws is not None and self.draws is not None:
            slots, kinds = self.config.stage_slots, self._row_counts
            found += [each for rows in kinds for each in self._mixed("mixed", rows, slots, slots * rows)]
            if self.forced is not None:
                wide = slots + self.config.forced_tokens
                found += self._mixed("mixed forced", 1, wide, wide)
        return [*found, *declared_fills([group.adapters for group in self.layer_groups])]

    def departures(self, shapes: Sequence[StageShape], wires: Sequence[str] = ()) -> list[DeclaredProgram]:
        return self.transfers.departures(shapes, wires or self.config.wires)

    def arrivals(self, shapes: Sequence[StageShape], wires: Sequence[str] = ()) -> list[DeclaredProgram]:
        return self.transfers.arrivals(shapes, wires or self.config.wires)

    def weight_bytes(self, stage: int) -> int:
        """Returns the weight bytes on one device of the layer group."""
        return sum(local_bytes(leaf) for leaf in self.layer_groups[stage].params.leaves)

    def pool_bytes(self, stage: int, layers: int | None = None) -> int:
        """Returns the page bytes of `layers` layers (None: all) on one device of the layer group, without padding."""
        group = self.layer_groups[stage]
        pages = (self.config.num_pages + 1) * (len(group.kv_layers) if layers is None else layers)
        return pages * self.layout.layer_page_bytes(group.submesh.tp)

    def _layers(
        self, kind: str, stage: int, size: int, rows: int, program: Program, batch: tuple, scored: int = 0
    ) -> DeclaredProgram:
        """Declares one program of a layer group; scored: rows for which the last layer group computes logits."""
        group = self.layer_groups[stage]
        scored = scored if group.is_last else 0
        windows = tuple({self.model.window(layer) for layer in group.layers})
        sums = group.params.num_reductions * group.parts(rows) if group.submesh.tp > 1 else 0
        gathers = gathers_of(group) if scored else {}
        return DeclaredProgram(
            kind,
            stage,
            size,
            program,
            batch,
            group.submesh,
            group.kv_layers,
            abstract(group.params.leaves),
            pools_for(group, self.layout, self.config.num_pages, len(group.kv_layers)),
            (group.is_first, group.is_last, windows),
            activation_bytes(self.model, self.dtype, rows, group.submesh.tp)
            + (scored_bytes(group, scored) if scored else 0),
            self.pool_bytes(stage),
            {**({"all-reduce": sums} if sums else {}), **gathers},
            (group.turns,),
        )

    def _prefills(self, tokens: int) -> Iterator[DeclaredProgram]:
        shapes = chunk_shapes(self.config, tokens)
        for stage, group in enumerate(self.layer_groups):
            batch = (*(whole(group.submesh, shape) for shape in shapes), activations(group, tokens, self.dtype))
            yield self._layers("prefill", stage, tokens, tokens, group.prefill_program, batch)
        yield from declared_heads(self.config, self.layer_groups[-1], len(self.layer_groups) - 1, tokens, self.dtype)

    def _decodes(self, kind: str, width: int, rows: int, tables: int = 0) -> Iterator[DeclaredProgram]:
        """Declares the decode programs for `rows` rows: one per slot, or several if drafts are verified. tables: number
        of page tables; 0: one per slot."""
        slots = tables or self.config.stage_slots
        for stage, group in enumerate(self.layer_groups):
            submesh = group.submesh
            batch = (
                whole(submesh, (slots, width + self.config.adapter_columns)),
                whole(submesh, (4, rows)),
                *group.carried(slots),
                activations(group, rows, self.dtype),
            )
            yield self._layers(kind, stage, width, rows, group.decode_program, batch, rows)

    @property
    def _row_counts(self) -> list[int]:
        """Returns the numbers of rows that a step may have per slot."""
        return [1, *(1 + size for size in (self.config.draft_sizes if self.drafts is not None else ()))]

    def _verified(self, drafts: DraftPrograms) -> Iterator[DeclaredProgram]:
        slots, sizes = self.config.stage_slots, self._row_counts[1:]
        for rows in sizes:
            for width in self.config.table_buckets:
                yield from self._decodes(f"verify {rows}", width, slots * rows)
        rows = [self._drawn(slots * each) for each in sizes]
        yield from declared_drafts(drafts, self._drawn(slots), rows, self.config)

    def _forced(self, forced: ForcedPrograms) -> Iterator[DeclaredProgram]:
        slots = self.config.stage_slots
        rows = slots + self.config.forced_tokens
        yield from self._decodes("forced", self.config.table_buckets[-1], rows, rows)
        yield from declared_forced(forced, self._drawn(slots), self._drawn(rows))

    def _mixed(self, kind: str, each: int, tables: int, rows: int) -> Iterator[DeclaredProgram]:
        """Declares the mixed programs: `rows` decode rows, `each` rows per page table, and a packed chunk. The page
        tables are the widest. The same program computes the logits of the decode rows."""
        config, kind = self.config, kind if each == 1 else f"{kind} {each}"
        of_slots = (tables, config.table_buckets[-1] + config.adapter_columns), (4, rows)
        for tokens in config.prefill_buckets:
            of_chunks, number = chunk_shapes(config, tokens), rows + tokens
            for stage, group in enumerate(self.layer_groups):
                held, chunks = ([whole(group.submesh, shape) for shape in shapes] for shapes in (of_slots, of_chunks))
                batch = (*held, *group.carried(tables), *chunks, activations(group, number, self.dtype))
                scored = rows + config.max_chunk_seqs
                yield self._layers(kind, stage, tokens, number, group.mixed_program, batch, scored)

    def _drawn(self, rows: int) -> SamplingShapes:
        return SamplingShapes(self.model, len(self.layer_groups) - 1, self.layer_groups[-1].submesh.reader, rows)


def activations(group: LayerGroupPrograms, rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct | None:
    """Returns the shape of the activations from the layer group before; None for the first group."""
    return None if group.is_first else whole(group.submesh, (rows, group.config.hidden_size), dtype)


def abstract_table(
    config: WorkerConfig,
    model: ModelConfig,
    layout: KVLayout,
    layers: Sequence[range],
    devices: Sequence[Device],
    dtype: DTypeLike,
    weights: WeightFormat = AS_MADE,
) -> ProgramTable:
    """Returns the program table of a worker without weights or pages. Arguments are those of `MeshExecutor`; devices
    may come from a topology description."""
    submeshes, room = submeshes_of(config, len(layers), devices), room_of(config, dtype)
    outline = abstract_for_platform if room is None else abstract_stage_params  # layers with adapters cannot be looped
    groups = [
        LayerGroupPrograms(
            model,
            run,
            at,
            outline(StageSpec(model, run, at.mesh, dtype, weights)),
            room,
            form=PagePoolLayout.of(layout, len(run), config.num_pages, at),
        )
        for run, at in zip(layers, submeshes, strict=True)
    ]
    first_draws = FirstDrawPrograms() if config.computes_prompts else None
    draws = DrawPrograms() if config.role.decodes else None
    drafts = DraftPrograms() if config.role.decodes and config.draft_tokens else None
    transfers = transfer_programs_of(config, submeshes, layout)
    beside: Any = {
        "drafts": drafts,
        "forced": ForcedPrograms() if config.role.decodes and config.forced_tokens and not drafts else None,
        "turns": MultiStepPrograms(groups[0], config.decode.steps_per_dispatch) if config.is_multi_step else None,
    }
    return ProgramTable(config, model, layout, dtype, groups, transfers, first_draws, draws, **beside)


def chunk_shapes(config: WorkerConfig, tokens: int) -> list[tuple[int, ...]]:
    """Returns the shapes of a step's packed chunks, see `layer_group.Chunks`."""
    sequences = config.max_chunk_seqs
    return [(3 + config.adapter_columns, tokens), (2, sequences + 1), (sequences, config.table_buckets[-1])]


def room_of(config: WorkerConfig, dtype: DTypeLike) -> AdapterCapacity | None:
    """Returns the capacity for LoRA adapters; None if the worker has none."""
    return room_for(config.max_loras, config.max_lora_rank, jnp.dtype(dtype)) if config.max_loras else None


def submeshes_of(config: WorkerConfig, num_groups: int, devices: Sequence[Device]) -> list[StageMesh]:
    """Returns one submesh per layer group. Stages split the devices evenly. The groups of a prefill worker without
    stages share all devices."""
    if not config.role.decodes and config.prefill_stages == 1:
        return [StageMesh(devices)] * num_groups
    tp = len(devices) // num_groups
    assert tp * num_groups == len(devices), (num_groups, len(devices))
    return [StageMesh(devices[stage * tp : (stage + 1) * tp]) for stage in range(num_groups)]


def activation_bytes(model: ModelConfig, dtype: DTypeLike, rows: int, tp: int) -> int:
    """Returns a bound of the bytes of activations: four f32 copies of the residual stream and two of a layer's widest
    product."""
    return rows * (4 * 4 * model.hidden_size + 2 * model.widest_row(tp) * jnp.dtype(dtype).itemsize)


# Warm-up runs each declared program once on null pages and zeros.
#
# The first call of a program that was only compiled ahead of time would compile it again, so each is called. Idle slots
# and null chunks write only to the null page.

Progress = Callable[[str, int, int], None]


def null_batch(declared: DeclaredProgram) -> tuple[Any, ...]:
    """Returns zeros for the arguments that the layer group does not hold, placed on the devices."""
    return jax.tree.map(_zeros, declared.batch)


def run_null(group: LayerGroup | LoadedRing, declared: DeclaredProgram, batch: tuple[Any, ...]) -> Any:
    """Calls a program with the weights and pools of its layer group; the results become ready when it ends. The batch
    may be donated, so each call needs its own."""
    first = declared.layers.start - group.kv_layers.start
    held = slice(0, 1) if group.joined else slice(first, first + len(declared.layers))
    weights = [] if declared.weights is None else [group.params.leaves]
    pools = [] if declared.pools is None else [group.kv.pools[held]]
    results = declared.program(*weights, *pools, *batch)
    if declared.writes_pools:
        group.kv.pools[held] = results[0]
    return results


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    assert shape.sharding is not None, shape
    return placed(np.zeros(shape.shape, shape.dtype), shape.sharding)
