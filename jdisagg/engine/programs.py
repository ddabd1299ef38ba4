"""Every device program of a worker, declared once: what warm-up runs, `jdisagg aot` compiles for chips that are not
here, the profiler times, and the count of recompiles is held to.

A `ProgramTable` is made of a worker's sizes and the owners of its jitted functions, which may hold weights and pages
(`MeshExecutor`) or shapes alone (`abstract_table`). Who adds a program to a step adds it to `steps`: a test serves a
mixed load by machines that were never warmed and holds what they compile to this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.reshard import StageShape
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import declared_fills
from jdisagg.engine.declaration import DeclaredProgram, abstract, local_bytes, whole
from jdisagg.engine.decode import DrawPrograms
from jdisagg.engine.draft_declarations import declared_drafts, declared_reading
from jdisagg.engine.draft_layers import DraftLayers
from jdisagg.engine.drafting import DraftPrograms
from jdisagg.engine.draw_declarations import Drawn, declared_draws, declared_first_draws
from jdisagg.engine.forced import ForcedPrograms, declared_forced
from jdisagg.engine.head_declarations import declared_heads, gathers_of, scored_bytes
from jdisagg.engine.layer_group import LayerGroupPrograms
from jdisagg.engine.multi_step import MultiStepPrograms
from jdisagg.engine.multi_step_declarations import declared_multi_step
from jdisagg.engine.prefill import FirstDrawPrograms
from jdisagg.engine.transfer_declarations import Kept, TransferTable, pools_for, transfer_programs_of
from jdisagg.kv.pools import PoolForm
from jdisagg.kv.shipping import TransferPrograms
from jdisagg.model.looped_params import abstract_for_platform
from jdisagg.model.lora import AdapterCapacity, room_for
from jdisagg.model.params import StageSpec, abstract_stage_params
from jdisagg.parallel.submesh import Device, Program, Submesh


@dataclass(frozen=True)
class ProgramTable:
    """One worker's programs; `steps` are its own, `departures` and `arrivals` those of shipments."""

    config: WorkerConfig
    model: ModelConfig
    layout: KVLayout
    dtype: DTypeLike
    layer_groups: Sequence[LayerGroupPrograms]
    transfer_programs: Mapping[Submesh, TransferPrograms]
    first_draws: FirstDrawPrograms | None  # None where it computes no prompts
    draws: DrawPrograms | None  # None where it does not decode
    draft: DraftLayers | None = field(default=None, kw_only=True)  # the model that guesses, where it is loaded
    drafts: DraftPrograms | None = field(default=None, kw_only=True)  # None where no row draws more than one token
    forced: ForcedPrograms | None = field(default=None, kw_only=True)  # None where grammars force one token a step
    turns: MultiStepPrograms | None = field(default=None, kw_only=True)  # None where a step is one turn

    @property
    def owned(self) -> list[Program]:
        """The jitted functions, each with all that it was compiled for."""
        draft = self.draft if self.drafts is None else None  # else among those
        draws = self.first_draws, self.draws, self.drafts, self.forced, self.turns, draft
        owners = *self.layer_groups, *self.transfer_programs.values(), *draws
        return [program for owner in owners if owner is not None for program in owner.programs]

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """What the other end of a shipment must know."""
        return self.transfers.shapes

    @property
    def transfers(self) -> TransferTable:
        kept = [Kept(group, self.layout) for group in self.layer_groups]
        if self.draft is not None and self.draft.kept:
            kept.append(Kept(self.draft, self.draft.pages.layout, self.draft.pages))
        return TransferTable(self.config, kept, self.transfer_programs)

    def steps(self) -> list[DeclaredProgram]:
        """Every step that the worker may take, layer group by layer group, and what is drawn after it."""
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
        """See `TransferTable`; wires: those of the config, unless said."""
        return self.transfers.departures(shapes, wires or self.config.wires)

    def arrivals(self, shapes: Sequence[StageShape], wires: Sequence[str] = ()) -> list[DeclaredProgram]:
        """See `TransferTable`."""
        return self.transfers.arrivals(shapes, wires or self.config.wires)

    def weight_bytes(self, stage: int) -> int:
        """Of one device of the group."""
        return sum(local_bytes(leaf) for leaf in self.layer_groups[stage].params.leaves)

    def pool_bytes(self, stage: int, layers: int | None = None) -> int:
        """Of one device: the pages of `layers` layers of the layer group (None: all), as the device holds them."""
        group = self.layer_groups[stage]
        pages = (self.config.num_pages + 1) * (len(group.kv_layers) if layers is None else layers)
        return pages * self.layout.layer_page_bytes(group.submesh.tp)

    def _layers(
        self, kind: str, stage: int, size: int, rows: int, program: Program, batch: tuple, scored: int = 0
    ) -> DeclaredProgram:
        """scored: how many rows the last layer group makes logits of."""
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
        """Of so many rows: one a slot, or more where drafts are verified; and page tables, of slots where not said."""
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
        """Rows that a step may have of each slot."""
        return [1, *(1 + size for size in (self.config.draft_sizes if self.drafts is not None else ()))]

    def _verified(self, drafts: DraftPrograms) -> Iterator[DeclaredProgram]:
        slots, sizes = self.config.stage_slots, self._row_counts[1:]
        for rows in sizes:
            for width in self.config.table_buckets:
                yield from self._decodes(f"verify {rows}", width, slots * rows)
        rows = [self._drawn(slots * each) for each in sizes]
        yield from declared_drafts(drafts, self._drawn(slots), rows, self.config)

    def _forced(self, forced: ForcedPrograms) -> Iterator[DeclaredProgram]:
        """With the widest table."""
        slots = self.config.stage_slots
        rows = slots + self.config.forced_tokens
        yield from self._decodes("forced", self.config.table_buckets[-1], rows, rows)
        yield from declared_forced(forced, self._drawn(slots), self._drawn(rows))

    def _mixed(self, kind: str, each: int, tables: int, rows: int) -> Iterator[DeclaredProgram]:
        """So many rows, `each` of one page table, which are the widest, and chunks; their logits are made with the
        layers."""
        config, kind = self.config, kind if each == 1 else f"{kind} {each}"
        of_slots = (tables, config.table_buckets[-1] + config.adapter_columns), (4, rows)
        for tokens in config.prefill_buckets:
            of_chunks, number = chunk_shapes(config, tokens), rows + tokens
            for stage, group in enumerate(self.layer_groups):
                held, chunks = ([whole(group.submesh, shape) for shape in shapes] for shapes in (of_slots, of_chunks))
                batch = (*held, *group.carried(tables), *chunks, activations(group, number, self.dtype))
                scored = rows + config.max_chunk_seqs
                yield self._layers(kind, stage, tokens, number, group.mixed_program, batch, scored)

    def _drawn(self, rows: int) -> Drawn:
        return Drawn(self.model, len(self.layer_groups) - 1, self.layer_groups[-1].submesh.reader, rows)


def activations(group: LayerGroupPrograms, rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct | None:
    """That the group before hands on."""
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
    """Of a worker that need not exist; arguments as those of `MeshExecutor`, devices perhaps of a topology."""
    submeshes, room = submeshes_of(config, len(layers), devices), room_of(config, dtype)
    outline = abstract_for_platform if room is None else abstract_stage_params  # rows' adapters go layer by layer
    groups = [
        LayerGroupPrograms(
            model,
            run,
            at,
            outline(StageSpec(model, run, at.mesh, dtype, weights)),
            room,
            form=PoolForm.of(layout, len(run), config.num_pages, at),
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
    """Of the numbers of a step's packed chunks, see `layer_group.Chunks`."""
    sequences = config.max_chunk_seqs
    return [(3 + config.adapter_columns, tokens), (2, sequences + 1), (sequences, config.table_buckets[-1])]


def room_of(config: WorkerConfig, dtype: DTypeLike) -> AdapterCapacity | None:
    """For adapters; None where there are none."""
    return room_for(config.max_loras, config.max_lora_rank, jnp.dtype(dtype)) if config.max_loras else None


def submeshes_of(config: WorkerConfig, num_groups: int, devices: Sequence[Device]) -> list[Submesh]:
    """One submesh a group: stages split the devices evenly, the groups of a prefill worker without stages share them
    all."""
    if not config.role.decodes and config.prefill_stages == 1:
        return [Submesh(devices)] * num_groups
    tp = len(devices) // num_groups
    assert tp * num_groups == len(devices), (num_groups, len(devices))
    return [Submesh(devices[stage * tp : (stage + 1) * tp]) for stage in range(num_groups)]


def activation_bytes(model: ModelConfig, dtype: DTypeLike, rows: int, tp: int) -> int:
    """Four copies of the residual stream in f32, and two of the widest product of a layer."""
    return rows * (4 * 4 * model.hidden_size + 2 * model.widest_row(tp) * jnp.dtype(dtype).itemsize)
