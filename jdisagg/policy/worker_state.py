"""What the router knows of one worker: its word of what is free, and the work sent there that has not ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jdisagg.core.messages import View
from jdisagg.core.request import Attempt, Request, RequestId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.choice import WorkerSnapshot
from jdisagg.policy.planning import predicted_pages

MayPromise = Callable[["WorkerState"], bool]


def empty_view(config: WorkerConfig) -> View:
    """Of a worker that holds nothing."""
    return View(config.num_pages, config.num_slots + config.reservations_ahead, 0, 0)


@dataclass(slots=True)
class WorkerState:
    """One live worker. Work is booked when it is sent and struck off when it ended, part by part."""

    config: WorkerConfig
    view: View = field(init=False)
    # pages of reservations asked for, not yet answered
    unanswered: dict[Attempt, int] = field(default_factory=dict[Attempt, int])
    full: bool = False  # it refused since its last word
    leaving: bool = False  # it ends what it has, and is sent nothing more
    served: int = 0
    prefill_work: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    decode_work: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    work_tokens: float = 0.0  # sum of both
    prompt_tokens: float = 0.0  # sum of the first
    longest: int = field(init=False)  # prompt and output of the longest request that the empty worker could hold

    def __post_init__(self) -> None:
        self.view = empty_view(self.config)
        self.longest = min(self.config.num_pages * self.config.page_size + 1, self.config.max_model_len)

    # ------------------------------------------------------------ reservations

    def ask(self, attempt: Attempt, request: Request, *, ahead: bool = False) -> None:
        self.unanswered[attempt] = 0 if ahead else predicted_pages(request, self.config)

    def answered(self, attempt: Attempt, *, held: bool, ahead: bool = False) -> None:
        """It is held, or promised (`ahead`), or not."""
        pages = self.unanswered.pop(attempt, 0)
        if ahead:
            return
        if held:
            free_slots, free_pages = self.view.free_slots - 1, self.view.free_pages - pages
            self.view = replace(self.view, free_pages=free_pages, free_slots=free_slots)
        else:
            self.full = True

    def hear(self, view: View) -> None:
        self.view, self.full = view, False

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence that the empty worker holds."""
        return min(self.config.num_pages * self.config.page_size, self.config.max_model_len)

    def could_hold(self, request: Request) -> bool:
        """Whether the empty worker would do: the request fits to the very end, whose last token is never fed."""
        return request.prompt_tokens + request.sampling.max_tokens <= self.longest

    def has_reservation_room(self, request: Request) -> bool:
        """Whether a reservation is free, as far as is known."""
        if self.full or self.view.free_slots <= len(self.unanswered):
            return False
        return self.view.free_pages - sum(self.unanswered.values()) >= predicted_pages(request, self.config)

    # ------------------------------------------------------------ work

    def book(self, request_id: RequestId, prefill_tokens: float, decode_tokens: float) -> None:
        """Work that is sent there; a second booking of the same request adds the other part."""
        if prefill_tokens:
            self.prefill_work[request_id] = prefill_tokens
            self.prompt_tokens += prefill_tokens
        if decode_tokens:
            self.decode_work[request_id] = decode_tokens
        self.served += 1
        self.work_tokens += prefill_tokens + decode_tokens

    def prefilled(self, request_id: RequestId) -> None:
        tokens = self.prefill_work.pop(request_id, 0.0)
        self.work_tokens -= tokens
        self.prompt_tokens -= tokens

    def release(self, request_id: RequestId) -> None:
        self.prefilled(request_id)
        self.work_tokens -= self.decode_work.pop(request_id, 0.0)

    def snapshot(
        self,
        request: Request,
        *,
        avoided: bool,
        ask_anyway: bool,
        cached_tokens: int = 0,
        may_promise: MayPromise | None = None,
    ) -> WorkerSnapshot:
        """may_promise: whether a place will do, where the request takes its pages later."""
        room = now = self.could_hold(request) and not self.leaving
        role = self.config.role
        if room and role is not Role.PREFILL:
            room = now = self.has_reservation_room(request) or (ask_anyway and not self.unanswered)
            if may_promise is not None and role is Role.DECODE:
                room = may_promise(self)
        scored = request.sampling.prompt_logprobs is not None  # then all of it is computed, where there is room for it
        short = 0 if scored else self.config.short_prompt_tokens
        return WorkerSnapshot(
            self.config.worker, role, self.work_tokens, self.served, room, avoided, cached_tokens, short, now
        )
