"""The routes under /admin/workers: what workers there are, and changes of their roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from jdisagg.serve.http.errors import documented
from jdisagg.serve.http.gate import read_body
from jdisagg.serve.http.schema import DrainBody, RoleBody, parse, takes
from jdisagg.serve.pools import Pools

CHANGES = documented(400, 401, 404, 408, 409, 413)


def add_workers(app: FastAPI, check: Callable[[Request], None], pools: Pools, most_bytes: int) -> None:
    """`check` raises unless the request has the admin's key."""

    @app.get("/admin/workers", responses=documented(401))
    async def workers(request: Request) -> dict[str, Any]:
        """Every worker: what it is, where it stands, what else it can be, and what its last change took."""
        check(request)
        return {"workers": pools.described()}

    @app.post("/admin/workers/{worker}/drain", status_code=202, openapi_extra=takes(DrainBody), responses=CHANGES)
    async def drain(request: Request, worker: str) -> dict[str, Any]:
        """It is given nothing new; what it has after `drain_s` goes on elsewhere. /role brings it back."""
        check(request)
        body = parse(DrainBody, await read_body(request, most_bytes) or b"{}")
        return await pools.drain(worker, body.drain_s)

    @app.post("/admin/workers/{worker}/role", status_code=202, openapi_extra=takes(RoleBody), responses=CHANGES)
    async def role(request: Request, worker: str) -> dict[str, Any]:
        """It is drained, its weights are cut anew on its devices, and it joins again as this."""
        check(request)
        body = parse(RoleBody, await read_body(request, most_bytes))
        return await pools.change(worker, body.role, body.mesh, body.drain_s)
