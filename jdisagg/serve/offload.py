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
SLICE = 64  # tokens whose names or logprobs are looked up at once: some milliseconds
LEAVES = 2048  # values written as JSON at once

T = TypeVar("T")
_reading = ThreadPoolExecutor(1, "reading")
_tokenizing = ThreadPoolExecutor(2, "tokenizing")
_compiling = ThreadPoolExecutor(1, "compiling")  # who waits for a grammar waits for other grammars alone


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


async def compiling(work: Callable[[], T]) -> T:
    """What `work` gives, which may take long however short it is, and lets other threads run."""
    return await asyncio.get_running_loop().run_in_executor(_compiling, work)


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def event(text: str) -> bytes:
    """One server-sent event."""
    return b"data: " + text.encode() + b"\n\n"


async def dump_slowly(value: Any) -> str:
    """`dump`, about a millisecond's worth at a time, with a look at the event loop after each."""
    if isinstance(value, dict):
        fields = [f"{dump(str(key))}:{await dump_slowly(each)}" for key, each in value.items()]
        return "{" + ",".join(fields) + "}"
    if not isinstance(value, list):
        return dump(value)
    parts, light, leaves = list[str](), [], 0
    for each in value:
        found = _leaves(each)
        if leaves + found > LEAVES:
            parts += [dump(light)[1:-1]] if light else []
            light, leaves = [], 0
            await asyncio.sleep(0)
        if found > LEAVES:
            parts.append(await dump_slowly(each))
        else:
            light.append(each)
            leaves += found
    parts += [dump(light)[1:-1]] if light else []
    return "[" + ",".join(parts) + "]"


def _leaves(value: Any) -> int:
    """Values in it; counted no further than LEAVES."""
    found, stack = 0, [value]
    while stack and found <= LEAVES:
        each = stack.pop()
        found += 1
        if isinstance(each, list | dict):
            stack.extend(each.values() if isinstance(each, dict) else each)
    return found
