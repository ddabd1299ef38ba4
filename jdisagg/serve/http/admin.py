"""The routes under /admin, for who operates the server: they have a key of their own, and are not there without one."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from jdisagg.core.errors import RequestError
from jdisagg.serve.device_trace import LONGEST_S, Profiles, zipped
from jdisagg.serve.http.errors import Unauthorized, documented

PREFIX = "/admin/"
PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # vLLM's, of the same key


def admin_check(key: str) -> Callable[[Request], None]:
    """What raises Unauthorized for a request without the admin's key."""
    expected = f"Bearer {key}".encode()

    def check(request: Request) -> None:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise Unauthorized("the admin key is missing or wrong")

    return check


def add_admin(app: FastAPI, check: Callable[[Request], None], profiles: Callable[[float], Profiles]) -> None:
    """`profiles` blocks for as many seconds, and tells of every process. It may raise Busy."""

    @app.post("/admin/profile", responses=documented(400, 401, 409))
    async def profile(request: Request, seconds: str = "3") -> Response:
        """A zip of what JAX's profiler sees of every process for `seconds`, each by its name: open it with TensorBoard
        or XProf. Programs run slower meanwhile, and the trace takes some seconds more to write."""
        check(request)
        if not (seconds.isdecimal() and len(seconds) <= 3 and 1 <= int(seconds) <= LONGEST_S):
            raise RequestError(f"seconds is {seconds[:20]!r}, must be a number from 1 to {LONGEST_S}", param="seconds")
        found = await asyncio.to_thread(profiles, int(seconds))
        name = time.strftime("jdisagg-profile-%Y%m%d-%H%M%S", time.gmtime())
        body = await asyncio.to_thread(zipped, found, name)
        headers = {"content-disposition": f'attachment; filename="{name}.zip"'}
        return Response(body, media_type="application/zip", headers=headers)
