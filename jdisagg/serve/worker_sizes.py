"""One worker's sizes: slots, chunks, page tables, and how it ships what it holds."""

from __future__ import annotations

from typing import Any

from jdisagg.core.adapters import adapter_sizes
from jdisagg.core.kv_layout import DraftPages, KVLayout
from jdisagg.core.labels import Labels
from jdisagg.core.mesh_spec import Schedule, WorkerMesh
from jdisagg.core.settings import Settings, int_list
from jdisagg.core.worker_config import (
    DRAFT_READS,
    RAW,
    Compress,
    Digests,
    Role,
    TransferMode,
    WorkerConfig,
    always_guesses,
    chunk_tokens,
)
from jdisagg.serve.chosen_sizes import ChosenSizes
from jdisagg.serve.speculation import Speculation, read_speculation
from jdisagg.serve.structured.grammars import why_no_grammars


def worker_config(
    settings: Settings, sizes: ChosenSizes, place: WorkerMesh, page_size: int, longest: int, num_pages: int
) -> WorkerConfig:
    """One worker's sizes; slots are rounded up to whole microbatches."""
    stages, depth = (1, place.pp) if place.role is Role.PREFILL else (place.pp, 1)  # of decode, of prefill alone
    slots = -(-sizes.max_num_seqs // stages) * stages
    ring = place.schedule is Schedule.RING  # whose program takes all slots, and no prompts
    speculation = read_speculation(settings.speculative)
    turns = turns_of(settings, sizes, place, speculation)
    joint = turns > 1 and stages > 1 and not ring  # steps then take all slots, round its stages
    guessed = 0 if ring else speculation.tokens
    short = short_tokens(settings, sizes, slots // stages, page_size) if place.role is Role.DECODE and not ring else 0
    mixed = settings.mixed_steps == "on" and (short > 0 or place.role is Role.COLOCATED) and not joint
    return WorkerConfig(
        worker=place.worker,
        role=place.role,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=longest,
        num_slots=slots,
        **stages_of_a_step(place, stages, joint=joint),
        prefill_stages=depth,
        chunks_in_flight=depth + 1,  # one for each stage, and one that waits for the first
        decode_turns=turns,
        prefill_buckets=(short,) if short else chunk_sizes(settings, sizes, slots // stages if mixed else 0, page_size),
        draft_tokens=guessed,
        forced_tokens=0 if ring or guessed or why_no_grammars(settings) else settings.forced_tokens,
        **drafts_of(speculation, longest, ring=ring),
        table_buckets=table_widths(settings, sizes, longest, page_size),
        max_chunk_seqs=sizes.max_chunk_seqs,
        steps_in_flight=settings.steps_in_flight,
        reserve_tokens=settings.reserve_tokens,
        prefix_caching=settings.prefix_caching == "on",
        dram_pages=-(-settings.dram_tokens // page_size),
        disk_pages=-(-settings.disk_tokens // page_size),
        shared_pool=bool(settings.pool),
        peer_fetch=settings.peer_fetch,
        tier_wire=RAW if settings.tier_compress == "none" else settings.tier_compress,
        mixed_steps=mixed,
        short_prompt_tokens=short,
        embeds=settings.embeddings != "off",
        ack_timeout_s=settings.handoff_timeout_s,
        claim_timeout_s=settings.handoff_timeout_s * 2 / 3,  # the router waits for that long, and is to hear of it
        labels=Labels.parse(settings.labels),
        **adapter_sizes(settings),
        router_grace_s=0.0 if settings.role == "all" else settings.router_grace_s,
    )


def stages_of_a_step(place: WorkerMesh, stages: int, *, joint: bool) -> dict[str, int]:
    """Its microbatches, each of which takes steps of its own, or the stages that a step of all slots goes through."""
    ring = place.schedule is Schedule.RING
    return {
        "num_microbatches": 1 if ring or joint else stages,
        "ring_stages": place.pp if ring else 1,
        "joint_stages": stages if joint else 1,
    }


def table_widths(settings: Settings, sizes: ChosenSizes, longest: int, page_size: int) -> tuple[int, ...]:
    """Of page tables, in pages, ascending; the widest holds the longest sequence."""
    widths = int_list(settings.table_buckets, "table_buckets") or _halvings(longest, sizes.buckets.smallest_width, 4)
    return tuple(sorted({-(-width // page_size) for width in (*widths, longest) if width <= longest}))


def turns_of(settings: Settings, sizes: ChosenSizes, place: WorkerMesh, speculation: Speculation) -> int:
    """Of a dispatch: of a ring, or of one stage whose rows guess nothing, or only where it pays, or for grammars. A
    head's states are made by single steps alone. Several stages take more than one where they are asked to, and guess
    nothing at all: a step then holds all slots, and nobody begins to decode before all its KV is in."""
    if place.schedule is Schedule.RING:
        return sizes.ring_turns
    guesses = always_guesses(speculation.tokens, guesses=speculation.guesses, auto=speculation.auto)
    if place.role is Role.DECODE and place.pp > 1:
        return 1 if speculation.tokens else settings.decode_turns or 1
    one_stage = place.role.decodes and place.pp == 1
    return sizes.decode_turns if one_stage and not guesses and not speculation.head else 1


def chunk_sizes(settings: Settings, sizes: ChosenSizes, rows: int, page_size: int) -> tuple[int, ...]:
    """Declared chunks, ascending, beside `rows` decode rows."""
    chunk = chunk_tokens(sizes.max_num_batched_tokens, rows, page_size)
    found = int_list(settings.prefill_buckets, "prefill_buckets") or _halvings(chunk, sizes.buckets.smallest_chunk, 4)
    return found if found[-1] == chunk else (*(size for size in found if size < chunk), chunk)


def short_tokens(settings: Settings, sizes: ChosenSizes, rows: int, page_size: int) -> int:
    """The chunk of a decode worker with `rows` rows a step, in whole pages; 0 where the budget of a step has no room.

    Only where it keeps pages for their content does it ever hold all but the end of a prompt.
    """
    if settings.prefix_caching != "on":
        return 0
    tokens = min(settings.short_prompt_tokens, sizes.max_num_batched_tokens - rows)
    return max(0, tokens - tokens % page_size)


def drafts_of(speculation: Speculation, longest: int, *, ring: bool) -> dict[str, Any]:
    """What guesses, when, and what it reads first: a model of its own alone reads tokens."""
    reads = min(DRAFT_READS, longest) if speculation.draft and not speculation.head else 0
    auto = speculation.auto and not ring
    said = {"guesses": speculation.guesses, "draft_auto": auto, "draft_ngrams": not speculation.draft}
    return said | {"draft_reads": reads}


def shipping_of(
    settings: Settings, layers: tuple[range, ...], kv: KVLayout, draft: DraftPages | None = None
) -> dict[str, Any]:
    """How workers ship KV: when it leaves, in which layer groups, and what its bytes are; a draft's with the last."""
    runs = kv_runs(layers, kv)
    if draft is not None:
        runs = (*runs[:-1], range(runs[-1].start, draft.layers.stop))
    return {
        "transfer": TransferMode(settings.transfer),
        "digests": Digests(settings.transfer_digests),
        "stage_admission": settings.stage_admission == "on",
        "layer_groups": tuple((run.start, run.stop) for run in runs),
        "draft_layers": draft.layout.num_layers if draft else 0,
        "kv_token_bytes": kv.bytes_per_token + (draft.layout.bytes_per_token if draft else 0),
        "compress": Compress(settings.transfer_compress),
        "error_bound": settings.transfer_error_bound,
        # Pages and dtypes may differ.
        "kv_layout": f"{kv.num_layers} layers x {kv.num_kv_heads} x {kv.parts} x {kv.head_dim}",
    }


def kv_runs(layers: tuple[range, ...], kv: KVLayout) -> tuple[range, ...]:
    """The layers that have KV in each of these runs: a head's lies behind the last."""
    return (*layers[:-1], range(layers[-1].start, kv.num_layers))


def _halvings(largest: int, smallest: int, ratio: int) -> tuple[int, ...]:
    """`largest` divided by `ratio` again and again while it stays over `smallest`, ascending."""
    sizes = [largest]
    while sizes[0] // ratio >= smallest:
        sizes.insert(0, sizes[0] // ratio)
    return tuple(sizes)
