"""The routes under /debug: why requests went where they went, what became of one, and how shipping is tuned."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Response

from jdisagg.core.errors import RequestError
from jdisagg.serve.cluster_view import ClusterView, SharedDocument
from jdisagg.serve.http.errors import documented
from jdisagg.serve.offload import dump
from jdisagg.serve.records import DebugState

LONGEST_S = 3600  # of one trace
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
        if not (seconds.isdecimal() and len(seconds) <= 4 and 1 <= int(seconds) <= LONGEST_S):
            raise RequestError(f"seconds is {seconds[:20]!r}, must be a number from 1 to {LONGEST_S}", param="seconds")
        now_s = cluster.now_s()
        body = await asyncio.to_thread(lambda: dump(records.window(now_s - int(seconds), now_s)).encode())
        return Response(body, media_type="application/json")

    @app.get("/debug/transfer", responses=documented(401))
    async def transfer() -> dict[str, Any]:
        """What --transfer=auto and --transfer_compress=auto have measured, by prefill worker."""
        return {"workers": debug_state.transfer_stats()}
