"""Decides whether a request is accepted at all, by the workers' capacity and by its objectives.

A request that states `ttft_s` or `tpot_s` is refused if it is predicted to miss them (early rejection: Mooncake, Qin et
al. 2024). The predicted load counts, not the present one: a decode worker is judged by the sequences that will still be
there when the prompt is done. Where nothing was measured of late, no request is refused; a request without objectives
and one that another router had accepted never are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jdisagg.core.request import Phase, Request, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.router.estimates import Forecasts, crowd
from jdisagg.policy.router.request_state import RequestState
from jdisagg.policy.router.worker_view import WorkerState
from jdisagg.policy.worker.drain import phases_of

ByRole = Mapping[Role, Sequence[WorkerState]]  # every worker, in the router's order: no request may ask all of many


def missing_phase(peers: ByRole) -> str:
    """Returns the phases, "prefill" or "decode" or both, that no staying worker does; empty if there is none."""
    roles = [role for role, some in peers.items() if _has_staying(some)]
    if len(roles) == len(peers):
        return ""
    return " and ".join(phase for phase in ("prefill", "decode") if phase not in phases_of(roles))


def _has_staying(peers: Sequence[WorkerState]) -> bool:
    return any(not peer.leaving for peer in peers)


def why_rejected(peers: ByRole, waiting: int, config: RouterConfig) -> str:
    """Returns why requests are refused now; empty if they are not. If workers may join, a missing phase is awaited."""
    limit, missing = config.queue_limit, missing_phase(peers)
    if missing and not config.workers_return:
        return f"no worker is left for {missing}"
    if waiting >= limit:
        return f"{waiting} requests wait already, the limit is {limit}"
    return ""


def could_ever_serve(peers: ByRole, request: Request) -> bool:
    """Returns True if some live pair would have room when idle."""
    able = {role for role, some in peers.items() if any(peer.could_hold(request) for peer in some)}
    return Role.COLOCATED in able or {Role.PREFILL, Role.DECODE} <= able


def may_be_served(peers: ByRole, request: Request, config: RouterConfig) -> bool:
    """Returns True if the request may wait: a live pair could hold it, or a worker for a missing phase may join."""
    return could_ever_serve(peers, request) or (config.workers_return and bool(missing_phase(peers)))


def why_never(peers: Collection[WorkerState], request: Request) -> str:
    """The request's size, and what each worker holds at the most."""
    tokens = len(request.prompt) + request.sampling.max_tokens
    most = ", ".join(f"{peer.config.worker} {peer.most_tokens}" for peer in peers)
    return f"prompt + max_tokens = {tokens} tokens fit no pair of workers; the most that each holds: {most}"


def has_adapter_room(asked: Request, running: Iterable[Request], most: int) -> bool:
    """Returns True if the request may run beside these: a step holds `most` different adapters (0: no limit)."""
    adapter = asked.sampling.adapter
    if adapter is None or not most:
        return True
    others = {each.sampling.adapter for each in running} - {None, adapter}
    return len(others) < most


def retry_after_s(waiting: int, finish_gap_s: float) -> float:
    """Until about half of those who wait are served, at the pace of late; between a second and a minute."""
    return min(60.0, max(1.0, finish_gap_s * waiting / 2))


LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class SloMiss:
    """Why a request is refused, and when it may be asked again."""

    detail: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class TtftEstimate:
    """The soonest first token, in seconds from the request's arrival."""

    line_s: float
    queue_s: float
    prefill_s: float
    worker: WorkerId

    @property
    def whole_s(self) -> float:
        return self.line_s + self.queue_s + self.prefill_s

    def late(self, objective_s: float) -> SloMiss:
        parts = f"line {self.line_s:.3g} + queue {self.queue_s:.3g} + prefill {self.prefill_s:.3g}, on {self.worker}"
        detail = f"its first token is predicted in {self.whole_s:.3g} s ({parts}), asked for within {objective_s:.3g}"
        return SloMiss(detail, _retry_s(self.whole_s - objective_s))


@dataclass(frozen=True, slots=True)
class TpotMiss:
    """A decode worker that will be too crowded: seconds a token, and seconds until it is not any more."""

    worker: WorkerId
    step_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    """`peers` and `rows` are the router's own, looked at for each request that has objectives."""

    peers: Mapping[WorkerId, WorkerState]
    rows: Mapping[RequestId, RequestState]
    forecasts: Forecasts

    def late(
        self, request: Request, cached: Callable[[WorkerConfig], int], line_s: float, now_s: float
    ) -> SloMiss | None:
        """Returns why a new request that waits `line_s` for a reservation misses its objectives; None if it may not."""
        if not request.has_objectives:
            return None
        first = self._first(request, cached, line_s, now_s)
        if first is not None and request.ttft_s is not None and first.whole_s > request.ttft_s:
            return first.late(request.ttft_s)
        if request.tpot_s is None or request.sampling.max_tokens < 2:
            return None
        begins_s = now_s + (line_s if first is None else first.whole_s)
        return self._slow(request, request.tpot_s, begins_s, now_s)

    def _first(
        self, request: Request, cached: Callable[[WorkerConfig], int], line_s: float, now_s: float
    ) -> TtftEstimate | None:
        """On the worker that is soonest done with the prompt; None where somebody's pace is not known."""
        found: list[TtftEstimate] = []
        for peer in self._able(request):
            tokens = max(1, request.prompt_tokens - cached(peer.config))
            if not peer.config.role.prefills and tokens > peer.config.short_prompt_tokens:
                continue
            token_s = self.forecasts.drain.of(peer.config.worker, now_s)
            if token_s is None:
                return None
            ahead = peer.prompt_tokens
            run = in_whole_steps(ahead + tokens, peer.config.prefill_buckets[-1]) - ahead if ahead else tokens
            found.append(TtftEstimate(line_s, ahead * token_s, run * token_s, peer.config.worker))
        return min(found, key=lambda each: each.whole_s, default=None)

    def _slow(self, request: Request, objective_s: float, begins_s: float, now_s: float) -> SloMiss | None:
        """Returns the miss if no worker will decode as fast as asked; None if one will or may."""
        decoders = [peer for peer in self._able(request) if peer.config.role.decodes]
        found = [self._slow_on(peer, objective_s, begins_s, now_s) for peer in decoders]
        slow = [each for each in found if each is not None]
        if len(slow) < len(found) or not slow:
            return None
        best = min(slow, key=lambda each: each.step_s)
        detail = f"a token is predicted every {best.step_s:.3g} s on {best.worker}, asked for every {objective_s:.3g}"
        return SloMiss(detail, _retry_s(min(each.wait_s for each in slow)))

    def _slow_on(self, peer: WorkerState, objective_s: float, begins_s: float, now_s: float) -> TpotMiss | None:
        alone_s = self.forecasts.steps.guess(peer.config.worker, now_s)
        if alone_s is None:
            return None
        room = fitting(objective_s, alone_s, peer.config.num_slots)
        if len(peer.decode_work) < room:
            return None  # nobody needs to end first
        ends_s = sorted(self._ends_s(peer, alone_s, now_s))
        here = sum(end_s > begins_s for end_s in ends_s)
        if here < room:
            return None
        free_s = ends_s[len(ends_s) - room] if room else math.inf
        return TpotMiss(peer.config.worker, alone_s * crowd(here + 1, peer.config.num_slots), free_s - begins_s)

    def _ends_s(self, peer: WorkerState, alone_s: float, now_s: float) -> list[float]:
        """When each sequence that is there, or will be, is predicted to have drawn its last token."""
        gap_s = alone_s * crowd(len(peer.decode_work), peer.config.num_slots)
        return [now_s + gap_s * self._left(self.rows[name], now_s) for name in peer.decode_work if name in self.rows]

    def _left(self, row: RequestState, now_s: float) -> float:
        """Tokens that a row is expected to draw still; one that has drawn more than is usual ends any moment."""
        if row.phase in (Phase.QUEUED, Phase.PREFILLING):
            return math.inf
        expected = self.forecasts.pace.expected_tokens(row.request.sampling.max_tokens, now_s)
        return max(1.0, expected - len(row.output))

    def _able(self, request: Request) -> list[WorkerState]:
        return [peer for peer in self.peers.values() if not peer.leaving and peer.could_hold(request)]


def fitting(objective_s: float, alone_s: float, slots: int) -> int:
    """Sequences beside which one more still draws a token every `objective_s`, on a worker whose step is twice as long
    with every slot taken as with one."""
    return max(0, min(slots, math.floor(slots * (objective_s / alone_s - 1))))


def in_whole_steps(tokens: float, bucket: int) -> float:
    """Prompt tokens until one behind others is done: it is told so with the others of its step."""
    return math.ceil(tokens / bucket) * bucket


def _retry_s(wait_s: float) -> float:
    return min(LONGEST_RETRY_S, max(1.0, wait_s))
