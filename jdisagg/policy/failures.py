"""What is done when something goes wrong: one literal table of trouble and phase, which the router looks up.

Nothing hangs, for every wait has a deadline that is a trouble here; and nothing ends as "length" that was cut short.
A broken, late or failed part is shipped again by its source before any of this (`beds.py`, `prompts.py`): what reaches
the router is what shipping again did not mend.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jdisagg.core.request import FinishReason, Phase, WorkerId


class Trouble(StrEnum):
    NO_ANSWER = "the decode worker did not answer the reservation in time"
    PREFILL_LATE = "the prefill worker drew no token in time"
    SHIP_LATE = "the KV did not reach the decode worker in time"
    TOKEN_LATE = "the decode worker drew no token in time"
    PREFILL_GAVE_UP = "the prefill worker gave the handoff up"
    DECODE_GAVE_UP = "the decode worker gave the handoff up"
    PREFILL_LOST = "the prefill worker was lost"
    DECODE_LOST = "the decode worker was lost"


class Remedy(StrEnum):
    IGNORE = "ignore"  # nothing of this attempt is left there, or needed from there
    REPREFILL = "re-prefill"  # as this attempt began, elsewhere where there is an elsewhere
    RESUME = "resume"  # so, with the tokens that the client got since joined to the prompt


# QUEUED here means that a reservation is out. Where a row is missing, the trouble cannot come in that phase, or is
# late: it is ignored. Any other remedy becomes a failure when a request has had its retries.
TABLE: dict[tuple[Trouble, Phase], Remedy] = {
    (Trouble.NO_ANSWER, Phase.QUEUED): Remedy.REPREFILL,
    (Trouble.DECODE_GAVE_UP, Phase.QUEUED): Remedy.REPREFILL,
    (Trouble.DECODE_LOST, Phase.QUEUED): Remedy.REPREFILL,
    (Trouble.PREFILL_LOST, Phase.QUEUED): Remedy.REPREFILL,
    (Trouble.PREFILL_LATE, Phase.PREFILLING): Remedy.REPREFILL,
    (Trouble.PREFILL_GAVE_UP, Phase.PREFILLING): Remedy.REPREFILL,
    (Trouble.DECODE_GAVE_UP, Phase.PREFILLING): Remedy.REPREFILL,
    (Trouble.PREFILL_LOST, Phase.PREFILLING): Remedy.REPREFILL,
    (Trouble.DECODE_LOST, Phase.PREFILLING): Remedy.REPREFILL,
    (Trouble.SHIP_LATE, Phase.SHIPPING): Remedy.RESUME,
    (Trouble.PREFILL_GAVE_UP, Phase.SHIPPING): Remedy.RESUME,
    (Trouble.DECODE_GAVE_UP, Phase.SHIPPING): Remedy.RESUME,
    (Trouble.PREFILL_LOST, Phase.SHIPPING): Remedy.RESUME,
    (Trouble.DECODE_LOST, Phase.SHIPPING): Remedy.RESUME,
    (Trouble.TOKEN_LATE, Phase.DECODING): Remedy.RESUME,
    (Trouble.DECODE_GAVE_UP, Phase.DECODING): Remedy.RESUME,
    (Trouble.DECODE_LOST, Phase.DECODING): Remedy.RESUME,
    (Trouble.PREFILL_GAVE_UP, Phase.DECODING): Remedy.IGNORE,  # a source that missed its Ack: the KV is here
    (Trouble.PREFILL_LOST, Phase.DECODING): Remedy.IGNORE,
}


def remedy(trouble: Trouble, phase: Phase) -> Remedy:
    """What the table says; IGNORE where it says nothing."""
    return TABLE.get((trouble, phase), Remedy.IGNORE)


@dataclass(frozen=True, slots=True)
class Mishap:
    """Trouble as a row meets it. `reason` is what the client hears should trying again be no use."""

    trouble: Trouble
    reason: FinishReason
    detail: str
    gone: WorkerId | None = None  # holds nothing of the attempt any more
    avoid: WorkerId | None = None  # is to be avoided by the next attempt
