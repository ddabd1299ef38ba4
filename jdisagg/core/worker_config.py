"""The sizes a worker decides with: its role, its pages and slots, and the program shapes declared for it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

from jdisagg.core.errors import ConfigError
from jdisagg.core.labels import NOWHERE, Labels
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # both phases on one mesh: the handoff is a no-op

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


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
    *("num_pages", "page_size", "max_model_len", "num_slots", "num_microbatches"),
    *("max_chunk_seqs", "steps_in_flight", "chunks_in_flight", "prefill_stages", "ring_stages", "joint_stages"),
    "decode_turns",
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


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker's sizes. Buckets are ascending; a plan's size is the smallest bucket that holds it."""

    worker: WorkerId
    role: Role
    num_pages: int  # pages of the pool, the null page not counted: ids run from 1 to num_pages
    page_size: int  # tokens a page
    max_model_len: int  # tokens of one sequence, prompt and output together
    num_slots: int = 8  # sequences decoded at once, over all microbatches
    num_microbatches: int = 1  # as many as pipeline stages
    prefill_buckets: tuple[int, ...] = (128, 512)  # tokens of one packed chunk; the last is the chunk size
    table_buckets: tuple[int, ...] = (8, 32, 128)  # page-table widths, pages
    max_chunk_seqs: int = 8  # sequences packed into one chunk
    steps_in_flight: int = 2  # decode steps of one microbatch dispatched before the first one's tokens are read
    chunks_in_flight: int = 2
    prefill_stages: int = 1  # of a prefill worker, each on its own devices: chunks go through them in their order
    reservations_ahead: int = 2  # sequences reserved for beyond num_slots: they take the next slots that come free
    reserve_tokens: int = 512  # output tokens whose pages are held before prefill; more are granted one by one
    decode_steps_per_chunk: int = 1  # where both are computed: steps of each busy microbatch from chunk to chunk
    mixed_steps: bool = False  # chunks and decode rows in one program; else they take turns
    short_prompt_tokens: int = 0  # the uncached end of a prompt that a decode worker computes itself, at most; 0: none
    ring_stages: int = 1  # stages of a ring, which is one program and takes all slots as one microbatch; 1: no ring
    joint_stages: int = 1  # stages, of programs of their own, that a step's microbatches go round; 1: a step holds one
    decode_turns: int = 1  # tokens of each row that a step draws at most, where nothing changes meanwhile
    draft_tokens: int = 0  # tokens beyond the next one that a decode step may draw
    forced_tokens: int = 0  # without drafts: rows of a step beside its slots', for what grammars force; 0: none
    guesses: bool = True  # of any row, guessed; else of rows with a grammar alone, where it leaves no choice
    draft_reads: int = 0  # tokens that a draft model reads between two steps, where one guesses
    draft_layers: int = 0  # of a draft model, numbered behind the model's, whose KV goes where the model's does
    draft_auto: bool = False  # only where that is thought to be faster than a token a step
    ack_timeout_s: float = 30.0  # how long shipped pages wait for the destination's Ack
    transfer: TransferMode = TransferMode.AUTO
    layer_groups: tuple[tuple[int, int], ...] = ()  # runs of layers computed one by one: the decode stages'; (): one
    prefix_caching: bool = False  # full pages are kept for their content until somebody needs the room
    stage_admission: bool = True  # a sequence may begin to decode when its first stage's layers are in, others follow
    kv_layout: str = ""  # what a page's bytes are, where workers may differ: a Commit of another is refused
    digests: Digests = Digests.FULL
    compress: Compress = Compress.NONE
    error_bound: float = 0.05  # relative, of a layer's pages: one that loses more by compression goes raw
    claim_timeout_s: float = 20.0  # that who has computed a prompt waits for pages, before it goes back to the line
    part_tries: int = 3  # times that a part is asked for again
    part_timeout_s: float = 5.0  # for a missing part, once COMMIT is here, before it is asked for again
    kv_token_bytes: int = 0  # of one token's KV, all layers; 0: not told
    labels: Labels = NOWHERE  # where it stands
    dram_pages: int = 0  # pages kept in the host's memory below HBM; 0: none
    disk_pages: int = 0  # so, on disk
    shared_pool: bool = False  # pages are put into a pool that all workers share, and fetched from it
    peer_fetch: bool = False  # pages that other workers hold are fetched from them, and lent to them
    tier_wire: str = RAW  # what pages below HBM, or from another worker, are quantised to
    max_loras: int = 0  # adapters that one step may hold; 0: none, and rows without any cost nothing
    max_lora_rank: int = 0  # of each
    embeds: bool = False  # it tells states of prompts, where asked: one program more for each chunk
    router_grace_s: float = 0.0  # that it keeps what it decodes when its router is gone; 0: not at all

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
        if self.num_slots % self.num_microbatches:
            raise ConfigError(f"{self.worker}: {self.num_slots} slots do not fill {self.num_microbatches} microbatches")
        if self.prefill_stages > 1 and self.role is not Role.PREFILL:
            raise ConfigError(f"{self.worker}: {self.prefill_stages} prefill stages of a worker that is {self.role}")
        self._check_ring()
        if self.max_loras and not self.max_lora_rank:
            raise ConfigError(f"{self.worker}: max_lora_rank is 0 beside {self.max_loras} max_loras")
        if not all(0 <= first < stop <= MOST for first, stop in self.layer_groups):
            raise ConfigError(f"{self.worker}: layer_groups is {self.layer_groups[:9]}, must be runs of layers")
        for name in ("ack_timeout_s", "claim_timeout_s", "error_bound", "part_timeout_s", "router_grace_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{self.worker}: {name} is {getattr(self, name)}, must be finite and not negative")
        self.labels.check(self.worker)

    def _check_ring(self) -> None:
        if self.takes_turns and (not self.role.decodes or self.num_microbatches > 1 or self.always_guesses):
            what = f"{self.num_microbatches} stages, {self.draft_tokens} draft_tokens and is {self.role}"
            raise ConfigError(
                f"{self.worker}: decode_turns is {self.decode_turns}, for a ring or for one stage that guesses nothing,"
                f" or only at times; it has {what}"
            )
        ahead = self.tokens_ahead
        if self.ring_stages > 1 and (self.role is not Role.DECODE or self.short_prompt_tokens or ahead):
            what = f"short_prompt_tokens {self.short_prompt_tokens} and draft_tokens or forced_tokens {ahead}"
            raise ConfigError(f"{self.worker}: a ring decodes and nothing else; it is {self.role} with {what}")
        if self.ring_stages > 1 and (self.num_slots % self.ring_stages or self.num_microbatches > 1):
            what = f"{self.num_slots} slots in {self.num_microbatches} microbatches"
            raise ConfigError(f"{self.worker}: {what} for a ring of {self.ring_stages}: whole multiples, in one")
        if self.joint_stages > 1:
            self._check_joint()

    def _check_joint(self) -> None:
        stages = f"{self.joint_stages} stages that all slots go round in a step"
        if self.role is not Role.DECODE or self.draft_tokens or self.mixed_steps or self.ring_stages > 1:
            what = f"{self.draft_tokens} draft_tokens, mixed_steps {self.mixed_steps}, ring_stages {self.ring_stages}"
            raise ConfigError(f"{self.worker}: {stages} decode and guess nothing; it is {self.role} with {what}")
        if self.num_microbatches > 1 or self.num_slots % self.joint_stages:
            what = f"{self.num_slots} slots in {self.num_microbatches} microbatches"
            raise ConfigError(f"{self.worker}: {what} for {stages}: whole multiples, in one")

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
    def takes_turns(self) -> bool:
        """Whether it has programs of several turns beside those of single steps; a ring has no others, and of several
        stages a turn is a single step."""
        return self.decode_turns > 1 and self.ring_stages == self.joint_stages == 1

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
        """Whether a step takes all slots through several stages: it waits for nothing that one of them lacks."""
        return self.ring_stages > 1 or self.joint_stages > 1

    @property
    def stage_batches(self) -> int:
        """Microbatches that go round its stages, whether a step holds one of them or all."""
        return self.num_microbatches * self.joint_stages

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
