"""One step's work in plain numbers: what a worker decides, an engine runs and a cost model prices.

Nothing here knows an array. Every size that a program's shape depends on is a field, so that a plan names its program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jdisagg.core.request import RequestId, SamplingParams, WorkerId
from jdisagg.core.worker_config import RAW


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that penalties count."""

    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence. `pages` covers positions 0 to start + len(tokens)."""

    request_id: RequestId
    tokens: tuple[int, ...]
    start: int  # position of the first token
    pages: tuple[int, ...]
    last: bool  # the sequence's last chunk: a token is drawn after it
    sampling: SamplingParams
    history: History = History()  # filled on the last chunk where sampling.penalised
    num_output: int = 0  # output tokens among this sequence's tokens (a resumed request has some; for min_tokens)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Chunks of several sequences packed into one program call."""

    plan_id: int
    chunks: tuple[PrefillChunk, ...]
    bucket_tokens: int  # declared program size, >= all chunks' tokens
    table_pages: int  # declared table width, >= the longest chunk's pages

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot: its KV holds `position` tokens, `token` (drawn, not yet in the KV) is fed next."""

    slot: int
    request_id: RequestId
    token: int
    position: int
    pages: tuple[int, ...]  # all it holds: those of its KV and those reserved for tokens to come
    sampling: SamplingParams
    num_output: int  # tokens out so far, `token` included (for min_tokens)
    history: History = History()  # filled where sampling.penalised


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Entry `index` of a slot's page table becomes `page`."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class Gate:
    """Parts of a handoff that must be in their pages before this stage of a step may run.

    OpenGates opens it for good: its sequence goes on no further then, and what the stage makes of it counts nothing.
    """

    stage: int
    handoff: str
    epoch: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One step of one microbatch through all stages: retire, admit, grant, then one token for every active slot.

    Slots are numbered over the whole worker; microbatch m holds the slots from m * n to (m + 1) * n. A slot whose
    stop token was drawn masks itself on the device, so a step may list it as active before the host has read that.
    """

    plan_id: int
    microbatch: int
    active: tuple[int, ...]
    table_pages: int  # declared table width, >= the pages that hold the tokens of the longest active slot
    admit: tuple[Admission, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    retire: tuple[int, ...] = ()
    gates: tuple[Gate, ...] = ()  # other microbatches overtake a step that waits at one, and its own takes no other


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """One part of a request's KV, from pages of one worker to pages of another. `epoch` fences late writers.

    The two lists begin at the same token and hold the same tokens, each in pages of its own worker's size, so that one
    may be longer than the other. A destination page of 0 is not written: the destination holds its KV already.
    A handoff ships in parts 0, 1, 2, ...; COMMIT says how many. Parts of one handoff share no (page, layer), may
    arrive in any order, and hold the same tokens however often they are shipped.
    """

    handoff: str
    epoch: int
    request_id: RequestId
    source: WorkerId
    destination: WorkerId
    source_pages: tuple[int, ...]
    destination_pages: tuple[int, ...]
    num_tokens: int  # whose KV these pages hold
    part: int = 0
    layers: tuple[int, int] | None = None  # first and one past the last, numbered over the model; None: all
    attempt: int = 0  # times this part was shipped before
    wire: str = RAW  # what its numbers are to travel as; layers that lose too much by it go raw all the same


def last_layer(transfer: KVTransfer) -> float:
    """One past the last layer of a part; infinite for all layers, which only the end of a plan completes."""
    return math.inf if transfer.layers is None else transfer.layers[1]
