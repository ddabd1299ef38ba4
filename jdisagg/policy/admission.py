"""Whether a request is taken at all: pure functions over what the router knows of its workers."""

from __future__ import annotations

from collections.abc import Collection

from jdisagg.core.request import Request
from jdisagg.core.worker_config import Role
from jdisagg.policy.peers import Peer


def why_rejected(peers: Collection[Peer], waiting: int, limit: int) -> str:
    """Why the house takes nobody now; empty where it does."""
    roles = [peer.config.role for peer in peers if not peer.leaving]
    if not (any(role.prefills for role in roles) and any(role.decodes for role in roles)):
        return "no worker is left for one of the phases"
    if waiting >= limit:
        return f"{waiting} requests wait already, the limit is {limit}"
    return ""


def could_ever_serve(peers: Collection[Peer], request: Request) -> bool:
    """Whether some live pair would do, had it nothing else to do."""
    able = {peer.config.role for peer in peers if peer.could_hold(request)}
    return Role.COLOCATED in able or {Role.PREFILL, Role.DECODE} <= able


def why_never(peers: Collection[Peer], request: Request) -> str:
    """The request's size, and what each worker holds at the most."""
    tokens = len(request.prompt) + request.sampling.max_tokens
    most = ", ".join(f"{peer.config.worker} {peer.most_tokens}" for peer in peers)
    return f"prompt + max_tokens = {tokens} tokens fit no pair of workers; the most that each holds: {most}"


def retry_after_s(waiting: int, finish_gap_s: float) -> float:
    """Until about half of those who wait are served, at the pace of late; between a second and a minute."""
    return min(60.0, max(1.0, finish_gap_s * waiting / 2))
