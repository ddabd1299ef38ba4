"""What the router decided about a request, and why: values for the driver to keep and for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jdisagg.core.request import RequestId
from jdisagg.policy.router.routing import Candidate, Choice


class Verdict(StrEnum):
    TAKEN = "taken"  # a pair of workers, or one of both roles
    WAITS = "waits"  # no pair has room now; told once a wait
    REJECTED = "rejected"  # the house takes nobody now
    NEVER = "never"  # no pair could ever hold it


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `choice` shows the workers that were weighed, None where none were."""

    at_s: float
    request_id: RequestId
    verdict: Verdict
    choice: Choice | None = None
    detail: str = ""  # beside the choice's own reason

    @property
    def reason(self) -> str:
        """In words."""
        words = [self.choice.reason] if self.choice is not None else []
        return "; ".join([*words, self.detail] if self.detail else words)

    def to_json(self) -> dict[str, Any]:
        """Times are seconds of the driver's clock; candidates best first, at most a few of each kind."""
        taken = None if self.choice is None else self.choice.taken
        shown: dict[str, Any] = {
            "at_s": self.at_s,
            "request_id": self.request_id,
            "decision": self.verdict.value,
            "taken": None if taken is None else {"prefill": taken.prefill, "decode": taken.decode},
            "reason": self.reason,
        }
        if self.choice is not None:
            shown["routing"] = self.choice.routing.value
            kinds = {
                "prefill": self.choice.prefills,
                "decode": self.choice.decodes,
                "decode_alone": self.choice.alone,
                "colocated": self.choice.colocated,
            }
            shown["candidates"] = {kind: _shown(each) for kind, each in kinds.items() if each}
        return shown


def _shown(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [
        {
            "worker": each.worker,
            "cost": each.cost,
            "parts": dict(each.parts),
            "served": each.served,
            **({"last_resort": each.rank_name} if each.rank else {}),
        }
        for each in candidates
    ]


def unheard(decision: Decision) -> None:
    """For drivers that keep no decisions."""
