"""Work on large inputs, away from the event loop, so that streams go on meanwhile.

Reading JSON and rendering templates hold the interpreter while they work, so that they go one at a time: of several at
once each would take its turn before the event loop's. Tokenizing lets go of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

INLINE_CHARS = 4_000  # below this a task costs a millisecond or less, and a thread would cost more
SLICE = 256  # entries written as JSON at once: logprobs of a token are some kilobytes

T = TypeVar("T")
_reading = ThreadPoolExecutor(1, "reading")
_tokenizing = ThreadPoolExecutor(2, "tokenizing")


async def reading(size: int, work: Callable[[], T]) -> T:
    """What `work` gives; on the thread for JSON and templates where `size`, its characters, is large."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_reading, work)


async def tokenizing(size: int, work: Callable[[], T]) -> T:
    """As `reading`, for work that lets other threads run."""
    if size <= INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_tokenizing, work)


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


async def dump_slowly(value: Any) -> str:
    """`dump`, a slice at a time, with a look at the event loop after each."""
    if isinstance(value, dict):
        fields = [f"{dump(str(key))}:{await dump_slowly(each)}" for key, each in value.items()]
        return "{" + ",".join(fields) + "}"
    if isinstance(value, list) and len(value) > SLICE:
        slices = []
        for start in range(0, len(value), SLICE):
            slices.append(dump(value[start : start + SLICE])[1:-1])
            await asyncio.sleep(0)
        return "[" + ",".join(slices) + "]"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + ",".join([await dump_slowly(each) for each in value]) + "]"
    return dump(value)
