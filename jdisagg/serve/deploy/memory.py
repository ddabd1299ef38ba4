"""How much KV a worker's devices hold beside its weights."""

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

CPU_KV_BYTES = 1 << 30  # of each worker, where --kv_tokens does not say


class NoRoom(MeshError):
    """The devices' memory does not hold the weights and the KV of one sequence."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What is to be held, and one device's memory in bytes (None on the CPU: the host's is shared).

    Matrices that only loading finds to be better left full take of what --hbm_fraction leaves over.
    """

    model: ModelConfig
    layers: tuple[range, ...]  # of the decode stages
    dtype: str  # of activations
    weights: WeightFormat
    device_bytes: int | None
    draft: ModelConfig | HeadConfig | None = None  # that guesses, beside the last stage
    draft_kept: bool = False  # whether it stands beside prefill workers too

    def of(self, place: WorkerMesh, mesh: MeshSpec) -> Budget:
        """The worker's part, where it shares a device with others."""
        if self.device_bytes is None or place.platform == "cpu":
            return replace(self, device_bytes=None)
        on = mesh.on_device()
        shares = max(len(on[device]) for device in place.device_ids)
        return replace(self, device_bytes=self.device_bytes // shares)

    def stages(self, place: WorkerMesh) -> list[tuple[range, int]]:
        """Layers and bytes of weights of one device of each stage; without stages a prefill worker's devices hold all
        layers, in as many groups as there are decode stages, and of tied tables one for each end.
        """
        if place.schedule is Schedule.RING:
            cut = ring_cut(self.model, place.pp)
            held = ring_shard_bytes(self.model, cut, place.tp, self.dtype, self.weights)
            return [(range(len(cut.numbers)), held)]
        layers = own_layers(self.model, self.layers, place)
        groups = [(run, shard_bytes(self.model, run, place.tp, self.dtype, self.weights)) for run in layers]
        if place.pp > 1:
            return groups
        return [(range(self.model.num_layers), sum(held for _, held in groups))]


def num_pages(settings: Settings, slots: int, place: WorkerMesh, kv: KVLayout, longest: int, budget: Budget) -> int:
    """Pages of one worker's pool: what --kv_tokens says, else every slot's longest sequence as far as memory goes."""
    wanted = slots * kv.pages_for(longest)
    if settings.kv_tokens:
        pages = kv.pages_for(settings.kv_tokens)
    elif budget.device_bytes is None:
        pages = min(wanted, CPU_KV_BYTES // kv.held_page_bytes(place.tp))
    else:
        return _pages_of_memory(settings, place, kv, longest, budget)
    if pages < kv.pages_for(longest):
        raise ConfigError(
            f"{place.worker}: room for {max(pages, 0) * kv.page_size} KV tokens, but one sequence may have {longest};"
            " lower --max_model_len, or raise --kv_tokens or the mesh"
        )
    return pages


def _pages_of_memory(settings: Settings, place: WorkerMesh, kv: KVLayout, longest: int, budget: Budget) -> int:
    """Pages that the fullest of the worker's devices holds beside its weights."""
    assert budget.device_bytes is not None
    allowed, found = int(budget.device_bytes * settings.hbm_fraction), []
    stages = budget.stages(place)
    for number, (layers, held_bytes) in enumerate(stages, 1):
        held_bytes += adapter_bytes(settings, budget.model, layers, place.tp, budget.dtype)  # noqa: PLW2901
        page_bytes = len(layers) * kv.layer_page_bytes(place.tp)
        of_draft = 0
        if isinstance(budget.draft, HeadConfig) and number == len(stages):
            of_draft = head_bytes(budget.draft, place.tp, budget.dtype)
            page_bytes += kv.layer_page_bytes(place.tp)
        elif _has_draft(budget, place) and isinstance(budget.draft, ModelConfig) and number == len(stages):
            of_draft = shard_bytes(budget.draft, range(budget.draft.num_layers), place.tp, budget.dtype, AS_MADE)
            dtype = budget.dtype if kv.scaled else kv.dtype
            small = KVLayout.of(budget.draft, kv.page_size, dtype, kv.tiled)
            page_bytes += small.held_page_bytes(place.tp) // place.tp
        found.append(((allowed - held_bytes - of_draft) // page_bytes, held_bytes + of_draft))
    pages, held_bytes = min(found)
    if pages < kv.pages_for(longest):
        raise NoRoom(
            f"{place.worker} does not fit: {held_bytes / GIB:.2f} GiB of weights on a device with"
            f" {budget.device_bytes / GIB:.2f} GiB (--hbm_fraction={settings.hbm_fraction:g} of it is"
            f" {allowed / GIB:.2f}) leave room for {max(pages, 0) * kv.page_size} KV tokens, and one sequence may have"
            f" {longest}; use more devices, or lower --max_model_len"
        )
    return pages


def _has_draft(budget: Budget, place: WorkerMesh) -> bool:
    return place.role.decodes or budget.draft_kept


# Python's garbage collector in a process that serves.

# Containers that are there more than at the last collection, and younger collections before an older one. A step of
# hundreds of rows makes and drops more than Python's 700 at once: they were looked through over and over, and every
# few hundred dispatches all of them, for 20 ms and more on whichever thread made the last.
THRESHOLDS = 10_000, 10, 20


def settle() -> None:
    """All is loaded and compiled: what is there stays, and is looked through no more. A full collection looked through
    JAX's million objects too: streams stood still for most of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
