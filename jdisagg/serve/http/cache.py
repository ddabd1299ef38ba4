"""The route that says who holds the KV of a prompt."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from jdisagg.serve.http.errors import documented
from jdisagg.serve.http.gate import read_body
from jdisagg.serve.http.jobs import encode
from jdisagg.serve.http.schema import CacheBody, parse, takes
from jdisagg.serve.records import DebugState
from jdisagg.serve.service import Service


def add_cache(app: FastAPI, service: Service, debug_state: DebugState, most_bytes: int) -> None:
    @app.post("/debug/cache", openapi_extra=takes(CacheBody), responses=documented(400, 401, 408, 413))
    async def cache(request: Request) -> dict[str, Any]:
        """Who holds how much of a prompt's KV, in which tier, and the seconds that it would take from each source, and
        computed; of workers of other processes, as far as the router follows what they keep."""
        body = parse(CacheBody, await read_body(request, most_bytes))
        prompt = body.prompt
        tokens = (await encode(service, [prompt], True))[0] if isinstance(prompt, str) else tuple(prompt)
        held = debug_state.holders(tokens, body.cache_salt, service.now_s())
        return {"prompt_tokens": len(tokens), "workers": held}
