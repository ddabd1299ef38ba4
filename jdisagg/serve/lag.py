"""How late the event loop is: what somebody's request holds up shows here first, for everybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PERIOD_S = 0.01


async def watch(told: Callable[[float], object]) -> None:
    """Tells for ever, every PERIOD_S, by how many seconds a timer was late: the loop, or the interpreter, was held."""
    while True:
        due_s = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        told(max(0.0, time.monotonic() - due_s))
