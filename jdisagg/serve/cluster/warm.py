"""What a worker compiles for shipments to and from other processes, before it joins: after that nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.core.kv_layout import NULL_PAGE
from jdisagg.engine.mesh_machine import MeshMachine
from jdisagg.engine.warmup import Job, ship_jobs
from jdisagg.kv.shipping import (
    Move,
    StageShape,
    check_moves,
    devices_of,
    insert_moves,
    joined,
    pack_pages,
    piece_shapes,
)
from jdisagg.policy.reshard import TRANSFER_BUCKETS, plan_heads


def departure_jobs(machine: MeshMachine, stages: Sequence[StageShape]) -> list[Job]:
    """Packs null pages for such stages, every declared page count once."""

    def pack(pages: int) -> Any:
        nulls = (NULL_PAGE,) * pages
        departures = pack_pages(machine.pages, machine.docks, stages, nulls, nulls)
        return [departure.packed for departure in departures]

    return ship_jobs(pack, f"tp{stages[0].tp} elsewhere", TRANSFER_BUCKETS)


def arrival_jobs(machine: MeshMachine, source_tp: int) -> list[Job]:
    """Inserts null pages as they would come from a mesh of `source_tp` shards with the same layer groups."""
    return ship_jobs(partial(_insert_nulls, machine, source_tp), f"tp{source_tp} from elsewhere", TRANSFER_BUCKETS)


def _insert_nulls(machine: MeshMachine, source_tp: int, pages: int) -> Any:
    moves = []
    for index, stage in enumerate(machine.pages):
        heads = plan_heads(stage.layout.num_kv_heads, source_tp, stage.place.tp)
        shapes = piece_shapes(stage.layout, len(stage.layers), pages, heads, machine.config.digests)
        zeros = [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
        landed = jax.device_put(zeros * stage.place.tp, devices_of(stage.place, len(zeros)))
        null_pages = np.full(pages, NULL_PAGE, np.int32)
        moves.append(Move(index, stage.layers, joined(landed, stage.place), null_pages))
    jax.block_until_ready(check_moves(machine.pages, machine.docks, moves))
    insert_moves(machine.pages, machine.docks, moves)
    return [stage.pools for stage in machine.pages]
