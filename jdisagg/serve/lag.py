"""How late the event loop is: what somebody's request holds up shows here first, for everybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PERIOD_S = 0.01


async def watch(on_late: Callable[[float], object]) -> None:
    """Calls `on_late` for ever, every PERIOD_S, with how many seconds the loop, or the interpreter, was held up."""
    while True:
        due_s = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        on_late(max(0.0, time.monotonic() - due_s))
