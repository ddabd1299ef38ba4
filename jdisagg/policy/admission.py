"""Whether a request is taken at all: pure functions over what the router knows of its workers, role by role."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jdisagg.core.request import Request
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role
from jdisagg.policy.role_change import phases_of
from jdisagg.policy.worker_state import WorkerState

ByRole = Mapping[Role, Sequence[WorkerState]]  # every worker, in the router's order: no request may ask all of many


def missing_phase(peers: ByRole) -> str:
    """ "prefill" or "decode" where no worker that stays does it, both where there is none at all; empty else."""
    roles = [role for role, some in peers.items() if _has_staying(some)]
    if len(roles) == len(peers):
        return ""
    return " and ".join(phase for phase in ("prefill", "decode") if phase not in phases_of(roles))


def _has_staying(peers: Sequence[WorkerState]) -> bool:
    return any(not peer.leaving for peer in peers)


def why_rejected(peers: ByRole, waiting: int, config: RouterConfig) -> str:
    """Why the house takes nobody now; empty where it does. Where workers may join, a missing phase is waited for."""
    limit, missing = config.queue_limit, missing_phase(peers)
    if missing and not config.workers_return:
        return f"no worker is left for {missing}"
    if waiting >= limit:
        return f"{waiting} requests wait already, the limit is {limit}"
    return ""


def could_ever_serve(peers: ByRole, request: Request) -> bool:
    """Whether some live pair would do, had it nothing else to do."""
    able = {role for role, some in peers.items() if any(peer.could_hold(request) for peer in some)}
    return Role.COLOCATED in able or {Role.PREFILL, Role.DECODE} <= able


def may_be_served(peers: ByRole, request: Request, config: RouterConfig) -> bool:
    """Whether it is worth waiting: a live pair would do, or a phase has no worker yet and one may join."""
    return could_ever_serve(peers, request) or (config.workers_return and bool(missing_phase(peers)))


def why_never(peers: Collection[WorkerState], request: Request) -> str:
    """The request's size, and what each worker holds at the most."""
    tokens = len(request.prompt) + request.sampling.max_tokens
    most = ", ".join(f"{peer.config.worker} {peer.most_tokens}" for peer in peers)
    return f"prompt + max_tokens = {tokens} tokens fit no pair of workers; the most that each holds: {most}"


def has_adapter_room(asked: Request, running: Iterable[Request], most: int) -> bool:
    """Whether it may run beside these: one step holds `most` different adapters. 0: as many as there are."""
    adapter = asked.sampling.adapter
    if adapter is None or not most:
        return True
    others = {each.sampling.adapter for each in running} - {None, adapter}
    return len(others) < most


def retry_after_s(waiting: int, finish_gap_s: float) -> float:
    """Until about half of those who wait are served, at the pace of late; between a second and a minute."""
    return min(60.0, max(1.0, finish_gap_s * waiting / 2))
