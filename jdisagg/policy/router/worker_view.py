"""The router's view of one worker: its reported free capacity, and the work sent there that has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jdisagg.core.messages import View
from jdisagg.core.request import Attempt, Request, RequestId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.request_size import predicted_pages
from jdisagg.policy.router.routing import WorkerSnapshot


class Need:
    """The capacity that a request needs, computed once for all workers that are weighed."""

    __slots__ = ("_pages", "request", "scored", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.prompt_tokens + request.sampling.max_tokens
        self.scored = request.sampling.reads_prompt
        self._pages: dict[tuple[int, int], int] = {}

    def pages(self, config: WorkerConfig) -> int:
        """Returns the pages of a reservation on this worker."""
        key = config.page_size, config.reserve_tokens
        if key not in self._pages:
            self._pages[key] = predicted_pages(self.request, config)
        return self._pages[key]


def empty_view(config: WorkerConfig) -> View:
    """Returns the view of an empty worker."""
    return View(config.num_pages, config.num_slots + config.reservations_ahead, 0, 0)


@dataclass(slots=True)
class WorkerState:
    """One live worker. Work is booked when it is sent and struck off when it ended, part by part."""

    config: WorkerConfig
    view: View = field(init=False)
    # pages of reservations asked for, not yet answered
    unanswered: dict[Attempt, int] = field(default_factory=dict[Attempt, int])
    asked_pages: int = 0  # sum of those
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

    def ask(self, attempt: Attempt, request: Request) -> None:
        self.withdraw(attempt)
        self.unanswered[attempt] = pages = predicted_pages(request, self.config)
        self.asked_pages += pages

    def withdraw(self, attempt: Attempt) -> int:
        """Nothing is asked for it any more; the pages that were."""
        pages = self.unanswered.pop(attempt, 0)
        self.asked_pages -= pages
        return pages

    def answered(self, attempt: Attempt, *, held: bool) -> None:
        """Records the answer to a reservation: held or refused."""
        pages = self.withdraw(attempt)
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
        """Returns True if the empty worker could hold the request to its end; the last token is never fed."""
        return request.prompt_tokens + request.sampling.max_tokens <= self.longest

    def has_reservation_room(self, need: Need) -> bool:
        """Returns True if the worker has room for a reservation, as far as the router knows."""
        view = self.view
        if self.full or view.free_slots <= len(self.unanswered):
            return False
        free, config = view.free_pages - self.asked_pages, self.config
        if free * config.page_size >= need.tokens:  # more than any reservation takes
            return True
        return free >= need.pages(config)

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
        need: Need,
        avoided: bool,
        ask_anyway: bool,
        cached_tokens: int = 0,
    ) -> WorkerSnapshot:
        config = self.config
        room = need.tokens <= self.longest and not self.leaving
        role = config.role
        if room and role is not Role.PREFILL:
            room = self.has_reservation_room(need) or (ask_anyway and not self.unanswered)
        short = 0 if need.scored else config.short_prompt_tokens  # a scored prompt is computed whole
        return WorkerSnapshot(config.worker, role, self.work_tokens, self.served, room, avoided, cached_tokens, short)
