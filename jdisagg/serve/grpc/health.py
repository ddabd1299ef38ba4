"""`grpc.health.v1` of a service, asked afresh each time: serving while new requests are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from jdisagg.serve.service import Service

WATCH_EVERY_S = 0.2


class HealthOfService(health_pb2_grpc.HealthServicer):
    """Answers for the names it is given; "" is the server as a whole."""

    def __init__(self, service: Service, names: Collection[str]) -> None:
        self._service, self._names = service, names

    def _now(self, name: str) -> HealthCheckResponse.ServingStatus:
        if name not in self._names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        taken = self._service.ready and not self._service.draining
        return HealthCheckResponse.SERVING if taken else HealthCheckResponse.NOT_SERVING

    async def Check(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
        return HealthCheckResponse(status=self._now(request.service))

    async def Watch(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[HealthCheckResponse]:
        """The status now and after each change, until the client leaves."""
        told = None
        while True:
            now = self._now(request.service)
            if now != told:
                told = now
                yield HealthCheckResponse(status=now)
            await asyncio.sleep(WATCH_EVERY_S)
