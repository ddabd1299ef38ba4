"""The sizes a worker decides with: its role, its pages and slots, and the program shapes declared for it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum

from jdisagg.core.request import WorkerId


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
    turns_ahead: int = 2  # decode turns of one microbatch dispatched before the first one's tokens are read
    prefills_ahead: int = 2
    beds_ahead: int = 2  # sequences reserved for beyond num_slots: they take the next slots that come free
    reserve_tokens: int = 512  # output tokens whose pages are held before prefill; more are granted one by one
    decode_turns_per_prefill: int = 1  # colocated: turns of each busy microbatch between two prefill chunks
    ack_timeout_s: float = 30.0  # how long shipped pages wait for the destination's Ack

    @property
    def slots_per_microbatch(self) -> int:
        return self.num_slots // self.num_microbatches

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest of the ascending `buckets` that holds `size`; asserts that one does."""
    index = bisect_left(buckets, size)
    assert index < len(buckets), f"size {size} is over the largest bucket of {buckets}"
    return buckets[index]
