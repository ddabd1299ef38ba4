"""What a worker compiles for shipments to and from other processes, before it joins: after that nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jdisagg.core.kv_layout import NULL_PAGE, KVLayout
from jdisagg.core.reshard import StageShape, group_pages, plan_heads
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.warmup import Job, ship_jobs
from jdisagg.kv.shipping import (
    LandedKV,
    check_landed,
    devices_of,
    insert_landed,
    joined,
    null_lists,
    pack_pages,
    slice_shapes,
)


def departure_jobs(machine: MeshExecutor, stages: Sequence[StageShape]) -> list[Job]:
    """Packs null pages for such stages, every declared page count and wire once."""
    group = group_pages(machine.config.page_size, stages[0].page_size)

    def pack(wire: str, groups: int) -> Any:
        programs, nulls = machine.transfer_programs, null_lists(group, groups)
        return [each.slices for each in pack_pages(machine.pages, programs, stages, *nulls, wire=wire)]

    return [
        job
        for wire in machine.config.wires
        for job in ship_jobs(partial(pack, wire), f"tp{stages[0].tp} elsewhere, {wire}", group.buckets())
    ]


def arrival_jobs(machine: MeshExecutor, layout: KVLayout, source_tp: int) -> list[Job]:
    """Inserts null pages as they would come from a mesh of `source_tp` shards with such pages and our layer groups."""
    sizes = group_pages(layout.page_size, machine.config.page_size).buckets()
    return [
        job
        for wire in machine.config.wires
        for job in ship_jobs(
            partial(_insert_nulls, machine, layout, source_tp, wire), f"tp{source_tp} from elsewhere, {wire}", sizes
        )
    ]


def _insert_nulls(machine: MeshExecutor, layout: KVLayout, source_tp: int, wire: str, groups: int) -> Any:
    landed, programs = [], machine.transfer_programs
    group = group_pages(layout.page_size, machine.config.page_size)
    for index, stage in enumerate(machine.pages):
        heads = plan_heads(layout.num_kv_heads, source_tp, stage.submesh.tp)
        size = len(stage.layers), groups * group.source
        shapes = slice_shapes(layout, stage.layout.dtype, *size, heads, machine.config.digests, wire)
        zeros = [np.zeros(each.shape, each.dtype) for each in jax.tree.leaves(shapes)]
        arrays = jax.device_put(zeros * stage.submesh.tp, devices_of(stage.submesh, len(zeros)))
        null_pages = np.full(groups * group.destination, NULL_PAGE, np.int32)
        landed.append(LandedKV(index, stage.layers, joined(arrays, stage.submesh, shapes.kinds), null_pages))
    jax.block_until_ready(check_landed(machine.pages, programs, landed))
    insert_landed(machine.pages, programs, landed)
    return [stage.pools for stage in machine.pages]
