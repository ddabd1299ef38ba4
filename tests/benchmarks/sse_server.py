"""A completions server small enough to know by heart: counts tokens out at a fixed pace, as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SSEServer:
    """`pace_s` between tokens; `split` cuts every write in two, as a network may; `refuse` answers 429."""

    pace_s: float = 0.0
    split: bool = False
    chunked: bool = True
    refuse: bool = False
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(
            next(line for line in head.lower().split("\r\n") if line.startswith("content-length")).split(":")[1]
        )
        raw = await reader.readexactly(length)
        if head.startswith("GET"):
            await self.send_whole(writer, "200 OK", {"data": [{"id": "counter"}]})
        elif self.refuse:
            await self.send_whole(writer, "429 Too Many Requests", {"error": "full"})
        else:
            self.bodies.append(json.loads(raw))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await self.stream(writer, self.bodies[-1])
            self.running -= 1
        writer.close()

    async def send_whole(self, writer: asyncio.StreamWriter, status: str, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def stream(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        framing = "Transfer-Encoding: chunked\r\n" if self.chunked else ""
        writer.write(f"HTTP/1.1 200 OK\r\n{framing}Content-Type: text/event-stream\r\n\r\n".encode())
        for number in range(asked["max_tokens"]):
            await asyncio.sleep(self.pace_s)
            last = number == asked["max_tokens"] - 1
            choice = {"index": 0, "text": f" {number}", "finish_reason": "length" if last else None}
            if last and asked.get("ledger"):
                choice["ledger"] = {"parts_ns": {"queue": 1_000_000, "decode": 3_000_000}}
            await self.send_event(writer, json.dumps({"choices": [choice]}))
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        await self.send_event(writer, json.dumps({"choices": [], "usage": usage}))
        await self.send_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n" if self.chunked else b"")
        await writer.drain()

    async def send_event(self, writer: asyncio.StreamWriter, payload: str) -> None:
        event = f"data: {payload}\n\n".encode()
        data = f"{len(event):x}\r\n".encode() + event + b"\r\n" if self.chunked else event
        for part in (data[:20], data[20:]) if self.split else (data,):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(server: SSEServer) -> AsyncIterator[SSEServer]:
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    async with listening:
        yield server
