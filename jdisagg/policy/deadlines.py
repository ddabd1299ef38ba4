"""The router's deadlines: each row waits for one thing, until one time, with one timer."""

from __future__ import annotations

import math

from jdisagg.core.events import SetTimer
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.request_state import RequestState, Waiting


def wait(out: Outbox, row: RequestState, waiting: Waiting, deadline_s: float) -> None:
    """One timer a row, moved only to an earlier time: a later deadline is found out when it fires."""
    row.waiting, row.deadline_s = waiting, deadline_s
    if deadline_s < math.inf and (row.armed_s is None or deadline_s < row.armed_s):
        row.armed_s = deadline_s
        out.put(SetTimer(deadline_s, f"row/{row.request_id}"))


def runs_out(out: Outbox, row: RequestState, now_s: float) -> bool:
    """The row's timer fired: whether its deadline is here. Where it was put off, the timer is armed again."""
    if row.armed_s is not None and now_s < row.armed_s:
        return False  # of an earlier request with this id
    row.armed_s = None
    if now_s >= row.deadline_s:
        return True
    wait(out, row, row.waiting, row.deadline_s)
    return False
