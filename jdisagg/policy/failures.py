"""What is done when something goes wrong: a literal table of failure kind and phase, read by the router.

Nothing hangs, for every wait has a deadline that is a kind here; and nothing ends as "length" that was cut short.
A broken, late or failed part is shipped again by its source before any of this (`decode_side.py`, `prefill_side.py`):
what reaches the router is what shipping again did not mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.request import FinishReason, Phase, WorkerId


class FailureKind(StrEnum):
    NO_ANSWER = "the decode worker did not answer the reservation in time"
    PREFILL_LATE = "the prefill worker drew no token in time"
    SHIP_LATE = "the KV did not reach the decode worker in time"
    TOKEN_LATE = "the decode worker drew no token in time"
    PREFILL_GAVE_UP = "the prefill worker gave the handoff up"
    DECODE_GAVE_UP = "the decode worker gave the handoff up"
    PREFILL_LOST = "the prefill worker was lost"
    DECODE_LOST = "the decode worker was lost"


class Recovery(StrEnum):
    IGNORE = "ignore"  # nothing of this attempt is left there, or needed from there
    REPREFILL = "re-prefill"  # as this attempt began, elsewhere where there is an elsewhere
    RESUME = "resume"  # so, with the tokens that the client got since joined to the prompt


# QUEUED here means that a reservation is out. Where a row is missing, the kind cannot come in that phase, or is
# late: it is ignored. Any other recovery becomes a failure when a request has had its retries.
TABLE: Mapping[tuple[FailureKind, Phase], Recovery] = MappingProxyType(
    {
        (FailureKind.NO_ANSWER, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.DECODE_GAVE_UP, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.DECODE_LOST, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.PREFILL_LOST, Phase.QUEUED): Recovery.REPREFILL,
        (FailureKind.PREFILL_LATE, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.PREFILL_GAVE_UP, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.DECODE_GAVE_UP, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.PREFILL_LOST, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.DECODE_LOST, Phase.PREFILLING): Recovery.REPREFILL,
        (FailureKind.SHIP_LATE, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.PREFILL_GAVE_UP, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.DECODE_GAVE_UP, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.PREFILL_LOST, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.DECODE_LOST, Phase.SHIPPING): Recovery.RESUME,
        (FailureKind.TOKEN_LATE, Phase.DECODING): Recovery.RESUME,
        (FailureKind.DECODE_GAVE_UP, Phase.DECODING): Recovery.RESUME,
        (FailureKind.DECODE_LOST, Phase.DECODING): Recovery.RESUME,
        (FailureKind.PREFILL_GAVE_UP, Phase.DECODING): Recovery.IGNORE,  # a source that missed its Ack: the KV is here
        (FailureKind.PREFILL_LOST, Phase.DECODING): Recovery.IGNORE,
    }
)


def recovery(kind: FailureKind, phase: Phase) -> Recovery:
    """What the table says; IGNORE where it says nothing."""
    return TABLE.get((kind, phase), Recovery.IGNORE)


@dataclass(frozen=True, slots=True)
class Failure:
    """FailureKind as a row meets it. `reason` is what the client hears should trying again be no use."""

    kind: FailureKind
    reason: FinishReason
    detail: str
    gone: WorkerId | None = None  # holds nothing of the attempt any more
    avoid: WorkerId | None = None  # is to be avoided by the next attempt
