"""The HTTP and gRPC servers of a service: bound early, so that a port in use is found before a model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import grpc.aio
import uvicorn
from fastapi import FastAPI

import jdisagg
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.kv.transport.listener import split_address
from jdisagg.policy.client_limits import Rates
from jdisagg.serve.deploy import memory
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.frontends.adapters import adapters_of
from jdisagg.serve.frontends.clients import ADMIN, Clients, read_keys
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grammars import why_no_grammars
from jdisagg.serve.frontends.grpc.server import create_grpc_server
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.frontends.http.connections import CloseReason, Connection, ConnectionLimiter, Limits
from jdisagg.serve.frontends.tools.asked import parsers_of
from jdisagg.serve.observability import health
from jdisagg.serve.observability.tracing import Profiles, own_profile

LOCAL_NAMES = ("", "localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
BACKLOG = 512  # of the kernel; all may be accepted before the first connection over the limit is refused
DESCRIPTORS = Path("/proc/self/fd")
GRACE_S = 2  # after draining, for complete answers that clients have not read yet


@dataclass(frozen=True, slots=True)
class Sockets:
    """The servers' sockets, bound and not listening yet; None for a server that is off."""

    http: socket.socket | None = None
    grpc_port: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.http is not None:
            self.http.close()


def bind(settings: Settings) -> Sockets:
    """Binds the sockets. Raises ConfigError with the flag, the address and the system's reason."""
    http = _bound(settings.host, settings.http_port, "http_port") if settings.http_port >= 0 else None
    if settings.grpc_port < 0:
        return Sockets(http, None)
    try:
        with _bound(
            settings.host, settings.grpc_port, "grpc_port"
        ) as probe:  # gRPC binds by itself: only check the port
            return Sockets(http, probe.getsockname()[1])
    except ConfigError:
        Sockets(http).__exit__()
        raise


def check_cluster_ports(settings: Settings, has_router: bool, has_workers: bool) -> None:
    """Checks that the router's control port and the workers' KV address can be used. Raises ConfigError as `bind`."""
    if has_router:
        _bound(settings.host, settings.control_port, "control_port").close()
    if has_workers:
        check_kv_address(settings)
        _bound(*split_address(settings.kv_listen), "kv_listen").close()
        if settings.health_port >= 0:
            _bound(settings.host, settings.health_port, "health_port").close()


def check_kv_address(settings: Settings) -> None:
    """Raises ConfigError if a router is on another host and the workers' KV address is reachable from this one only.

    A router whose name does not resolve yet counts as local. Peers resolve a name given as `kv_advertise`, so it may
    be this host's own name, which resolves to a loopback address here.
    """
    remote = remote_router(settings)
    if not remote:
        return
    listens, advertised = split_address(settings.kv_listen)[0], settings.kv_advertise
    is_bound_here = any(each.is_loopback for each in addresses_of(listens))
    if not is_bound_here and not is_local_name(advertised or listens):
        return
    flag, given = (
        ("kv_advertise", advertised) if advertised and not is_bound_here else ("kv_listen", settings.kv_listen)
    )
    raise ConfigError(
        f"--{flag}={given} cannot be reached from other hosts, and {remote} is on another one; "
        "set --kv_listen=ADDRESS:0 with this host's address, or --kv_listen=0.0.0.0:0 --kv_advertise=ADDRESS"
    )


def remote_router(settings: Settings) -> str:
    """Returns the flag that names a router or a coordination service on another host; "" if none does.

    Routers of one coordination service may be anywhere, so a service on another host counts as such a router.
    """
    if settings.router:
        return f"--router={settings.router}" if is_remote(split_address(settings.router)[0]) else ""
    scheme, _, rest = settings.coordination.partition("://")
    hosts = rest.partition("/")[0].rpartition("@")[2].split(",") if rest else []
    if scheme.startswith("kubernetes") or any(is_remote(urlsplit(f"//{each}").hostname or "") for each in hosts):
        return f"--coordination={scheme}" + (f"://{','.join(hosts)}" if hosts else "")
    return ""


def is_remote(host: str) -> bool:
    """Returns True if a host resolves, and to no loopback address."""
    found = addresses_of(host)
    return bool(found) and not any(each.is_loopback or each.is_unspecified for each in found)


def is_local_name(host: str) -> bool:
    """Returns True if peers on other hosts would reach themselves by this name (localhost, loopback, unspecified)."""
    host = host.removeprefix("[").removesuffix("]")
    if host.rstrip(".").lower() in LOCAL_NAMES:
        return True
    try:
        numeric = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return any(each.is_loopback or each.is_unspecified for each in _addresses(numeric))


def addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Returns the addresses of a host name or address; none if it does not resolve."""
    try:
        return _addresses(socket.getaddrinfo(host or "::", None, type=socket.SOCK_STREAM))
    except OSError:
        return []


def _addresses(found: list[Any]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Returns the addresses of a `getaddrinfo` result; IPv4-mapped IPv6 addresses become IPv4."""
    parsed = [ipaddress.ip_address(each[4][0].partition("%")[0]) for each in found]
    return [getattr(each, "ipv4_mapped", None) or each for each in parsed]


def _bound(host: str, port: int, flag: str) -> socket.socket:
    bound = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        if bound is not None:
            bound.close()
        why = f"cannot bind {host}:{port} ({error.strerror or error})"
        raise ConfigError(f"--{flag}={port}: {why}; give this process another --{flag}") from error
    return bound


def _listen(bound: socket.socket, settings: Settings) -> None:
    """Listens on the port. Two processes may bind one port while neither listens; the second one fails here."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        address = f"{settings.host}:{settings.http_port}"
        why = f"cannot listen on {address} ({error.strerror}); give this process another --http_port"
        raise ConfigError(f"--http_port={settings.http_port}: {why}") from error


def max_connections(settings: Settings) -> int:
    """Returns the connection limit of each front end: --max_connections, or a third of the free file descriptors.

    One third is for the other front end, and one for files and the cluster's other processes. Raises ConfigError if
    that leaves no connection.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or not DESCRIPTORS.is_dir():
        return settings.max_connections
    share = (limit - len(os.listdir(DESCRIPTORS))) // 3
    if share < 1:
        raise ConfigError(f"the limit of {limit} open files (ulimit -n) leaves none for connections")
    return min(settings.max_connections, share)


class HTTPServer(uvicorn.Server):
    """A uvicorn server with connection limits and without signal handling, which is the launcher's."""

    def __init__(self, config: uvicorn.Config, limiter: ConnectionLimiter) -> None:
        super().__init__(config)
        self._limiter = limiter

    @property
    def num_connections(self) -> int:
        return len(self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Closes connections over their limits; uvicorn calls it about ten times a second."""
        self._limiter.sweep(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Running:
    """The servers that accept requests."""

    http: HTTPServer | None
    http_task: asyncio.Task[None] | None
    grpc_server: grpc.aio.Server | None
    urls: list[str]
    lag_watch: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        if self.http_task is not None:
            await self.http_task
        elif self.grpc_server is not None:
            await self.grpc_server.wait_for_termination()

    async def stop(self) -> None:
        """Closes both servers at once; requests were drained before."""
        if self.http is not None:
            self.http.should_exit = True
        if self.lag_watch is not None:
            self.lag_watch.cancel()
        if self.grpc_server is not None:
            await self.grpc_server.stop(grace=1.0)


async def start(
    service: LocalService, settings: Settings, sockets: Sockets, profiles: Callable[[float], Profiles] = own_profile
) -> Running:
    """Starts the servers and returns once both accept connections. Raises ConfigError for a port lost meanwhile.

    `profiles` takes a profile of every serving process.
    """
    front = front_settings(service, settings)
    memory.freeze_gc()
    note = service.metrics.limited if service.metrics is not None else lambda limit: None
    clients = Clients(front, service.now_s, note)
    running = Running(None, None, None, [])
    if service.metrics is not None:
        running.lag_watch = asyncio.create_task(health.watch(service.metrics.lagged))
    app = create_app(service, front, service.metrics, service.debug_state, clients, profiles)
    if sockets.http is not None:
        _listen(sockets.http, settings)
        running.http = _http_server(service, front, app, settings.log_level)
        running.http_task = asyncio.create_task(running.http.serve(sockets=[sockets.http]))
        await _until(lambda: running.http is not None and running.http.started, running.http_task)
        host, port = sockets.http.getsockname()[:2]
        others = "a page at /; /metrics, /health, /openapi.json"
        running.urls.append(f"HTTP  http://{host}:{port}/v1   (OpenAI API; {others})")
    if sockets.grpc_port is not None:
        running.grpc_server = create_grpc_server(service, front, clients)
        address = f"{settings.host}:{sockets.grpc_port}"
        try:
            running.grpc_server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"--grpc_port={settings.grpc_port}: cannot bind {address}") from error
        await running.grpc_server.start()
        running.urls.append(
            f"gRPC  {settings.host}:{sockets.grpc_port}            (jetstream_proto.Orchestrator, jdisagg.v1.Inference)"
        )
    return running


def _http_server(service: LocalService, front: FrontSettings, app: FastAPI, log_level: str) -> HTTPServer:
    limiter = ConnectionLimiter(Limits(front.max_connections, front.client_timeout_s))
    config = uvicorn.Config(
        app,
        http=partial(Connection, limiter),  # type: ignore[arg-type]  # uvicorn calls it like the class
        ws="none",
        log_level=log_level,
        log_config=None,  # log lines have the root logger's format
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,  # else a client that never reads keeps the process for ever
    )
    server = HTTPServer(config, limiter)
    if service.metrics is not None:
        limiter.note = service.metrics.watch_connections(lambda: server.num_connections, tuple(CloseReason))
    return server


async def _until(true: Callable[[], bool], task: asyncio.Task[None]) -> None:
    while not true() and not task.done():
        await asyncio.sleep(0.01)
    if task.done():
        task.result()


def offline_app(service: LocalService, settings: Settings) -> FastAPI:
    """Returns the app for requests of a batch file: without API keys, client limits or a queue timeout."""
    plain = front_settings(service, settings)
    own = replace(plain, api_key=None, api_keys={}, admin_key=None, rates=Rates(), queue_timeout_s=None)
    return create_app(service, own)


def front_settings(service: LocalService, settings: Settings) -> FrontSettings:
    """Returns the front ends' settings, with the model's sampling defaults. Raises ConfigError."""
    keys = read_keys(settings.api_keys_file) if settings.api_keys_file else {}
    return FrontSettings(
        sampling_defaults=service.sampling_defaults,
        eos_ids=service.tokenizer.eos_ids,
        version=jdisagg.__version__,
        model_fingerprint=service.fingerprint,
        api_key=settings.api_key or None,
        parsers=parsers_of(service.tokenizer, settings.tool_call_parser, settings.reasoning_parser),
        no_grammars=why_no_grammars(settings),
        embeddings=settings.embeddings,
        adapters=adapters_of(settings, service.model_config, service.model_name),
        tracing=bool(settings.otlp_endpoint),
        api_keys={name: key for name, key in keys.items() if name != ADMIN},
        admin_key=keys.get(ADMIN),
        rates=Rates.parse(settings.client_limits),
        max_body_bytes=settings.max_body_bytes,
        max_connections=max_connections(settings),
        client_timeout_s=settings.client_timeout_s,
        queue_timeout_s=settings.queue_timeout_s or None,
    )
