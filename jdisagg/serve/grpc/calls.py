"""What calls of every service here share: what came with them, and clients that do not read."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

Call = grpc.aio.ServicerContext


def metadata(context: Call, name: str) -> str:
    """What the client sent under `name`; empty where it sent nothing."""
    return str(dict(context.invocation_metadata() or ()).get(name, ""))


async def write(context: Call, response: Any, timeout_s: float) -> None:
    """Ends the call where the client has not read for too long."""
    try:
        await asyncio.wait_for(context.write(response), timeout_s)
    except TimeoutError:
        await context.abort(grpc.StatusCode.CANCELLED, f"the client read nothing for {timeout_s:g} s")
