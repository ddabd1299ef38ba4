"""The sizes a worker decides with: its role, its pages and slots, and the program shapes declared for it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jdisagg.core.codec import Number, TaggedStruct, Whole
from jdisagg.core.default_sizes import ChosenSizes
from jdisagg.core.errors import ConfigError
from jdisagg.core.labels import NOWHERE, Labels
from jdisagg.core.layout.kv_layout import DraftPages, KVLayout
from jdisagg.core.mesh_spec import Role, Schedule, WorkerMesh
from jdisagg.core.request import WorkerId, adapter_sizes
from jdisagg.core.router_config import RESERVE_TOKENS
from jdisagg.core.settings import Settings, int_list
from jdisagg.core.tiers import Tier


class TransferMode(StrEnum):
    """When a prompt's KV leaves its prefill worker."""

    WHOLE = "whole"  # in one part, after the last chunk
    CHUNK = "chunk"  # after each chunk, the pages that it completed
    LAYER = "layer"  # so, and each layer group of a chunk by itself, while the next group computes
    AUTO = "auto"  # as measured: whichever exposes less for the prompt's length


class Digests(StrEnum):
    """Which pages of a part travel with a digest that is checked where they land."""

    FULL = "full"
    SAMPLED = "sampled"  # every eighth
    OFF = "off"


MOST = 1 << 24  # of anything a worker counts: pages, slots, tokens
MAY_BE_NONE = (
    *("reservations_ahead", "reserve_tokens", "decode_steps_per_chunk", "draft_tokens", "draft_layers"),
    "draft_reads",
    *("forced_tokens",),
    *("short_prompt_tokens", "part_tries", "kv_token_bytes", "dram_pages", "disk_pages", "max_loras", "max_lora_rank"),
)
WHOLE = (
    *("num_pages", "page_size", "max_model_len", "num_slots"),
    *("max_chunk_seqs", "steps_in_flight", "chunks_in_flight", "prefill_stages"),
    *MAY_BE_NONE,
)
MIN_NGRAM = 2  # tokens at the end of a sequence that must have stood there before, for a guess of n-grams
DRAFT_READS_LATELY = 8  # tokens of a slot that a draft model reads with one guess at most, besides those it guesses
DRAFT_READS = 256  # tokens that it reads between two steps
MAX_NGRAM = 4  # so, at most: of more that are alike nothing more is asked
RAW = "raw"  # the wire of numbers as they are


class Compress(StrEnum):
    """What a part's numbers are quantised to for the way; each row of a head with its own scale."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"
    AUTO = "auto"  # int8 where the link takes longer for the bytes saved than the devices to quantise, else raw


class Stages(TaggedStruct, frozen=True):
    """Decode stages, each of them a program on its own devices.

    One step per dispatch: each stage has a microbatch of its own, and a step holds one of them. Several: a step holds
    all slots, whose microbatches go through the stages again and again within one dispatch.
    """

    n: Whole = 1
    steps_per_dispatch: Whole = 1  # tokens of each sequence that one dispatch samples, at most


class Ring(TaggedStruct, frozen=True):
    """Decode stages that are one program over all their devices, which takes all slots as one microbatch."""

    n: Whole
    steps_per_dispatch: Whole = 1  # tokens of each sequence that one dispatch samples, at most


class WorkerConfig(TaggedStruct, frozen=True):
    """One worker's configuration. Buckets are ascending; a plan's size is the smallest bucket that holds it."""

    worker: WorkerId
    role: Role
    num_pages: Whole  # pages of the pool, the null page not counted: ids run from 1 to num_pages
    page_size: Whole  # tokens a page
    max_model_len: Whole  # tokens of one sequence, prompt and output together
    num_slots: Whole = 8  # sequences decoded at once, over all microbatches
    decode: Stages | Ring = Stages()  # how its decode steps run
    prefill_buckets: tuple[Whole, ...] = (128, 512)  # tokens of one packed chunk; the last is the chunk size
    table_buckets: tuple[Whole, ...] = (8, 32, 128)  # page-table widths, pages
    max_chunk_seqs: Whole = 8  # sequences packed into one chunk
    steps_in_flight: Whole = 2  # decode steps of one microbatch dispatched before the first one's tokens are read
    chunks_in_flight: Whole = 2
    prefill_stages: Whole = 1  # of a prefill worker, each on its own devices: chunks go through them in their order
    reservations_ahead: Whole = 2  # sequences reserved for beyond num_slots: they take the next slots that come free
    reserve_tokens: Whole = (
        RESERVE_TOKENS  # output tokens whose pages are held before prefill; more are granted one by one
    )
    decode_steps_per_chunk: Whole = 1  # where both are computed: steps of each busy microbatch from chunk to chunk
    mixed_steps: bool = False  # chunks and decode rows in one program; else they take turns
    short_prompt_tokens: Whole = (
        0  # the uncached end of a prompt that a decode worker computes itself, at most; 0: none
    )
    draft_tokens: Whole = 0  # tokens beyond the next one that a decode step may draw
    forced_tokens: Whole = 0  # without drafts: rows of a step beside its slots', for what grammars force; 0: none
    guesses: bool = True  # of any row, guessed; else of rows with a grammar alone, where it leaves no choice
    draft_reads: Whole = 0  # tokens that a draft model reads between two steps, where one guesses
    draft_layers: Whole = 0  # of a draft model, numbered behind the model's, whose KV goes where the model's does
    draft_auto: bool = False  # only where that is thought to be faster than a token a step
    ack_timeout_s: Number = 30.0  # how long shipped pages wait for the destination's Ack
    transfer: TransferMode = TransferMode.AUTO
    layer_groups: tuple[
        tuple[Whole, Whole], ...
    ] = ()  # runs of layers computed one by one: the decode stages'; (): one
    prefix_caching: bool = False  # full pages are kept for their content until somebody needs the room
    stage_admission: bool = True  # a sequence may begin to decode when its first stage's layers are in, others follow
    kv_layout: str = ""  # what a page's bytes are, where workers may differ: a Commit of another is refused
    digests: Digests = Digests.FULL
    compress: Compress = Compress.NONE
    error_bound: Number = 0.05  # relative, of a layer's pages: one that loses more by compression goes raw
    part_tries: Whole = 3  # times that a part is asked for again
    part_timeout_s: Number = 5.0  # for a missing part, once COMMIT is here, before it is asked for again
    kv_token_bytes: Whole = 0  # of one token's KV, all layers; 0: not told
    labels: Labels = NOWHERE  # where it stands
    dram_pages: Whole = 0  # pages kept in the host's memory below HBM; 0: none
    disk_pages: Whole = 0  # so, on disk
    shared_pool: bool = False  # pages are put into a pool that all workers share, and fetched from it
    peer_fetch: bool = False  # pages that other workers hold are fetched from them, and lent to them
    tier_wire: str = RAW  # what pages below HBM, or from another worker, are quantised to
    max_loras: Whole = 0  # adapters that one step may hold; 0: none, and rows without any cost nothing
    max_lora_rank: Whole = 0  # of each
    embeds: bool = False  # it tells states of prompts, where asked: one program more for each chunk
    router_grace_s: Number = 0.0  # that it keeps what it decodes when its router is gone; 0: not at all

    @property
    def keeps_below(self) -> bool:
        """Whether pages that leave HBM may lie anywhere else."""
        return self.prefix_caching and (self.dram_pages > 0 or self.disk_pages > 0 or self.shared_pool)

    @property
    def has_tiers(self) -> bool:
        """Whether pages may come to HBM from anywhere but a prompt's own handoff."""
        return self.keeps_below or (self.prefix_caching and self.peer_fetch)

    def pages_of(self, tier: Tier) -> int:
        """That it has itself."""
        return {Tier.HBM: self.num_pages, Tier.DRAM: self.dram_pages, Tier.DISK: self.disk_pages}.get(tier, 0)

    def check(self) -> None:
        """Raises ConfigError naming the first size that no worker can have, with its value."""
        for name in WHOLE:
            value, low = getattr(self, name), 0 if name in MAY_BE_NONE else 1
            if not low <= value <= MOST:
                raise ConfigError(f"{self.worker}: {name} is {value}, must lie in [{low}, {MOST}]")
        for name in ("prefill_buckets", "table_buckets"):
            sizes: tuple[int, ...] = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= MOST:
                raise ConfigError(f"{self.worker}: {name} is {sizes[:9]}, must ascend from 1 up")
        if self.prefill_stages > 1 and self.role is not Role.PREFILL:
            raise ConfigError(f"{self.worker}: {self.prefill_stages} prefill stages of a worker that is {self.role}")
        self._check_decode()
        if self.max_loras and not self.max_lora_rank:
            raise ConfigError(f"{self.worker}: max_lora_rank is 0 beside {self.max_loras} max_loras")
        if not all(0 <= first < stop <= MOST for first, stop in self.layer_groups):
            raise ConfigError(f"{self.worker}: layer_groups is {self.layer_groups[:9]}, must be runs of layers")
        for name in ("ack_timeout_s", "error_bound", "part_timeout_s", "router_grace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{self.worker}: {name} is {getattr(self, name)}, must be finite and not negative")
        self.labels.check(self.worker)

    def _check_decode(self) -> None:
        stages, steps, least = self.decode.n, self.decode.steps_per_dispatch, 2 if self.is_ring else 1
        if not least <= stages <= MOST or not 1 <= steps <= MOST:
            raise ConfigError(f"{self.worker}: decode is {self.decode}, must have n from {least} on and a step or more")
        if self.num_slots % stages:
            raise ConfigError(f"{self.worker}: {self.num_slots} slots do not fill the microbatches of {self.decode}")
        if self.is_ring:
            can = self.role is Role.DECODE and not (self.short_prompt_tokens or self.tokens_ahead or self.mixed_steps)
        elif self.is_pipelined_multi_step:
            can = self.role is Role.DECODE and not (self.draft_tokens or self.mixed_steps)
        else:
            can = not self.is_multi_step or (self.role.decodes and not self.always_guesses)
        if not can:
            what = f"short_prompt_tokens {self.short_prompt_tokens}, draft_tokens or forced_tokens {self.tokens_ahead}"
            raise ConfigError(
                f"{self.worker}: {self.decode} only decodes, without drafts of every step; it is {self.role} with"
                f" {what} and mixed_steps {self.mixed_steps}"
            )

    @property
    def tokens_ahead(self) -> int:
        """That a row of a step may draw beyond the next one: of a draft, or of what its grammar forces."""
        return self.draft_tokens or self.forced_tokens

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """Tokens of drafts that there are programs for, ascending: of who chooses, each double the rows of the last."""
        most = self.draft_tokens if self.role.decodes else 0
        if not (most and self.draft_auto):
            return (most,) if most else ()
        return (*((2 << power) - 1 for power in range(most.bit_length()) if (2 << power) - 1 < most), most)

    @property
    def always_guesses(self) -> bool:
        """See the function of this name."""
        return always_guesses(self.draft_tokens, guesses=self.guesses, auto=self.draft_auto)

    @property
    def is_ring(self) -> bool:
        """True if its decode stages are one program."""
        return isinstance(self.decode, Ring)

    @property
    def is_multi_step(self) -> bool:
        """True if it is one stage with programs of several steps beside those of single steps."""
        return not self.is_ring and self.decode.steps_per_dispatch > 1 and self.decode.n == 1

    @property
    def is_pipelined_multi_step(self) -> bool:
        """True if one dispatch takes the microbatches of all slots through several stages more than once."""
        return not self.is_ring and self.decode.steps_per_dispatch > 1 and self.decode.n > 1

    @property
    def num_microbatches(self) -> int:
        """Sets of slots that take steps of their own."""
        return 1 if self.takes_all_slots else self.decode.n

    @property
    def computes_prompts(self) -> bool:
        """Whether it has programs for chunks: a decode worker may, for short ones."""
        return self.role.prefills or self.short_prompt_tokens > 0

    @property
    def pipeline_stages(self) -> int:
        """Programs, each on its own devices, that a step goes through one after the other."""
        return self.stage_batches if self.role.decodes else self.prefill_stages

    @property
    def takes_all_slots(self) -> bool:
        """True if a step takes all slots through several stages, and so waits for the KV of every stage."""
        return self.is_ring or self.is_pipelined_multi_step

    @property
    def stage_batches(self) -> int:
        """Microbatches that go round its stages, whether a step holds one of them or all."""
        return 1 if self.is_ring else self.decode.n

    @property
    def stage_slots(self) -> int:
        """Of each of those: the rows of a stage's programs."""
        return self.num_slots // self.stage_batches

    @property
    def adapter_columns(self) -> int:
        """What a row of a step says more where rows may have adapters."""
        return 1 if self.max_loras else 0

    @property
    def slots_per_microbatch(self) -> int:
        return self.num_slots // self.num_microbatches

    @property
    def wires(self) -> tuple[str, ...]:
        """What parts may travel as; programs exist for each."""
        if self.compress is Compress.NONE:
            return (RAW,)
        return RAW, Compress.INT8.value if self.compress is Compress.AUTO else self.compress.value

    @property
    def step_tokens(self) -> int:
        """The most that one step holds: rows and chunk tokens together where they are mixed."""
        chunk, rows = self.prefill_buckets[-1], self.slots_per_microbatch
        return chunk + rows if self.mixed_steps else max(chunk, rows)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def always_guesses(tokens: int, *, guesses: bool, auto: bool) -> bool:
    """Of drafts of so many tokens: whether every step of any row verifies one, so that none takes turns."""
    return tokens > 0 and guesses and not auto


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest of the ascending `buckets` that holds `size`; asserts that one does."""
    index = bisect_left(buckets, size)
    assert index < len(buckets), f"size {size} is over the largest bucket of {buckets}"
    return buckets[index]


def chunk_tokens(step_tokens: int, rows: int, page_size: int) -> int:
    """What is left of a step's tokens for prompts beside `rows` decode rows, in whole pages. Raises ConfigError where
    that is less than a page."""
    left = step_tokens - rows
    if rows and left < page_size:
        what = (
            f"--max_num_batched_tokens={step_tokens} holds {rows} decode rows and no page of {page_size} prompt tokens"
        )
        raise ConfigError(f"{what}: raise it to {rows + page_size} or more, or say --mixed_steps=off")
    return left - left % page_size if rows else left


# ------------------------------------------------------------------ from settings to a worker's sizes


@dataclass(frozen=True, slots=True)
class Speculation:
    """Tokens of a draft, 0 for none; `guesses` is false if they come of grammars alone; `auto` if they are verified
    only where that is faster; `draft` is the model or head that guesses them, "" for n-grams."""

    tokens: int = 0
    guesses: bool = True
    auto: bool = False
    draft: str = ""
    head: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """Sizes of one worker that no setting says alone: chosen for the model and its devices, or measured."""

    chosen: ChosenSizes
    num_pages: int
    page_size: int
    max_model_len: int
    speculation: Speculation = Speculation()
    has_grammars: bool = False  # grammars of requests may force tokens
    layer_groups: tuple[tuple[int, int], ...] = ()  # the worker's stages, or the decode stages'; (): one group
    draft_layers: int = 0
    kv_token_bytes: int = 0  # 0: unknown
    kv_layout: str = ""


def worker_config(settings: Settings, mesh_row: WorkerMesh, sizes: WorkerSizes) -> WorkerConfig:
    """Returns the configuration of one worker of a mesh; slots are rounded up to whole microbatches.

    The server, the simulator, the planner and `jdisagg aot` all derive their workers here.
    """
    role, is_ring = mesh_row.role, mesh_row.schedule is Schedule.RING
    stages, depth = (mesh_row.pp, 1) if role.decodes else (1, mesh_row.pp)  # of decode, of prefill alone
    steps = _steps_per_dispatch(settings, mesh_row, sizes)
    decode = Ring(stages, steps) if is_ring else Stages(stages, steps)
    takes_all_slots = is_ring or (stages > 1 and steps > 1)
    slots = -(-sizes.chosen.max_num_seqs // stages) * stages
    rows = slots // stages
    short = _short_prompt_tokens(settings, sizes, rows) if role is Role.DECODE and not is_ring else 0
    is_mixed = settings.mixed_steps == "on" and not takes_all_slots and (short > 0 or role is Role.COLOCATED)
    return WorkerConfig(
        worker=mesh_row.worker,
        role=role,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        max_model_len=sizes.max_model_len,
        num_slots=slots,
        decode=decode,
        prefill_stages=depth,
        chunks_in_flight=depth + 1,  # one for each stage, and one that waits for the first
        steps_in_flight=settings.steps_in_flight,
        prefill_buckets=(short,) if short else _prefill_buckets(settings, sizes, rows if is_mixed else 0),
        table_buckets=_table_buckets(settings, sizes),
        max_chunk_seqs=sizes.chosen.max_chunk_seqs,
        reserve_tokens=settings.reserve_tokens,
        mixed_steps=is_mixed,
        short_prompt_tokens=short,
        embeds=settings.embeddings != "off",
        ack_timeout_s=settings.handoff_timeout_s,
        router_grace_s=0.0 if settings.role == "all" else settings.router_grace_s,
        labels=Labels.parse(settings.labels),
        **adapter_sizes(settings),
        **_draft_fields(settings, sizes, is_ring=is_ring),
        **_transfer_fields(settings, sizes, takes_all_slots=takes_all_slots),
        **_tier_fields(settings, sizes),
    )


def _steps_per_dispatch(settings: Settings, mesh_row: WorkerMesh, sizes: WorkerSizes) -> int:
    """The most decode steps of one dispatch: of a ring, or of one stage that does not verify drafts in every step. A
    head's states are made by single steps alone. Several stages take more than one only if settings say so, and
    without drafts: a step then takes all slots, and no sequence starts before all its KV has arrived."""
    drafts = sizes.speculation
    if mesh_row.schedule is Schedule.RING:
        return sizes.chosen.ring_multi_step
    if mesh_row.role is Role.DECODE and mesh_row.pp > 1:
        return 1 if drafts.tokens else settings.multi_step or 1
    always = always_guesses(drafts.tokens, guesses=drafts.guesses, auto=drafts.auto)
    is_one_stage = mesh_row.role.decodes and mesh_row.pp == 1
    return sizes.chosen.multi_step if is_one_stage and not always and not drafts.head else 1


def _short_prompt_tokens(settings: Settings, sizes: WorkerSizes, rows: int) -> int:
    """The chunk of a decode worker with `rows` rows a step, in whole pages; 0 if a step has no room for a page.

    Only a worker that keeps pages for their content ever holds all but the end of a prompt.
    """
    if settings.prefix_caching != "on":
        return 0
    tokens = min(settings.short_prompt_tokens, sizes.chosen.max_num_batched_tokens - rows)
    return max(0, tokens - tokens % sizes.page_size)


def _prefill_buckets(settings: Settings, sizes: WorkerSizes, rows: int) -> tuple[int, ...]:
    """Declared chunks, ascending, beside `rows` decode rows."""
    chunk = chunk_tokens(sizes.chosen.max_num_batched_tokens, rows, sizes.page_size)
    found = int_list(settings.prefill_buckets, "prefill_buckets")
    found = found or _quarters(chunk, sizes.chosen.buckets.smallest_chunk)
    return found if found[-1] == chunk else (*(size for size in found if size < chunk), chunk)


def _table_buckets(settings: Settings, sizes: WorkerSizes) -> tuple[int, ...]:
    """Widths of page tables, in pages, ascending; the widest holds the longest sequence."""
    longest = sizes.max_model_len
    widths = int_list(settings.table_buckets, "table_buckets")
    widths = widths or _quarters(longest, sizes.chosen.buckets.smallest_width)
    return tuple(sorted({-(-width // sizes.page_size) for width in (*widths, longest) if width <= longest}))


def _quarters(largest: int, smallest: int) -> tuple[int, ...]:
    """`largest` divided by four again and again while it stays at `smallest` or over, ascending."""
    sizes = [largest]
    while sizes[0] // 4 >= smallest:
        sizes.insert(0, sizes[0] // 4)
    return tuple(sizes)


def _draft_fields(settings: Settings, sizes: WorkerSizes, *, is_ring: bool) -> dict[str, Any]:
    """How many tokens are guessed, by what and when; only a model of its own reads tokens first."""
    drafts = sizes.speculation
    tokens = 0 if is_ring else drafts.tokens
    return {
        "draft_tokens": tokens,
        "forced_tokens": 0 if is_ring or tokens or not sizes.has_grammars else settings.forced_tokens,
        "guesses": drafts.guesses,
        "draft_auto": drafts.auto and not is_ring,
        "draft_reads": min(DRAFT_READS, sizes.max_model_len) if drafts.draft and not drafts.head else 0,
        "draft_layers": sizes.draft_layers,
    }


def _transfer_fields(settings: Settings, sizes: WorkerSizes, *, takes_all_slots: bool) -> dict[str, Any]:
    """When KV leaves, in which layer groups, and in which bytes."""
    return {
        "transfer": TransferMode(settings.transfer),
        "digests": Digests(settings.transfer_digests),
        "stage_admission": settings.stage_admission == "on" and not takes_all_slots,
        "layer_groups": sizes.layer_groups,
        "kv_token_bytes": sizes.kv_token_bytes,
        "compress": Compress(settings.transfer_compress),
        "error_bound": settings.transfer_error_bound,
        "kv_layout": sizes.kv_layout,
    }


def _tier_fields(settings: Settings, sizes: WorkerSizes) -> dict[str, Any]:
    """Which KV is kept for its content, and where."""
    return {
        "prefix_caching": settings.prefix_caching == "on",
        "dram_pages": -(-settings.dram_tokens // sizes.page_size),
        "disk_pages": -(-settings.disk_tokens // sizes.page_size),
        "shared_pool": bool(settings.pool),
        "peer_fetch": settings.peer_fetch,
        "tier_wire": RAW if settings.tier_compress == "none" else settings.tier_compress,
    }


def kv_sizes(layers: tuple[range, ...], kv: KVLayout, draft: DraftPages | None = None) -> dict[str, Any]:
    """Returns the fields of `WorkerSizes` that follow from how KV is held; a draft's KV goes with the last layers."""
    runs = kv_runs(layers, kv)
    if draft is not None:
        runs = (*runs[:-1], range(runs[-1].start, draft.layers.stop))
    return {
        "layer_groups": tuple((run.start, run.stop) for run in runs),
        "draft_layers": draft.layout.num_layers if draft else 0,
        "kv_token_bytes": kv.bytes_per_token + (draft.layout.bytes_per_token if draft else 0),
        # Pages and dtypes may differ.
        "kv_layout": f"{kv.num_layers} layers x {kv.num_kv_heads} x {kv.parts} x {kv.head_dim}",
    }


def kv_runs(layers: tuple[range, ...], kv: KVLayout) -> tuple[range, ...]:
    """The layers that have KV in each of these runs: a head's lies behind the last."""
    return (*layers[:-1], range(layers[-1].start, kv.num_layers))
