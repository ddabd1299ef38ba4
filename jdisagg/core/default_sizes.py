"""Defaults for unset sizes: slots, tokens per step, pages and declared shapes, from the model and the device.

A decode step reads each weight once for all its rows. Up to the critical batch more rows take no more time, as reading
weights takes longer than multiplying: F / W rows for two-byte matrices with F FLOP/s and W bytes/s; with experts more,
since few rows share one. Slots beyond it gain little and cost pages. A prompt's chunk should be several times larger,
so that multiplying dominates. On the CPU all sizes are small constants: programs take seconds to compile there, and the
time of a step grows with its rows already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jdisagg.core.hardware import CHIPS, GIB, Chip
from jdisagg.core.layout.kv_layout import LANES, KVLayout
from jdisagg.core.mesh_spec import MeshSpec, Role, WorkerMesh
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings

TYPICAL_TOKENS = 1024  # tokens of a running sequence; if they are more, some rows stay empty, at almost no cost
LARGEST_SLOTS = 512  # slots of a stage: logits of more rows take gigabytes, and only experts would gain
CHUNK_STEPS = 8  # a chunk's rows in critical batches: reading weights takes at most an eighth of its time
LARGEST_CHUNK = 8192
ACTIVATIONS_SHARE = 16  # a chunk's activations take at most 1 / 16 of a device's memory
PAGE_BYTES = 128 << 10  # of one layer on one device: a TPU's copy of it takes longer than the request
LEAST_PAGE, LARGEST_PAGE = 32, 128  # tokens: whole tiles of every dtype; a prefix's granularity
LEAST_WIDTH = 2048  # of page tables, in tokens: kernels read only held pages at any table width
MULTI_STEP = 8  # decode steps per dispatch; on CPUs only for rings: single steps are as fast there
DECODE_MULTI_STEP = 32  # for one stage that only decodes: it knows each sequence before its KV arrives
USUAL = {"tpu": "v5e", "gpu": "a100"}  # the sheet used for devices without one


@dataclass(frozen=True, slots=True)
class Size:
    """A chosen number and the reason for it."""

    value: int
    reason: str


@dataclass(frozen=True, slots=True)
class Buckets:
    """The smallest declared shapes, in tokens; each shape is a quarter of the next larger one."""

    smallest_chunk: int
    smallest_width: int


@dataclass(frozen=True, slots=True)
class ChosenSizes:
    """The sizes of a run: the settings, with settings of 0 replaced by defaults for the model and its devices."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_seqs: int
    multi_step: int  # decode steps per dispatch of one stage
    ring_multi_step: int  # decode steps per dispatch of a ring
    buckets: Buckets
    reasons: tuple[str, ...] = ()  # one line per size without a setting


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of all workers of a mesh whose pools name no platforms."""

    platform: str
    chip: Chip | None  # None: there is no data sheet
    memory_bytes: int | None  # of one device; None if unknown, and on the CPU

    def of(self, place: WorkerMesh) -> Devices:
        """Returns the devices of one worker, whose pool may name another platform."""
        platform = place.platform or self.platform
        return self if platform == self.platform else Devices(platform, None, None)


CPU_SLOTS = Size(8, "8 decode slots: on a CPU, step time grows with each sequence")
CPU_TOKENS = Size(
    512, "512 tokens per prefill step: larger steps are no faster per token on a CPU and delay other requests"
)
CPU_PAGE = Size(32, "pages of 32 tokens")
CPU_BUCKETS = Buckets(64, 256)


def sheet_of(platform: str, chip: Chip | None) -> Chip:
    """Returns the data sheet used for an accelerator."""
    return chip or CHIPS[USUAL[platform]]


def critical_rows(model: ModelConfig, tp: int, chip: Chip) -> int:
    """Returns the rows of a step whose products take as long as reading the weights. Matrices are bf16; those of one
    byte are read and multiplied twice as fast."""

    def reading(rows: int) -> bool:
        read_s = 2 * model.read_params(rows, tp) / chip.memory_bytes_per_s
        return model.linear_flops(rows, tp) / chip.flops_per_s < read_s

    most = 1
    while reading(most):
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if reading(middle) else (least, middle)
    return most


def page_size(platform: str, kv: KVLayout, tp: int, longest: int) -> Size:
    """Returns the tokens per page. It must be equal in every process of a cluster, so it uses only what all processes
    know."""
    if platform == "cpu":
        return CPU_PAGE
    if platform == "gpu":
        return Size(
            32, "32-token pages: a GPU reads any page size equally well; smaller pages only lengthen the page table"
        )
    token_bytes = replace(kv, page_size=LARGEST_PAGE).layer_page_bytes(tp) / LARGEST_PAGE
    wanted = _power_near(PAGE_BYTES / token_bytes, up=True)
    least = LANES // 2 if kv.scaled else LEAST_PAGE  # scales of K and V fill a row of a tile
    size = max(least, min(wanted, LARGEST_PAGE, _power_near(longest / 8)))
    taken = f"{size * token_bytes / 1024:.0f} KiB of a layer in one copy"
    return Size(size, f"pages of {size} tokens: {taken}; {PAGE_BYTES >> 10} KiB hide the latency of a copy")


def decode_slots(
    model: ModelConfig, tp: int, stages: int, platform: str, chip: Chip | None, room_tokens: int | None, longest: int
) -> Size:
    """Returns the slots of a worker of `stages` stages, with KV memory for `room_tokens` tokens (None: unknown)."""
    if platform == "cpu":
        return CPU_SLOTS
    sheet = sheet_of(platform, chip)
    critical = critical_rows(model, tp, sheet)
    wanted = min(_power_near(critical), LARGEST_SLOTS)
    meets = f"{_called(sheet, chip)} is compute-bound from {critical} rows"
    typical = min(longest, TYPICAL_TOKENS)
    held = wanted * stages if room_tokens is None else room_tokens // typical
    each = f", in each of {stages} stages" if stages > 1 else ""
    if (fed := _power_near(held / stages)) >= wanted:
        return Size(wanted * stages, f"{wanted * stages} slots: {meets}{each}")
    room = f"{room_tokens:,} tokens of KV are {held:,} sequences of {typical:,}"
    return Size(fed * stages, f"{fed * stages} slots: {room}; {meets}{each}")


def beside_chunks(slots: Size, stages: int, tokens: int) -> Size:
    """Returns the slots of a worker whose steps mix chunks and one row per slot of a stage: at most half of the step's
    `tokens`, which a setting gives."""
    most = stages * _power_near(tokens / 2, down=True)
    if slots.value <= most:
        return slots
    return Size(most, f"{most} slots: half of the {tokens:,} tokens of a step, the rest are for prompts")


def step_tokens(model: ModelConfig, tp: int, platform: str, chip: Chip | None, device_bytes: int | None) -> Size:
    """Returns the tokens of a chunk of prompts, or of rows and chunks if steps mix both."""
    if platform == "cpu":
        return CPU_TOKENS
    sheet = sheet_of(platform, chip)
    critical = critical_rows(model, tp, sheet)
    wanted = min(_power_near(CHUNK_STEPS * critical), LARGEST_CHUNK)
    meets = f"{CHUNK_STEPS} times the {critical} rows from which {_called(sheet, chip)} is compute-bound"
    row_bytes = 2 * (4 * model.hidden_size + model.widest_row(tp))
    room = (device_bytes or sheet.memory_bytes) // ACTIVATIONS_SHARE
    tokens = min(wanted, _power_near(room / row_bytes, down=True))
    if tokens == wanted:
        return Size(tokens, f"{tokens:,} tokens per step: {meets}")
    fills = f"their activations fill {tokens * row_bytes / GIB:.1f} of {room / GIB:.1f} GiB"
    return Size(tokens, f"{tokens:,} tokens per step: {fills}; {meets}")


def chunk_sequences(platform: str, tokens: int) -> Size:
    """Returns the most prompts packed into one chunk of `tokens` tokens."""
    most = 8 if platform == "cpu" else max(8, min(64, tokens // 64))
    return Size(most, f"{most} prompts per chunk: prompts of 64 tokens fill it")


def buckets_of(platform: str, tokens: int) -> Buckets:
    """Returns the smallest shapes. A chunk under half the critical batch is bound by reading weights: smaller programs
    would take as long."""
    return CPU_BUCKETS if platform == "cpu" else Buckets(max(64, tokens // 16), LEAST_WIDTH)


def one_stage_multi_step(platform: str, role: Role) -> int:
    """Returns the most decode steps per dispatch of a worker of one stage."""
    if platform == "cpu":
        return 1
    return DECODE_MULTI_STEP if role is Role.DECODE else MULTI_STEP


def choose_page_size(settings: Settings, mesh: MeshSpec, devices: Devices, kv: KVLayout, longest: int) -> Size:
    """Returns the page size of decode workers; prefill workers have it too unless --prefill_page_size differs."""
    if settings.page_size:
        return Size(settings.page_size, "")
    place = mesh.place_of(decodes=True)
    return page_size(devices.of(place).platform, kv, place.tp, longest)


def choose_sizes(
    settings: Settings,
    model: ModelConfig,
    mesh: MeshSpec,
    devices: tuple[Devices, Devices],
    page: Size,
    longest: int,
    room: Mapping[WorkerId, int | None],
) -> ChosenSizes:
    """Returns the sizes of a mesh on the devices of decode and of prefill workers. room: a worker's tokens of KV, None
    where they are unknown."""
    decoding, prefilling = mesh.place_of(decodes=True), mesh.place_of(decodes=False)
    here, there = devices
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
    steps = settings.multi_step or one_stage_multi_step(here.platform, decoding.role)
    ring_steps = settings.multi_step or MULTI_STEP
    return ChosenSizes(slots.value, tokens.value, prompts.value, steps, ring_steps, buckets, reasons)


def _called(sheet: Chip, chip: Chip | None) -> str:
    return sheet.name if chip else f"{sheet.name} (assumed for this device)"


def _power_near(number: float, *, up: bool = False, down: bool = False) -> int:
    """Returns the nearest power of two by ratio, or the one above or below."""
    exact = math.log2(max(number, 1))
    return 1 << (math.ceil(exact) if up else math.floor(exact) if down else round(exact))
