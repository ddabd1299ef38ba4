"""Builds the router's process and front processes, and derives what all processes of a cluster share from the flags.

Every process is started with the same --mesh, which has the shapes of prefill and decode workers, and has the roles
that --role names. A worker's name is that of the mesh with a random suffix. So a restarted process has new workers to
all others, and late messages for its former workers are dropped.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import ROUTER, TermBegan
from jdisagg.core.journal import Header
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.model_identity import SHORT_DIGITS
from jdisagg.core.request import Request, WorkerId, adapter_sizes
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.transport.choose import capability
from jdisagg.kv.transport.config import SHORTEST_SECRET, Identity, TransportConfig
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.front import RouterClient
from jdisagg.policy.router.router import Router
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.cluster.control_client import ControlClient, Locate
from jdisagg.serve.cluster.control_server import ControlServer, ServerCallbacks
from jdisagg.serve.cluster.coordination import RouterAddress, open_lease
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV
from jdisagg.serve.cluster.leadership import Leadership
from jdisagg.serve.cluster.link import Heartbeat, PeriodicTask, channel_credentials, kv_contexts, server_credentials
from jdisagg.serve.cluster.nodes import Node, record_of
from jdisagg.serve.cluster.profiles import RouterProfiles
from jdisagg.serve.cluster.role_options import options_of
from jdisagg.serve.cluster.router_node import FrontNode, RouterFronts, RouterNode
from jdisagg.serve.deploy.assemble import (
    OperationSpec,
    Progress,
    assemble,
    load_executors,
    router_config,
    shape_finder,
    warm,
    watch_experts,
)
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.deploy.private_files import read_private
from jdisagg.serve.driver.kv_moves import WorkerStores
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.role_change import MeshReshaper
from jdisagg.serve.driver.tier_stores import open_stores
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import Records, open_journal

ALL_ROLES = "all"  # one process that no other may join; to let others join, name the roles
ROUTER_ROLE = "router"
FRONT_ROLE = "front"  # serves clients through a router in another process; has no other role
ROLES = (ROUTER_ROLE, "prefill", "decode", "colocated")


def roles_of(settings: Settings) -> frozenset[str]:
    """Parses --role. Raises ConfigError."""
    if settings.role == ALL_ROLES:
        if settings.coordination:
            raise ConfigError(
                f"--coordination={settings.coordination} is for a router that others join: --role=all is one process,"
                " so name the roles of each process"
            )
        return frozenset(ROLES)
    roles = frozenset(settings.role.split(","))
    if not (roles <= set(ROLES) or roles == {FRONT_ROLE}):
        known = f"{', '.join(ROLES)}, several with commas, or all, or {FRONT_ROLE} alone"
        raise ConfigError(f"--role={settings.role}: roles are {known}")
    check_coordination(settings, roles)
    return roles


def check_coordination(settings: Settings, roles: frozenset[str]) -> None:
    """Raises ConfigError where the router cannot be found, or --router and --coordination both name it."""
    if settings.coordination and settings.router:
        given = f"--router={settings.router} and --coordination={settings.coordination}"
        raise ConfigError(f"{given} both say where the router is: give one of them")
    if ROUTER_ROLE not in roles and not (settings.router or settings.coordination):
        raise ConfigError(
            f"--role={settings.role} needs --router=HOST:PORT, the control port of the router's process, or"
            " --coordination, the service that says where it is"
        )
    if ROUTER_ROLE in roles and settings.router:
        raise ConfigError(f"--router={settings.router} is for workers and fronts: --role={settings.role} is the router")
    if settings.coordination and ROUTER_ROLE in roles:
        router_host(settings)
        if settings.control_port < 1:
            raise ConfigError(
                f"--control_port={settings.control_port} with --coordination={settings.coordination}: others find this"
                " router by its port, so choose one"
            )


def router_host(settings: Settings) -> str:
    """Returns the host at which other processes reach this router. Raises ConfigError for none."""
    host = settings.control_advertise or settings.host
    if settings.coordination and host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"--host={settings.host} is no address that others can reach: with --coordination give the router"
            " --control_advertise=HOST too"
        )
    return host


def read_secret(settings: Settings) -> bytes:
    """Reads the cluster's shared secret. Raises ConfigError."""
    if not settings.secret_file:
        raise ConfigError("processes of a cluster need --secret_file=FILE, the same 16 bytes or more in each of them")
    secret = read_private("secret_file", settings.secret_file).strip()
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(f"--secret_file={settings.secret_file} has {len(secret)} bytes, needs {SHORTEST_SECRET}")
    return secret


def identity_of(deployment: Deployment, settings: Settings) -> Identity:
    """Returns what all processes must agree on: every byte of the model and its tokenizer, and the KV's pages.

    The mesh and the wire formats count as well: a worker compiles for the others' shapes before it joins.
    """
    kv, sent = deployment.kv, deployment.prefill_kv
    layout = (
        f"{kv.num_layers}x{kv.num_kv_heads}x{kv.parts}x{kv.head_dim} in {sent.page_size} to {kv.page_size}"
        f" of {deployment.mesh}"
    )
    if settings.transfer_compress != "none":
        layout += f" as {settings.transfer_compress}"
    room = adapter_sizes(settings)
    if room:
        layout += f" with {room['max_loras']} adapters of rank {room['max_lora_rank']}"
    if deployment.head_fingerprint:
        layout += f" with the head {deployment.head_fingerprint[:SHORT_DIGITS]}"
    dtypes = f"{sent.dtype} to {kv.dtype}"
    return Identity(deployment.identity_line, layout, dtypes, weights=deployment.weight_dtype)


def own_workers(deployment: Deployment, roles: frozenset[str]) -> dict[WorkerId, WorkerConfig]:
    """Returns this process's workers by their names in the mesh, renamed with the suffix of this process."""
    suffix = secrets.token_hex(3)
    own = [config for config in deployment.workers if plays(config.role, roles)]
    return {config.worker: replace(config, worker=WorkerId(f"{config.worker}-{suffix}")) for config in own}


def plays(role: Role, roles: frozenset[str]) -> bool:
    """Returns True if a process of these roles has workers of `role`; both phases together imply colocated."""
    return role.value in roles or (role is Role.COLOCATED and {"prefill", "decode"} <= roles)


def num_devices(mesh: MeshSpec, roles: frozenset[str]) -> int:
    return len({device for place in mesh.workers() if plays(place.role, roles) for device in place.device_ids})


def remote_programs(deployment: Deployment, machine: MeshExecutor) -> list[DeclaredProgram]:
    """Returns the programs for shipments to and from workers of other processes."""
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(machine.config.role)
    peers = {tuple(deployment.shapes(place)) for place in deployment.mesh.workers() if place.role is other}
    declare = machine.table.departures if other is Role.DECODE else machine.table.arrivals
    return [each for shapes in sorted(peers, key=str) for each in declare(shapes)]


def remote_kv_of(
    deployment: Deployment, settings: Settings, kind: type[RemoteKV] = RemoteKV, rank: int = 0
) -> RemoteKV:
    """Returns the KV transport of this process, the one of `rank` in its worker's group. Raises ConfigError."""
    server, client = kv_contexts(settings)
    transport = TransportConfig(
        read_secret(settings),
        identity_of(deployment, settings),
        listen=settings.kv_listen,
        advertise=settings.kv_advertise,
        tls_server=server,
        tls_client=client,
    )
    mine = capability(jax.devices()[0].platform)
    return kind(transport, mine, settings.transport, settings.handoff_timeout_s, rank)


def peers_of(machines: Mapping[WorkerId, MeshExecutor], remote_kv: RemoteKV) -> list[PeerRecord]:
    return [record_of(machine, remote_kv.mine) for machine in machines.values()]


def reshaper_of(
    deployment: Deployment, machines: MutableMapping[WorkerId, MeshExecutor], node: Node
) -> MeshReshaper | None:
    """Returns what rebuilds this process's executors; None if one of its workers cannot change."""
    if any(each.fixed for each in node.options.values()):
        return None
    return MeshReshaper(machines, shape_finder(node.options), partial(remote_programs, deployment), node.became)


def node_metrics(deployment: Deployment, settings: Settings, node: Node) -> Metrics:
    """Returns the metrics of this process; in the router's process they get those of other processes too."""
    configs = tuple(machine.config for machine in node.machines.values())
    compat = tuple(name for name in settings.metrics_compat.split(",") if name)
    metrics = Metrics(deployment.model_name, configs, deployment.kv.bytes_per_page, node.recompiles, compat)
    if configs:
        metrics.watch_held(configs[0].worker, node.remote_kv.held_bytes)
    watch_experts(metrics, deployment, node.machines)
    node.merged = metrics.merged
    return metrics


def heartbeat_of(settings: Settings) -> Heartbeat:
    return Heartbeat(settings.peer_silence_s / 5, settings.peer_silence_s)


@dataclass(frozen=True)
class RouterProcess:
    """The router, its control server, and the service of its front ends."""

    service: LocalService
    node: RouterNode
    control_server: ControlServer
    profiles: RouterProfiles
    leadership: Leadership

    def start(self) -> None:
        self.service.start()
        self.leadership.start()
        self.control_server.start()

    def stop(self) -> None:
        self.leadership.stop()
        self.control_server.stop()
        self.service.stop()
        self.node.close()


def build_router(
    deployment: Deployment, settings: Settings, devices: Sequence[Any], progress: Progress
) -> RouterProcess:
    """Builds the router and this process's own workers, if --role names any. Raises CheckpointError, ConfigError."""
    own = own_workers(deployment, roles_of(settings))
    credentials = server_credentials(settings)
    remote_kv = remote_kv_of(deployment, settings)
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    machines = load_executors(deployment, settings, devices, own)
    node = RouterNode(remote_kv, machines, peers_of(machines, remote_kv), options_of(deployment, settings, own))
    profiles = RouterProfiles(node)
    check = partial(Request.check, vocab_size=deployment.model.vocab_size, max_model_len=deployment.max_model_len)
    fronts = RouterFronts(profiles, check, lambda: node.able)

    def begin_term(term: int) -> None:
        service.driver.post(ROUTER, TermBegan(term))

    leadership = leadership_of(settings, fronts, begin_term, lambda why: service.end(why))  # noqa: PLW0108  made below
    control_server = ControlServer(
        f"{settings.host}:{settings.control_port}",
        remote_kv.config.secret,
        remote_kv.config.identity,
        leadership,
        heartbeat_of(settings),
        credentials,
    )
    warm(machines, progress, partial(remote_programs, deployment))
    config = replace(router_config(settings), workers_return=True, adopt_s=settings.peer_silence_s)
    records = Records(settings.debug_keep)
    stores = open_stores(deployment, settings, machines)
    router = Router(config, [*own.values()], records.note)
    reshaper = reshaper_of(deployment, machines, node)
    service = assemble(
        deployment,
        settings,
        tokenizer,
        router,
        {name: Worker(machine.config) for name, machine in machines.items()},
        machines,
        operation=operation_of(deployment, settings, node, router, records, stores, reshaper),
        observers=(node.observe,),
        remote=node,
        able=lambda: node.able,
        standby_error=leadership.standby_error,
    )
    node.driver = fronts.driver = service.driver
    service.deliver_remote = fronts.deliver
    return RouterProcess(service, node, control_server, profiles, leadership)


def leadership_of(
    settings: Settings, node: ServerCallbacks, begin_term: Callable[[int], None], step_down: Callable[[str], None]
) -> Leadership:
    """Returns the router's leadership by the service that --coordination names. Raises ConfigError."""
    address = RouterAddress(router_host(settings), settings.control_port, settings.http_port, settings.grpc_port)
    lease = open_lease(settings.coordination, str(address), settings.peer_silence_s)
    ttl_s = settings.peer_silence_s if settings.coordination else math.inf
    return Leadership(node, lease, ttl_s, begin_term, step_down)


def locate_of(settings: Settings) -> Locate | None:
    """Returns the lookup of the leader for workers and fronts; None if --router names it. Raises ConfigError."""
    return open_lease(settings.coordination, "", settings.peer_silence_s).leader if settings.coordination else None


def operation_of(
    deployment: Deployment,
    settings: Settings,
    node: RouterNode,
    router: Router,
    records: Records,
    stores: Mapping[WorkerId, WorkerStores],
    reshaper: MeshReshaper | None,
) -> OperationSpec:
    """Returns what the router's service is operated with: metrics, a journal, and views of the whole cluster."""
    configs = tuple(machine.config for machine in node.machines.values())
    metrics = node_metrics(deployment, settings, node)
    header = Header(router.config, configs, deployment.identity_line)
    times = {} if reshaper is None else reshaper.times
    journal = open_journal(header, settings.record_dir, metrics.journal_dropped)
    views = node.places, lambda: node.options, node.transfer_stats, lambda: {**node.reshape_times, **times}
    return OperationSpec(metrics, journal, records, stores, reshaper, node.recompiles, *views)


# Front processes (--role=front), which serve clients and have neither the router nor a worker.

REPORT_S = 1.0


@dataclass(frozen=True)
class FrontProcess:
    """The service of a front process and its link to the router."""

    service: LocalService
    client: ControlClient
    reporter: PeriodicTask

    def start(self) -> None:
        self.service.start()
        self.client.start()
        self.reporter.start()

    def stop(self) -> None:
        self.reporter.stop()
        self.client.stop()
        self.service.stop()


def build_front(deployment: Deployment, settings: Settings) -> FrontProcess:
    """Builds a front process that has not joined yet. A router that refuses this process for good ends the service."""
    credentials, secret = channel_credentials(settings), read_secret(settings)
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    node = FrontNode(f"front-{secrets.token_hex(3)}")
    compat = tuple(name for name in settings.metrics_compat.split(",") if name)
    metrics = Metrics(deployment.model_name, compat=compat)
    router = RouterClient(settings.router_grace_s)
    service = assemble(
        deployment, settings, tokenizer, router, {}, {}, metrics=metrics, remote=node, able=lambda: node.able
    )
    node.driver = service.driver
    identity, heartbeat = identity_of(deployment, settings), heartbeat_of(settings)
    client = ControlClient(
        settings.router,
        secret,
        identity,
        node,
        heartbeat,
        credentials,
        retry_s=heartbeat.interval_s,
        refused=service.end,
        locate=locate_of(settings),
    )
    return FrontProcess(service, client, PeriodicTask(REPORT_S, node.report))
