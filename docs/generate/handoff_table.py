"""The handoff's transition table, read from `jdisagg/policy/worker/handoff.py`."""

from __future__ import annotations

from docs.generate.markdown import table
from jdisagg.policy.worker.handoff import TABLE, HandoffRole

NAMES = {HandoffRole.SOURCE: "prefill worker", HandoffRole.DESTINATION: "decode worker"}


def text() -> str:
    rows = [(NAMES[end], f"`{state}`", f"`{signal}`", f"`{after}`") for (end, state, signal), after in TABLE.items()]
    return table(("end", "state", "on", "becomes"), rows)
