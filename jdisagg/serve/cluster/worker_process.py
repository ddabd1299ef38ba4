"""A process with workers alone, from a deployment to its link to the router."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.cluster.control_client import ControlClient
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV
from jdisagg.serve.cluster.link import channel_credentials
from jdisagg.serve.cluster.nodes import WorkerNode
from jdisagg.serve.cluster.profiles import WorkerProfiles
from jdisagg.serve.cluster.role_options import options_of
from jdisagg.serve.cluster.router_process import (
    heartbeat_of,
    locate_of,
    node_metrics,
    own_workers,
    peers_of,
    remote_kv_of,
    remote_programs,
    reshaper_of,
    roles_of,
)
from jdisagg.serve.deploy.assemble import Progress, load_executors, warm
from jdisagg.serve.deploy.compression_costs import post_compression_costs
from jdisagg.serve.deploy.deployment import Deployment, WorkerShapes
from jdisagg.serve.driver.driver import LiveDriver
from jdisagg.serve.driver.tier_stores import open_stores, post_found
from jdisagg.serve.observability.worker_metrics import PUSH_INTERVAL_S

# Whether a process with workers alone is well, for who supervises it: GET /live and /ready by HTTP, and nothing
# more.
#
# A thread of its own answers, so that a busy driver is not taken for a dead one.

CLIENT_S = 5.0  # that one who asks may take


class HealthServer:
    """Listens from its making on, and answers from `start` to `stop`; `answers` has a truth for each path."""

    def __init__(self, host: str, port: int, answers: Mapping[str, Callable[[], bool]]) -> None:
        """Raises ConfigError where the port cannot be had."""
        try:
            self._server = ThreadingHTTPServer((host, port), _answerer(answers))
        except OSError as error:
            why = f"cannot listen on {host}:{port} ({error.strerror or error})"
            raise ConfigError(f"--health_port={port}: {why}; give this process another --health_port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=CLIENT_S)
        self._server.server_close()


def _answerer(answers: Mapping[str, Callable[[], bool]]) -> type[BaseHTTPRequestHandler]:
    class Answerer(BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            asked = answers.get(self.path.partition("?")[0])
            well = asked is not None and asked()
            body = json.dumps({"status": "ok" if well else "unavailable" if asked else "not found"}).encode()
            self.send_response(200 if well else 503 if asked else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Probes come every few seconds: nothing is written."""

    return Answerer


SETTLED_S = 0.5  # with nothing left, before a process leaves


class WorkerProcess:
    """Workers alone, and their link to the router."""

    def __init__(self, node: WorkerNode, client: ControlClient, health: HealthServer | None = None) -> None:
        """health: answers probes from `start` to `stop`."""
        self.node, self._client, self._health = node, client, health
        self._stopped = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="status", daemon=True)

    def start(self) -> None:
        self.node.driver.start()
        self._client.start()
        self._reporter.start()
        if self._health is not None:
            self._health.start()

    def _report(self) -> None:
        while not self._stopped.wait(PUSH_INTERVAL_S):
            self.node.report_status()

    def leave(self, grace_s: float) -> bool:
        """Takes no new work and ends what it has; False where some is left after `grace_s` seconds.

        What comes within a moment was on its way when the router was told, or is the last message to it.
        """
        self.node.leave()
        end_s = time.monotonic() + grace_s
        idle_s = math.inf
        while self.node.driver.alive and time.monotonic() < end_s:
            idle_s = min(idle_s, time.monotonic()) if self.node.idle else math.inf
            if time.monotonic() >= idle_s + SETTLED_S:
                break
            time.sleep(0.02)
        return self.node.idle

    def stop(self) -> None:
        """Leaves the router first, so that it takes our sequences elsewhere at once."""
        self._stopped.set()
        if self._health is not None:
            self._health.stop()
        self._client.stop()
        self.node.driver.stop()
        self.node.close()


def build_workers(
    deployment: Deployment,
    settings: Settings,
    devices: Sequence[Any],
    progress: Progress,
    ended: Callable[[str], None],
) -> WorkerProcess:
    """`ended` is called with why this process can do no more: the router refuses it, or its driver died."""
    own = own_workers(deployment, roles_of(settings))
    channel_credentials(settings)  # a mistake costs no warm-up
    remote_kv = remote_kv_of(deployment, settings)
    machines = load_executors(deployment, settings, devices, own)
    warm(machines, progress, partial(remote_programs, deployment))
    options, peers = options_of(deployment, settings, own), peers_of(machines, remote_kv)
    return join_router(deployment, settings, machines, remote_kv, peers, ended, options)


def join_router(
    deployment: Deployment,
    settings: Settings,
    machines: MutableMapping[WorkerId, MeshExecutor],
    remote_kv: RemoteKV,
    peers: Sequence[PeerRecord],
    ended: Callable[[str], None],
    options: Mapping[WorkerId, WorkerShapes],
) -> WorkerProcess:
    """Of warm machines; `peers` and `options` are what others are told of them."""
    credentials = channel_credentials(settings)
    node = WorkerNode(remote_kv, machines, peers, ended, options)
    reshaper = reshaper_of(deployment, machines, node)
    if reshaper is not None:
        node.reshape_times = reshaper.times
    metrics = node_metrics(deployment, settings, node)
    workers = {name: Worker(machine.config) for name, machine in machines.items()}
    metrics.watch_pools(workers)
    stores = open_stores(deployment, settings, machines)
    node.driver = LiveDriver(
        None,
        workers,
        machines,
        deliver=lambda outcomes: None,
        died=lambda error: ended(f"the driver stopped: {type(error).__name__}: {error}"),
        observers=(metrics.observe, node.observe),
        remote=node,
        reshaper=reshaper,
        stores=stores,
    )
    post_found(node.driver, stores)
    post_compression_costs(node.driver, deployment, machines)
    transport, heartbeat = remote_kv.config, heartbeat_of(settings)
    client = ControlClient(
        settings.router,
        transport.secret,
        transport.identity,
        WorkerProfiles(node),
        heartbeat,
        credentials,
        retry_s=heartbeat.interval_s,
        refused=ended,
        locate=locate_of(settings),
    )
    return WorkerProcess(node, client, health_of(settings, node))


def health_of(settings: Settings, node: WorkerNode) -> HealthServer | None:
    """Alive as long as its driver is; ready while a router has it and it is not on its way out."""
    if settings.health_port < 0:
        return None
    answers = {"/live": lambda: node.driver.alive, "/ready": lambda: node.driver.alive and node.serves}
    return HealthServer(settings.host, settings.health_port, answers)
