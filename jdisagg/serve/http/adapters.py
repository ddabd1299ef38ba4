"""Loading and unloading of adapters, by vLLM's routes and with the admin's key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from jdisagg.serve.adapters import Adapters
from jdisagg.serve.http.errors import documented
from jdisagg.serve.http.gate import read_body
from jdisagg.serve.http.schema import LoadAdapterBody, UnloadAdapterBody, parse, takes

LOADS = documented(400, 401, 408, 413)
UNLOADS = documented(400, 401, 404, 408, 413)


def add_adapters(app: FastAPI, check: Callable[[Request], None], adapters: Adapters, most_bytes: int) -> None:
    """`check` raises unless the request has the admin's key."""

    @app.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterBody), responses=LOADS)
    async def load(request: Request) -> PlainTextResponse:
        """Clients may ask for it by `lora_name` from now on; every process of the cluster reads `lora_path` itself."""
        check(request)
        body = parse(LoadAdapterBody, await read_body(request, most_bytes))
        await asyncio.to_thread(adapters.load, body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody), responses=UNLOADS)
    async def unload(request: Request) -> PlainTextResponse:
        """It is not there for new requests; those that run end with it."""
        check(request)
        body = parse(UnloadAdapterBody, await read_body(request, most_bytes))
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
