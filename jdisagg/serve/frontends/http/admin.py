"""The routes under /admin, for who operates the server: they have a key of their own, and are not there without one."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from jdisagg.core.errors import RequestError
from jdisagg.serve.frontends.http.errors import Unauthorized, documented
from jdisagg.serve.frontends.text import dump
from jdisagg.serve.observability.cluster_view import ClusterView, SharedDocument
from jdisagg.serve.observability.records import DebugState
from jdisagg.serve.observability.tracing import LONGEST_S, Profiles, zipped

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


# The page at `/`: a few static files of the package, read once, and the headers under which they can do no harm.
#
# They hold no data and need no key: what they show they ask the API for, with the key that the reader types in.

FOLDER = Path(__file__).parent / "page"
FIRST = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no HTML out of strings (trusted types), in nobody's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked for again: a 304 where nothing changed
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    kind: str
    etag: str

    def respond(self, request: Request) -> Response:
        headers = HEADERS | {"etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.kind, headers=headers)


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, KINDS[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:24]}"')


ASSETS = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in ASSETS if name != FIRST)})


def add_page(app: FastAPI) -> None:
    """The routes of `PATHS`."""
    for path in PAGE_PATHS:
        asset = ASSETS[path.removeprefix("/page/") if path != "/" else FIRST]
        app.add_api_route(path, asset.respond, methods=["GET", "HEAD"], include_in_schema=False)


# The routes under /debug: why requests went where they went, what became of one, and how shipping is tuned.

LONGEST_PROFILE_S = 3600  # of one trace
MOST = 10_000  # decisions of one answer


def add_debug(app: FastAPI, debug_state: DebugState, cluster: ClusterView) -> None:
    records, shared = debug_state.records, SharedDocument(cluster.document)

    @app.get("/debug/cluster", responses=documented(401))
    async def whole_cluster() -> Response:
        """Workers, pages by use, links, queues, the latest requests and decisions. Counters are totals: rates are the
        differences of two documents over that of their `now_s`. One document a quarter of a second serves all."""
        return Response(await shared.get(), media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/debug/decisions", responses=documented(400, 401))
    async def decisions(n: str = "100") -> dict[str, Any]:
        """The last `n` decisions, latest first: who was weighed, at what cost, who was taken, and why."""
        if not (n.isdecimal() and len(n) <= 6 and 1 <= int(n) <= MOST):
            raise RequestError(f"n is {n[:20]!r}, must be a number from 1 to {MOST}", param="n")
        return {"decisions": records.decisions(int(n))}

    @app.get("/debug/requests", responses=documented(401))
    async def requests() -> dict[str, Any]:
        """The requests that are remembered, latest first."""
        return {"requests": records.requests()}

    @app.get("/debug/requests/{name:path}", responses=documented(401, 404))
    async def request(name: str) -> dict[str, Any]:
        """The trace of one request, by its id in answers and in x-request-id; each choice is a request of its own."""
        lives = records.request(name, cluster.now_s())
        if not lives:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"no request {name[:128]!r} is remembered")
        return {"requests": lives}

    @app.get("/debug/trace", responses=documented(400, 401))
    async def trace(seconds: str = "5") -> Response:
        """The last `seconds` as a trace for Perfetto: a process a worker, rows for steps, chunks, KV and requests."""
        if not (seconds.isdecimal() and len(seconds) <= 4 and 1 <= int(seconds) <= LONGEST_PROFILE_S):
            raise RequestError(
                f"seconds is {seconds[:20]!r}, must be a number from 1 to {LONGEST_PROFILE_S}", param="seconds"
            )
        now_s = cluster.now_s()
        body = await asyncio.to_thread(lambda: dump(records.window(now_s - int(seconds), now_s)).encode())
        return Response(body, media_type="application/json")

    @app.get("/debug/transfer", responses=documented(401))
    async def transfer() -> dict[str, Any]:
        """What --transfer=auto and --transfer_compress=auto have measured, by prefill worker."""
        return {"workers": debug_state.transfer_stats()}
