"""gRPC's code of every error: that of the status which HTTP answers it with, so that both say the same of all."""

from __future__ import annotations

import grpc

from jdisagg.serve.http.errors import describe

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.INVALID_ARGUMENT,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def code_of(status: int) -> grpc.StatusCode:
    return CODES.get(status, grpc.StatusCode.INTERNAL)


def code_for(error: Exception) -> grpc.StatusCode:
    return code_of(describe(error)[0])
