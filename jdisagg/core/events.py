"""What happens (`Event`) and what follows (`Effect`). Actors take the one and return the others; drivers act."""

from __future__ import annotations

from jdisagg.core.codec import Number, TaggedStruct, Whole
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Message, TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, WorkerId
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.tiers import DropPages, InsertPages, MovePages, PagesFound, PagesMoved
from jdisagg.core.worker_config import WorkerConfig

# ------------------------------------------------------------------ events


class Submit(TaggedStruct, frozen=True):
    """A client's request reaches the router; where another router had it, with what its client was given."""

    request: Request
    output: tuple[Whole, ...] = ()
    resumed: bool = False


class Cancel(TaggedStruct, frozen=True):
    """The client no longer wants it (gone: ABORT; or a stop string was found: STOP)."""

    request_id: RequestId
    reason: FinishReason = FinishReason.ABORT


class Received(TaggedStruct, frozen=True):
    """A message of another actor arrives."""

    sender: WorkerId
    message: Message


class TimerFired(TaggedStruct, frozen=True):
    key: str


class WorkerLost(TaggedStruct, frozen=True):
    """The driver knows that a worker is gone; what it held is gone with it."""

    worker: WorkerId


class WorkerLeaving(TaggedStruct, frozen=True):
    """To the router: the worker ends what it was given and is to be given nothing more; `WorkerLost` follows."""

    worker: WorkerId


class WorkerJoined(TaggedStruct, frozen=True):
    """To the router: a worker of another process can be used, and holds nothing."""

    config: WorkerConfig


class TermBegan(TaggedStruct, frozen=True):
    """To the router: it leads with this term from now on, which is higher than that of any router before it."""

    term: Whole


class RouterLost(TaggedStruct, frozen=True):
    """To a worker or a front: the router is gone, or took it for lost. What a worker holds is nobody's any more, but
    what it decodes it may keep for a while (`policy/worker/orphans.py`)."""


class RouterFound(TaggedStruct, frozen=True):
    """To a worker or a front: there is a router, which knows nothing of it yet."""


class ChangeRole(TaggedStruct, frozen=True):
    """To the router: the worker is to leave, and to become `config`, if anything. Answered by WorkerStands."""

    worker: WorkerId
    number: Whole  # of the asker's choice: the answers carry it
    config: WorkerConfig | None = None  # None: it is drained, and stays so
    drain_s: Number = 30.0  # that what runs there may take to end; then it goes on elsewhere


class Reshaped(TaggedStruct, frozen=True):
    """To a worker: its machine is this now, and holds nothing. `why`: it could not become what it was to be."""

    config: WorkerConfig
    why: str = ""


class StepDone(TaggedStruct, frozen=True):
    """A step's results were read.

    `decode`: (slot, tokens) of each decode row, more than one where a draft was accepted; None for a slot that had
    masked itself before this step. `first`: the drawn token of every chunk marked `last`. `prompt` holds, for a request
    that asked, one entry a prompt token of this chunk that has a predecessor in it or before it; the very first
    prompt token has none.
    """

    step_id: Whole
    decode: tuple[tuple[Whole, tuple[Sampled, ...] | None], ...] = ()
    first: tuple[tuple[RequestId, Sampled], ...] = ()
    prompt: tuple[tuple[RequestId, tuple[Sampled, ...]], ...] = ()
    pooled: tuple[tuple[RequestId, tuple[Whole, ...]], ...] = ()  # this chunk's share, in parts of POOLED_ONE
    guessed: tuple[tuple[Whole, str, Whole], ...] = ()  # slot, by what, tokens: of each decode row that had a draft


class KVArrived(TaggedStruct, frozen=True):
    """At the destination: a part's bytes are on its devices, in no page yet. Answered by InsertKV or DropKV."""

    transfer: KVTransfer
    intact: bool = True  # the digests of what arrived are those of what was sent
    wire_s: Number = 0.0  # from packed at the source to here


class WireCost(TaggedStruct, frozen=True):
    """What one page of all layers costs a machine and its link as this wire."""

    wire: str
    pack_s: Number
    page_bytes: Whole


class WiresTimed(TaggedStruct, frozen=True):
    """To a prefill worker, before its first request: what packing costs, as measured; raw is among them."""

    costs: tuple[WireCost, ...]


class EngineFailed(TaggedStruct, frozen=True):
    """An engine raised: over a step, or over a part of an attempt's KV, which may be shipped again."""

    step_id: Whole | None
    reason: str
    attempt: Attempt | None = None
    part: Whole | None = None


# ------------------------------------------------------------------ effects


class Send(TaggedStruct, frozen=True):
    to: WorkerId  # or ROUTER
    message: Message


class RunStep(TaggedStruct, frozen=True):
    """Run the step; each of `ships` is a `ShipKV` that happens as soon as its layers are computed, while the next are.

    Where the step fails, those that have not left stay.
    """

    plan: StepPlan
    ships: tuple[KVTransfer, ...] = ()


class ShipKV(TaggedStruct, frozen=True):
    """Pack the source pages now (in program order) and bring them to the destination; KVArrived follows there."""

    transfer: KVTransfer


class InsertKV(TaggedStruct, frozen=True):
    """Write what arrived into the destination pages, in program order: their reservation still waits for it."""

    transfer: KVTransfer


class DropKV(TaggedStruct, frozen=True):
    """Forget what arrived: the handoff is over and its pages may be another's."""

    transfer: KVTransfer


class OpenGates(TaggedStruct, frozen=True):
    """No step waits for parts of this attempt any longer: what waited runs now, before its pages may be another's."""

    attempt: Attempt


class SetTimer(TaggedStruct, frozen=True):
    """One timer a key: setting it again moves it."""

    at_s: Number
    key: str


class EmitTokens(TaggedStruct, frozen=True):
    """Tokens for the client, in order, none missing and none twice."""

    delta: TokenDelta
    worker: WorkerId  # that drew the last of them

    @property
    def request_id(self) -> RequestId:
        return self.delta.attempt.request_id


class Finish(TaggedStruct, frozen=True):
    """The request's one terminal effect. `detail` is for people: what failed, which deadline."""

    request_id: RequestId
    reason: FinishReason
    ledger: Ledger
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    detail: str = ""


class Reject(TaggedStruct, frozen=True):
    """The house is full: nothing was taken. Not an error, a decision."""

    request_id: RequestId
    retry_after_s: Number
    detail: str
    objective: bool = False  # there is room, but what it asks of its tokens would not be met


class Reshape(TaggedStruct, frozen=True):
    """The worker holds nothing: make its machine this. Reshaped follows."""

    config: WorkerConfig


class WorkerStands(TaggedStruct, frozen=True):
    """For people: where a change of a worker's role is now (`policy/worker/drain.py`), or why there is none."""

    worker: WorkerId
    number: Whole  # of ChangeRole
    standing: str
    role: str = ""  # that it has now
    refused: str = ""  # why it is not changed


Outcome = EmitTokens | Finish | Reject  # what a client is told


class Told(TaggedStruct, frozen=True):
    """Event of a front: outcomes of its requests that the router sent in one record, in order."""

    outcomes: tuple[Outcome, ...]


Effect = (
    Send
    | RunStep
    | ShipKV
    | InsertKV
    | DropKV
    | OpenGates
    | MovePages
    | InsertPages
    | DropPages
    | SetTimer
    | EmitTokens
    | Finish
    | Reject
    | Reshape
    | WorkerStands
)

Event = (
    Submit
    | Cancel
    | Received
    | TimerFired
    | WorkerLost
    | WorkerLeaving
    | WorkerJoined
    | TermBegan
    | RouterLost
    | RouterFound
    | Told
    | ChangeRole
    | Reshaped
    | StepDone
    | KVArrived
    | WiresTimed
    | PagesMoved
    | PagesFound
    | EngineFailed
)

ROUTER = WorkerId("router")
