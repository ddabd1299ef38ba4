"""The programs that pages leave and arrive by, declared: between workers, and to and from records below HBM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from jdisagg.core.layout.kv_layout import DraftPages, KVLayout
from jdisagg.core.layout.reshard import Route, StageShape, draft_shape, plan_routes
from jdisagg.core.worker_config import RAW, Digests, WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, local_bytes, whole
from jdisagg.kv.pools import abstract_pools
from jdisagg.kv.shipping import SLICE_SPEC, HeadSlices, TransferPrograms, slice_shapes
from jdisagg.kv.tiers.records import RecordLayout, kept_slices
from jdisagg.parallel.submesh import Submesh


class Keeper(Protocol):
    """A layer group, or what else has layers with pages."""

    @property
    def kv_layers(self) -> range: ...
    @property
    def submesh(self) -> Submesh: ...
    @property
    def joined(self) -> bool: ...


@dataclass(frozen=True)
class Kept:
    """The pages of one stage, as shipments know it."""

    group: Keeper
    layout: KVLayout
    draft: DraftPages | None = None  # whose pages these are; None: the model's

    @property
    def shape(self) -> StageShape:
        """What the other end of a shipment must know."""
        tp = self.group.submesh.tp
        if self.draft is not None:
            return draft_shape(self.draft, tp)
        return StageShape(self.group.kv_layers, tp, self.layout.page_size, self.layout.dtype)

    def page_bytes(self, layers: int) -> int:
        """One page of `layers` layers on one device."""
        return layers * self.layout.layer_page_bytes(self.group.submesh.tp)


@dataclass(frozen=True)
class TransferTable:
    """Of one worker."""

    config: WorkerConfig
    kept: Sequence[Kept]
    programs: Mapping[Submesh, TransferPrograms]

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        return tuple(each.shape for each in self.kept)

    @property
    def num_kv_heads(self) -> int:
        return self.kept[0].layout.num_kv_heads

    def departures(self, shapes: Sequence[StageShape], wires: Sequence[str]) -> list[DeclaredProgram]:
        """Packs for stages of these shapes, for all sizes and wires declared, as `pack_pages` calls them."""
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
        """Checks and inserts of what leaves stages of these shapes, or of what records of them keep."""
        return [
            each
            for route in plan_routes(tuple(shapes), self.shapes, self.num_kv_heads)
            for wire in wires
            for groups in route.group.buckets()
            for each in self._inserts(shapes[route.source_stage], route, wire, groups, records=records)
        ]

    def tier_moves(self) -> list[DeclaredProgram]:
        """What brings pages below HBM and back, where the worker has tiers."""
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


def pools_for(group: Keeper, layout: KVLayout, num_pages: int, layers: int) -> list[jax.ShapeDtypeStruct]:
    """Those that `layers` of the group's layers lie in."""
    held = len(group.kv_layers) if group.joined else layers
    return abstract_pools(layout, held, num_pages, group.submesh, joined=group.joined)


def places_for(group: Keeper, layers: int, pages: int) -> jax.ShapeDtypeStruct:
    """As `pools.places_in`."""
    return whole(group.submesh, (layers, pages) if group.joined else (pages,))


def transfer_programs_of(
    config: WorkerConfig, submeshes: Sequence[Submesh], layout: KVLayout
) -> dict[Submesh, TransferPrograms]:
    checked = config.digests, config.error_bound
    return {submesh: TransferPrograms(submesh, *checked, scaled=layout.scaled) for submesh in submeshes}


def landed(slices: HeadSlices, submesh: Submesh) -> HeadSlices:
    """Shapes for one shard as the submesh holds them: cut on heads, axis 2."""
    cut = submesh.sharding(SLICE_SPEC)

    def whole(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*each.shape[:2], each.shape[2] * submesh.tp, *each.shape[3:])
        return jax.ShapeDtypeStruct(shape, each.dtype, sharding=cut)

    return jax.tree.map(whole, slices)


def _traits(wire: str) -> tuple[str, ...]:
    return () if wire == RAW else (wire,)
