"""Computes how many KV pages a worker's devices hold beside its weights; sets up the garbage collector."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

from jdisagg.core.errors import ConfigError, MeshError
from jdisagg.core.hardware import GIB
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import own_layers, ring_cut
from jdisagg.core.mesh_spec import MeshSpec, Schedule, WorkerMesh
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.settings import Settings
from jdisagg.model.draft_head import HeadConfig, head_bytes
from jdisagg.model.weight_bytes import adapter_bytes, ring_shard_bytes, shard_bytes

CPU_KV_BYTES = 1 << 30  # per worker on CPUs, unless --kv_tokens is given


class NoRoom(MeshError):
    """The devices' memory does not hold the weights and the KV of one sequence."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The contents of a worker's devices, and one device's memory in bytes (None on the CPU: host memory is shared).

    Matrices that loading keeps in full precision use memory that --hbm_fraction leaves free.
    """

    model: ModelConfig
    layers: tuple[range, ...]  # layers of each decode stage
    dtype: str  # of activations
    weights: WeightFormat
    device_bytes: int | None
    draft: ModelConfig | HeadConfig | None = None  # the draft model or head, on the devices of the last stage
    is_draft_kept: bool = False  # True if prefill workers run the draft model too, and keep its KV

    def of(self, mesh_row: WorkerMesh, mesh: MeshSpec) -> Budget:
        """Returns the budget of one worker, which is less if workers share a device."""
        if self.device_bytes is None or mesh_row.platform == "cpu":
            return replace(self, device_bytes=None)
        workers_on = mesh.on_device()
        shares = max(len(workers_on[device]) for device in mesh_row.device_ids)
        return replace(self, device_bytes=self.device_bytes // shares)

    def stages(self, mesh_row: WorkerMesh) -> list[tuple[range, int]]:
        """Returns each stage's layers and bytes of weights per device.

        Devices of a prefill worker without stages hold all layers, in as many layer groups as there are decode stages,
        and tied embeddings twice, for the first and the last group.
        """
        if mesh_row.schedule is Schedule.RING:
            cut = ring_cut(self.model, mesh_row.pp)
            held = ring_shard_bytes(self.model, cut, mesh_row.tp, self.dtype, self.weights)
            return [(range(len(cut.numbers)), held)]
        layers = own_layers(self.model, self.layers, mesh_row)
        groups = [(run, shard_bytes(self.model, run, mesh_row.tp, self.dtype, self.weights)) for run in layers]
        if mesh_row.pp > 1:
            return groups
        return [(range(self.model.num_layers), sum(held for _, held in groups))]


def num_pages(settings: Settings, slots: int, mesh_row: WorkerMesh, kv: KVLayout, longest: int, budget: Budget) -> int:
    """Returns pages of one worker's pool: --kv_tokens, else the longest sequence for every slot, as memory allows."""
    wanted = slots * kv.pages_for(longest)
    if settings.kv_tokens:
        pages = kv.pages_for(settings.kv_tokens)
    elif budget.device_bytes is None:
        pages = min(wanted, CPU_KV_BYTES // kv.held_page_bytes(mesh_row.tp))
    else:
        return _pages_of_memory(settings, mesh_row, kv, longest, budget)
    if pages < kv.pages_for(longest):
        raise ConfigError(
            f"{mesh_row.worker}: room for {max(pages, 0) * kv.page_size} KV tokens, but one sequence may have"
            f" {longest}; lower --max_model_len, or raise --kv_tokens or the mesh"
        )
    return pages


def _pages_of_memory(settings: Settings, mesh_row: WorkerMesh, kv: KVLayout, longest: int, budget: Budget) -> int:
    """Returns the pages that the fullest of the worker's devices holds beside its weights. Raises NoRoom."""
    assert budget.device_bytes is not None
    allowed, found = int(budget.device_bytes * settings.hbm_fraction), []
    stages = budget.stages(mesh_row)
    for number, (layers, held_bytes) in enumerate(stages, 1):
        held_bytes += adapter_bytes(settings, budget.model, layers, mesh_row.tp, budget.dtype)  # noqa: PLW2901
        page_bytes = len(layers) * kv.layer_page_bytes(mesh_row.tp)
        draft_bytes = 0
        if isinstance(budget.draft, HeadConfig) and number == len(stages):
            draft_bytes = head_bytes(budget.draft, mesh_row.tp, budget.dtype)
            page_bytes += kv.layer_page_bytes(mesh_row.tp)
        elif _has_draft(budget, mesh_row) and isinstance(budget.draft, ModelConfig) and number == len(stages):
            draft_bytes = shard_bytes(budget.draft, range(budget.draft.num_layers), mesh_row.tp, budget.dtype, AS_MADE)
            dtype = budget.dtype if kv.scaled else kv.dtype
            small = KVLayout.of(budget.draft, kv.page_size, dtype, kv.tiled)
            page_bytes += small.held_page_bytes(mesh_row.tp) // mesh_row.tp
        found.append(((allowed - held_bytes - draft_bytes) // page_bytes, held_bytes + draft_bytes))
    pages, held_bytes = min(found)
    if pages < kv.pages_for(longest):
        raise NoRoom(
            f"{mesh_row.worker} does not fit: {held_bytes / GIB:.2f} GiB of weights on a device with"
            f" {budget.device_bytes / GIB:.2f} GiB (--hbm_fraction={settings.hbm_fraction:g} of it is"
            f" {allowed / GIB:.2f}) leave room for {max(pages, 0) * kv.page_size} KV tokens, and one sequence may have"
            f" {longest}; use more devices, or lower --max_model_len"
        )
    return pages


def _has_draft(budget: Budget, mesh_row: WorkerMesh) -> bool:
    return mesh_row.role.decodes or budget.is_draft_kept


# Python's garbage collector in a process that serves.

# New containers that start a collection of the youngest generation, and younger collections per older one. A step of
# hundreds of rows allocates and frees more than Python's default of 700 containers, so the defaults collected very
# often. Every few hundred dispatches a full collection blocked the allocating thread for 20 ms or more.
THRESHOLDS = 10_000, 10, 20


def freeze_gc() -> None:
    """Freezes the current objects: a full collection of JAX's million objects blocks streams for most of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
