"""`MeshExecutor`: one worker's devices, for every role. It owns weights and pages, runs plans, and decides nothing.

A decode or colocated worker has one submesh a stage, a prefill worker one submesh for all its layer groups; everything
else is the same code (`layer_group.py`, `prefill.py`, `decode.py`, and `jdisagg/kv` for shipments).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import jax
import numpy as np
from jax.typing import DTypeLike

from jdisagg.core.events import WireCost
from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Attempt
from jdisagg.core.reshard import PageGroup, StageShape, group_pages
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.runner import Runner
from jdisagg.engine.warmup import Job, Progress, ship_jobs, step_jobs
from jdisagg.kv.error_monitor import ErrorMonitor
from jdisagg.kv.pools import StagePages
from jdisagg.kv.shipping import (
    LandedKV,
    PackedKV,
    TransferPrograms,
    check_landed,
    insert_landed,
    null_lists,
    pack_pages,
    send,
    shapes_of,
    ship_pages,
)
from jdisagg.model.sources import Source
from jdisagg.parallel.submesh import Device, Program, Submesh

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


@dataclass(frozen=True, slots=True)
class Figures:
    """What an executor holds, for people."""

    weights_bytes: int
    pool_bytes: int
    num_programs: int  # compiled so far


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
    ) -> None:
        """Reads the weights and allocates the pages; `warm` must follow before the first plan.

        `layers` are the runs of layers of the decode stages, whatever this worker's role; `devices` are this worker's,
        stage-major. KV pages have the layout's dtype.
        """
        self.config, self.model = config, model
        submeshes = submeshes_of(config.role, len(layers), devices)
        self.layer_groups = [
            LayerGroup(source, model, run, submesh, layout, config.num_pages, dtype)
            for run, submesh in zip(layers, submeshes, strict=True)
        ]
        self.transfer_programs = {
            submesh: TransferPrograms(submesh, config.digests, config.error_bound) for submesh in submeshes
        }
        self.error_monitor = ErrorMonitor(config.error_bound)
        self.runner = Runner(self.layer_groups, config, model.vocab_size)
        self._compiled_when_warm: int | None = None

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        return self.runner.run(plan, group_done)

    def open_gates(self, attempt: Attempt) -> None:
        self.runner.gates.open(attempt)

    def ship(self, transfer: KVTransfer, destination: MeshExecutor) -> MeshShipment:
        packed = self.pack(transfer, shapes_of(destination.pages))
        landed = [send(each, destination.pages[each.stage].submesh) for each in packed]
        return MeshShipment(transfer, landed, packed)

    def pack(self, transfer: KVTransfer, shapes: Sequence[StageShape]) -> list[PackedKV]:
        """Packs what is to leave for stages of these shapes, now in program order."""
        pages = transfer.source_pages, transfer.destination_pages
        how = transfer.layers, transfer.wire, self.error_monitor
        return pack_pages(self.pages, self.transfer_programs, shapes, *pages, *how)

    def check(self, shipment: MeshShipment) -> Callable[[], bool] | None:
        verdicts = check_landed(self.pages, self.transfer_programs, shipment.landed)
        return (lambda: all(np.asarray(each).all() for each in verdicts)) if verdicts else None

    def insert(self, shipment: MeshShipment) -> None:
        insert_landed(self.pages, self.transfer_programs, shipment.landed)
        self.runner.gates.inserted(shipment.transfer)

    @property
    def pages(self) -> list[StagePages]:
        """The KV pages of each layer group, in layer order."""
        return [group.kv for group in self.layer_groups]

    # ------------------------------------------------------------ warm-up

    def warm(
        self,
        progress: Progress = lambda label, done, total: None,
        peers: Sequence[MeshExecutor] = (),
        more: Sequence[Job] = (),
    ) -> None:
        """Compiles every declared program by running it on null pages and idle slots, and `more` jobs like these.

        `peers` are the executors this one ships to (their inserts are compiled too). `progress(label, done, total)` is
        called before each program and once after the last, with done == total.
        """
        jobs = [*self._warm_jobs(peers), *more]
        for done, (label, job) in enumerate(jobs):
            progress(label, done, len(jobs))
            jax.block_until_ready(job())
        progress("ready", len(jobs), len(jobs))
        for executor in (self, *peers):
            executor._compiled_when_warm = executor.num_compiled

    def _warm_jobs(self, peers: Sequence[MeshExecutor]) -> list[Job]:
        jobs = step_jobs(self.runner)
        for peer, wire in product(peers, self.config.wires):
            sizes = self.group_to(peer.config).buckets()
            jobs += ship_jobs(partial(self._ship_null, peer, wire), f"{peer.config.worker} {wire}", sizes)
        return jobs

    def _ship_null(self, peer: MeshExecutor, wire: str, groups: int) -> list:
        nulls = null_lists(self.group_to(peer.config), groups)
        landed, _ = ship_pages(self.pages, self.transfer_programs, peer.pages, *nulls, wire=wire)
        jax.block_until_ready(check_landed(peer.pages, peer.transfer_programs, landed))
        insert_landed(peer.pages, peer.transfer_programs, landed)
        return [stage.pools for stage in peer.pages]

    def group_to(self, peer: WorkerConfig) -> PageGroup:
        return group_pages(self.config.page_size, peer.page_size)

    def time_packs(self, shapes: Sequence[StageShape]) -> tuple[WireCost, ...]:
        """What a page costs as each wire, on warm programs with nothing else under way; shapes: of a peer's stages."""
        group = group_pages(self.config.page_size, shapes[0].page_size)
        nulls = null_lists(group, group.buckets()[-1])
        costs = []
        for wire in self.config.wires:
            seconds, size = [], 0
            for _ in range(TIMINGS):
                began_s = time.perf_counter()
                found = pack_pages(self.pages, self.transfer_programs, shapes, *nulls, wire=wire)
                packed = jax.block_until_ready([array for each in found for array in each.device_arrays])
                seconds.append(time.perf_counter() - began_s)
                size = sum(array.nbytes for array in packed)
            costs.append(WireCost(wire, min(seconds) / len(nulls[0]), size // len(nulls[0])))
        return tuple(costs)

    def recompiles(self) -> int:
        """Programs compiled since `warm`; stays 0 unless a shape was left undeclared."""
        return self.num_compiled - (self._compiled_when_warm or 0)

    @property
    def programs(self) -> list[Program]:
        owners = [*self.layer_groups, *self.transfer_programs.values(), self.runner.prefiller, self.runner.decoder]
        return [program for owner in owners if owner is not None for program in owner.programs]

    @property
    def num_compiled(self) -> int:
        return sum(program.num_compiled for program in self.programs)

    def figures(self) -> Figures:
        return Figures(
            sum(group.params.num_bytes for group in self.layer_groups),
            sum(group.kv.num_bytes for group in self.layer_groups),
            self.num_compiled,
        )


def submeshes_of(role: Role, num_groups: int, devices: Sequence[Device]) -> list[Submesh]:
    """One submesh a group: a prefill worker's groups share all its devices, stages split them evenly."""
    if not role.decodes:
        return [Submesh(devices)] * num_groups
    tp = len(devices) // num_groups
    assert tp * num_groups == len(devices), (num_groups, len(devices))
    return [Submesh(devices[stage * tp : (stage + 1) * tp]) for stage in range(num_groups)]
