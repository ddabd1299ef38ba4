"""What happens (`Event`) and what follows (`Effect`). Actors take the one and return the others; drivers act."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Message, TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, WorkerId
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.tiers import DropPages, InsertPages, MovePages, PagesFound, PagesMoved
from jdisagg.core.worker_config import WorkerConfig

# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Submit:
    """A client's request reaches the router; where another router had it, with what its client was given."""

    request: Request
    output: tuple[int, ...] = ()
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client no longer wants it (gone: ABORT; or a stop string was found: STOP)."""

    request_id: RequestId
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class Received:
    """A message of another actor arrives."""

    sender: WorkerId
    message: Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    key: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The driver knows that a worker is gone; what it held is gone with it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """To the router: the worker ends what it was given and is to be given nothing more; `WorkerLost` follows."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """To the router: a worker of another process can be used, and holds nothing."""

    config: WorkerConfig


@dataclass(frozen=True, slots=True)
class TermBegan:
    """To the router: it leads with this term from now on, which is higher than that of any router before it."""

    term: int


@dataclass(frozen=True, slots=True)
class RouterLost:
    """To a worker or a front: the router is gone, or took it for lost. What a worker holds is nobody's any more, but
    what it decodes it may keep for a while (`policy/keeping.py`)."""


@dataclass(frozen=True, slots=True)
class RouterFound:
    """To a worker or a front: there is a router, which knows nothing of it yet."""


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """To the router: the worker is to leave, and to become `config`, if anything. Answered by WorkerStands."""

    worker: WorkerId
    number: int  # of the asker's choice: the answers carry it
    config: WorkerConfig | None = None  # None: it is drained, and stays so
    drain_s: float = 30.0  # that what runs there may take to end; then it goes on elsewhere


@dataclass(frozen=True, slots=True)
class Reshaped:
    """To a worker: its machine is this now, and holds nothing. `why`: it could not become what it was to be."""

    config: WorkerConfig
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's results were read.

    `decode`: (slot, tokens) of each decode row, more than one where a draft was accepted; None for a slot that had
    masked itself before this step. `first`: the drawn token of every chunk marked `last`. `prompt` holds, for a request
    that asked, one entry a prompt token of this chunk that has a predecessor in it or before it; the very first
    prompt token has none.
    """

    step_id: int
    decode: tuple[tuple[int, tuple[Sampled, ...] | None], ...] = ()
    first: tuple[tuple[RequestId, Sampled], ...] = ()
    prompt: tuple[tuple[RequestId, tuple[Sampled, ...]], ...] = ()
    pooled: tuple[tuple[RequestId, tuple[int, ...]], ...] = ()  # this chunk's share, in parts of POOLED_ONE
    guessed: tuple[tuple[int, str, int], ...] = ()  # slot, by what, tokens: of each decode row that had a draft


@dataclass(frozen=True, slots=True)
class KVArrived:
    """At the destination: a part's bytes are on its devices, in no page yet. Answered by InsertKV or DropKV."""

    transfer: KVTransfer
    intact: bool = True  # the digests of what arrived are those of what was sent
    wire_s: float = 0.0  # from packed at the source to here


@dataclass(frozen=True, slots=True)
class WireCost:
    """What one page of all layers costs a machine and its link as this wire."""

    wire: str
    pack_s: float
    page_bytes: int


@dataclass(frozen=True, slots=True)
class WiresTimed:
    """To a prefill worker, before its first request: what packing costs, as measured; raw is among them."""

    costs: tuple[WireCost, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """An engine raised: over a step, or over a part of an attempt's KV, which may be shipped again."""

    step_id: int | None
    reason: str
    attempt: Attempt | None = None
    part: int | None = None


# ------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Send:
    to: WorkerId  # or ROUTER
    message: Message


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run the step; each of `ships` is a `ShipKV` that happens as soon as its layers are computed, while the next are.

    Where the step fails, those that have not left stay.
    """

    plan: StepPlan
    ships: tuple[KVTransfer, ...] = ()


@dataclass(frozen=True, slots=True)
class ShipKV:
    """Pack the source pages now (in program order) and bring them to the destination; KVArrived follows there."""

    transfer: KVTransfer


@dataclass(frozen=True, slots=True)
class InsertKV:
    """Write what arrived into the destination pages, in program order: their reservation still waits for it."""

    transfer: KVTransfer


@dataclass(frozen=True, slots=True)
class DropKV:
    """Forget what arrived: the handoff is over and its pages may be another's."""

    transfer: KVTransfer


@dataclass(frozen=True, slots=True)
class OpenGates:
    """No step waits for parts of this attempt any longer: what waited runs now, before its pages may be another's."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class SetTimer:
    """One timer a key: setting it again moves it."""

    at_s: float
    key: str


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Tokens for the client, in order, none missing and none twice."""

    delta: TokenDelta
    worker: WorkerId  # that drew the last of them

    @property
    def request_id(self) -> RequestId:
        return self.delta.attempt.request_id


@dataclass(frozen=True, slots=True)
class Finish:
    """The request's one terminal effect. `detail` is for people: what failed, which deadline."""

    request_id: RequestId
    reason: FinishReason
    ledger: Ledger
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """The house is full: nothing was taken. Not an error, a decision."""

    request_id: RequestId
    retry_after_s: float
    detail: str
    objective: bool = False  # there is room, but what it asks of its tokens would not be met


@dataclass(frozen=True, slots=True)
class Reshape:
    """The worker holds nothing: make its machine this. Reshaped follows."""

    config: WorkerConfig


@dataclass(frozen=True, slots=True)
class WorkerStands:
    """For people: where a change of a worker's role is now (`policy/role_change.py`), or why there is none."""

    worker: WorkerId
    number: int  # of ChangeRole
    standing: str
    role: str = ""  # that it has now
    refused: str = ""  # why it is not changed


Outcome = EmitTokens | Finish | Reject  # what a client is told


@dataclass(frozen=True, slots=True)
class Told:
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
