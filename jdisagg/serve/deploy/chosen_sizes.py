"""Sizes of a run: those that somebody said, and of the others what the model and its devices make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jdisagg.core.default_sizes import (
    MULTI_STEP,
    Buckets,
    Size,
    beside_chunks,
    buckets_of,
    chunk_sequences,
    decode_slots,
    one_stage_multi_step,
    page_size,
    step_tokens,
)
from jdisagg.core.hardware import Chip
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.mesh_spec import MeshSpec, WorkerMesh
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """What settings of 0 became, and the others as they were."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_seqs: int
    multi_step: int  # of a dispatch of one stage,
    ring_turns: int  # and of a ring
    buckets: Buckets
    reasons: tuple[str, ...]  # a line for each that nobody said


@dataclass(frozen=True, slots=True)
class Devices:
    """What all workers of a mesh stand on, where its pools name no platforms."""

    platform: str
    chip: Chip | None  # whose data sheet there is
    memory_bytes: int | None  # of one; None where nobody knows, and on the CPU

    def of(self, place: WorkerMesh) -> Devices:
        platform = place.platform or self.platform
        return self if platform == self.platform else Devices(platform, None, None)


def page_of(settings: Settings, mesh: MeshSpec, devices: Devices, kv: KVLayout, longest: int) -> Size:
    """Of workers that decode; those of prefill alone have it too, unless --prefill_page_size says another."""
    if settings.page_size:
        return Size(settings.page_size, "")
    place = mesh.place_of(decodes=True)
    return page_size(devices.of(place).platform, kv, place.tp, longest)


def sizes_of(
    settings: Settings,
    model: ModelConfig,
    mesh: MeshSpec,
    devices: Devices,
    page: Size,
    longest: int,
    room: Mapping[WorkerId, int | None],
) -> ChosenSizes:
    """room: a worker's tokens of KV, None where nobody knows."""
    decoding, prefilling = mesh.place_of(decodes=True), mesh.place_of(decodes=False)
    here, there = devices.of(decoding), devices.of(prefilling)
    slots, tokens = Size(settings.max_num_seqs, ""), Size(settings.max_num_batched_tokens, "")
    if not slots.value:
        held = room[decoding.worker]
        slots = decode_slots(model, decoding.tp, decoding.pp, here.platform, here.chip, held, longest)
        if tokens.value and decoding.role is Role.COLOCATED and settings.mixed_steps == "on" and here.platform != "cpu":
            slots = beside_chunks(slots, decoding.pp, tokens.value)
    if not tokens.value:
        tokens = step_tokens(model, prefilling.tp, there.platform, there.chip, there.memory_bytes)
    prompts = Size(settings.max_chunk_seqs, "")
    if not prompts.value:
        prompts = chunk_sequences(there.platform, tokens.value)
    reasons = tuple(each.reason for each in (slots, tokens, prompts, page) if each.reason)
    buckets = buckets_of(there.platform, tokens.value)
    turns = settings.multi_step or one_stage_multi_step(here.platform, decoding.role)
    ring_turns = settings.multi_step or MULTI_STEP
    return ChosenSizes(slots.value, tokens.value, prompts.value, turns, ring_turns, buckets, reasons)
