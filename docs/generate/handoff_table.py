"""The handoff's transition table, read from `jdisagg/policy/handoff.py`."""

from __future__ import annotations

from docs.generate.markdown import table
from jdisagg.policy.handoff import TABLE, End

NAMES = {End.SOURCE: "prefill worker", End.DESTINATION: "decode worker"}


def text() -> str:
    rows = [(NAMES[end], f"`{state}`", f"`{signal}`", f"`{after}`") for (end, state, signal), after in TABLE.items()]
    return table(("end", "state", "on", "becomes"), rows)
