"""Builds a running stack from a deployment: loads weights, warms programs, and connects actors and the driver."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jdisagg import __version__
from jdisagg.core.errors import ConfigError
from jdisagg.core.events import ROUTER
from jdisagg.core.journal import Header, Journal
from jdisagg.core.layout.kv_layout import DTYPE_BYTES
from jdisagg.core.model_config import AS_ACTIVATIONS, SCALED, ModelConfig, WeightFormat
from jdisagg.core.request import WorkerId, adapter_sizes
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor, ReshapeTarget
from jdisagg.engine.spec.draft_layers import DraftModel
from jdisagg.kv.shipping import shapes_of
from jdisagg.model.calibration import TEXT, AccuracyReport, measure_loss
from jdisagg.model.checkpoint import open_source, read_defaults, size_text
from jdisagg.model.draft_head import HeadConfig, HeadModel
from jdisagg.model.products import ProductTimes, time_products
from jdisagg.model.sources import HFSource
from jdisagg.model.sources import TensorSource as WeightSource
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.scaling import Scaling
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.compression_costs import post_compression_costs
from jdisagg.serve.deploy.deployment import AUTO, STORED, Deployment, WorkerShapes
from jdisagg.serve.deploy.deployment import shapes_of as shapes_of_place
from jdisagg.serve.deploy.pools import Place, Pools, place_of
from jdisagg.serve.driver.autoscaling import FLIP, OFF, Autoscaling
from jdisagg.serve.driver.driver import Actor, Observer
from jdisagg.serve.driver.executors import JointProgress, Progress, RemoteWorkers, side_by_side
from jdisagg.serve.driver.kv_moves import WorkerStores
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.role_change import Choice, ChoiceMemory, MeshReshaper, ReshapeTimes, choices_folder
from jdisagg.serve.driver.service import NotLeader
from jdisagg.serve.driver.tier_stores import open_stores, post_found
from jdisagg.serve.frontends.adapters import adapters_of
from jdisagg.serve.frontends.grammars import grammars_of
from jdisagg.serve.observability.cluster_view import holders_of
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import DebugState, Records, TransferStats, open_journal, transfer_stats_of

# The format of weight matrices, chosen when they are loaded; --weight_dtype=auto measures it.

LARGEST_KL = 1e-3  # the largest loss that "auto" accepts, in nats per token
GAIN = 0.85  # a coarser dtype may take at most this share of the full dtype's time; timings differ by far less
CANDIDATES = ("bfloat16", "int8")
CHUNK = 128  # tokens of the prefill chunk that is timed
CALIBRATION_TOKENS = 96


def choose_weights(
    deployment: Deployment, settings: Settings, source: WeightSource, report: Callable[[str], None], folder: Path | None
) -> WeightFormat:
    """Returns the format of the weight matrices, measured if --weight_dtype is "auto".

    `report` is called with one line about a decision. A measurement is remembered in `folder`, if there is one, so that
    the next start serves the same weights.
    """
    dtype = deployment.weight_dtype
    if dtype in SCALED and settings.weight_dtype in (AUTO, STORED):
        weights = deployment.weights
        report(f"{weights}, as the checkpoint stores them{kept_experts(deployment.model, weights, deployment.dtype)}")
        return weights
    if dtype != AUTO and dtype not in SCALED:
        return WeightFormat(dtype)
    memory = ChoiceMemory.of(deployment, folder)
    choice, when = memory.find(), "measured"
    if choice is None:
        choice = Choice(*_measured(deployment, settings, source), date.today().isoformat())
        memory.keep(choice)
    else:
        when = f"remembered from {choice.date}"
    weights = choice.weights
    report(f"{choice.why}; {when}{kept_experts(deployment.model, weights, deployment.dtype)}")
    return weights


def _measured(deployment: Deployment, settings: Settings, source: WeightSource) -> tuple[WeightFormat, str]:
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    tokens = tokenizer.encode(TEXT)[:CALIBRATION_TOKENS]

    def loss_of(dtype: str) -> AccuracyReport:
        return measure_loss(source, deployment.model, dtype, tokens)

    if deployment.weight_dtype != AUTO:
        return _described_loss(loss_of(deployment.weight_dtype))
    rows = (deployment.sizes.max_num_seqs, CHUNK)
    times = {each: time_products(deployment.model, each, rows) for each in (AS_ACTIVATIONS, *CANDIDATES)}
    return chosen(deployment.dtype, times, loss_of)


def kept_experts(model: ModelConfig, weights: WeightFormat, dtype: str) -> str:
    """Returns the end of the line about scaled weights: the experts that keep the full dtype; empty without experts."""
    if not weights.is_scaled or model.experts is None:
        return ""
    held = size_text(model.expert_params * DTYPE_BYTES[dtype])
    share = model.expert_params / model.num_params()
    return f"; experts stay {dtype}: {held}, {share:.0%} of all weights, in each worker"


def _described_loss(loss: AccuracyReport) -> tuple[WeightFormat, str]:
    full_text = f"; full stay {', '.join(sorted(loss.weights.full))}" if loss.weights.full else ""
    return loss.weights, f"{loss.weights.dtype}: {described(loss)}{full_text}"


def described(loss: AccuracyReport) -> str:
    """Returns the text for the loss of a format, used in all lines about it."""
    return f"KL {loss.kl:.2g} nats a token, {loss.agreement:.0%} of greedy tokens as the full model's"


def chosen(
    full: str, times: Mapping[str, ProductTimes], loss_of: Callable[[str], AccuracyReport]
) -> tuple[WeightFormat, str]:
    """Returns the fastest dtype that beats `full` clearly and loses little, else `full`, and the reason in one line."""
    most_s = GAIN * times[AS_ACTIVATIONS].total_s
    faster = sorted((each for each in times if times[each].total_s <= most_s), key=lambda each: times[each].total_s)
    reason = ", ".join(f"{full if dtype == AS_ACTIVATIONS else dtype} {time.text}" for dtype, time in times.items())
    for dtype in faster:
        loss = loss_of(dtype)
        reason += f"; {dtype}: {described(loss)}"
        if loss.kl < LARGEST_KL:
            return loss.weights, f"auto: {dtype} (processor time of a layer's products: {reason})"
    return WeightFormat(), f"auto: {full} (processor time of a layer's products: {reason})"


def build(
    deployment: Deployment,
    settings: Settings,
    devices: Sequence[Any],
    progress: Progress = lambda name, done, total: None,
    observers: Sequence[Observer] = (),
    told: Callable[[str], None] = lambda line: None,
) -> LocalService:
    """Loads and warms the whole stack and returns its service, not started yet.

    `told` is called with one line about what loading decided. Raises CheckpointError or ConfigError.
    """
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    adapters_of(settings, deployment.model, deployment.model_name)  # a wrong adapter fails before anything is loaded
    machines = dict[WorkerId, MeshExecutor]()
    recompiles = partial(recompiles_of, machines)
    metrics = metrics_of(deployment, settings, machines, recompiles)
    config, records = router_config(settings), Records(settings.debug_keep)
    header = Header(config, deployment.workers, deployment.identity_line)
    journal = open_journal(header, settings.record_dir, metrics.journal_dropped)
    router = Router(config, deployment.workers, records.note)
    workers = {config.worker: Worker(config) for config in deployment.workers}
    machines.update(load_executors(deployment, settings, devices, told=told))
    stores = open_stores(deployment, settings, machines)
    warm(machines, progress)  # last, so that wrong settings fail before the slow part
    able = worker_shapes(deployment, settings)
    reshaper = MeshReshaper(machines, shape_finder(able))
    places, stats = partial(places_of, machines), lambda: transfer_stats_of(workers)
    views = places, lambda: able, stats, lambda: reshaper.times
    operation = OperationSpec(metrics, journal, records, stores, reshaper, recompiles, *views)
    return assemble(
        deployment, settings, tokenizer, router, workers, machines, operation=operation, observers=observers
    )


@dataclass(frozen=True)
class OperationSpec:
    """Metrics, journal, tiers and views of all workers, for a service that has a router."""

    metrics: Metrics
    journal: Journal
    records: Records
    stores: Mapping[WorkerId, WorkerStores]
    reshaper: MeshReshaper | None
    recompiles: Callable[[], int]
    places: Callable[[], list[Place]]
    options: Callable[[], Mapping[WorkerId, WorkerShapes]]  # the roles and shapes that each worker can have
    transfer_stats: Callable[[], TransferStats]
    reshape_times: Callable[[], Mapping[WorkerId, ReshapeTimes]]


def assemble(
    deployment: Deployment,
    settings: Settings,
    tokenizer: Tokenizer,
    router: Actor,
    workers: Mapping[WorkerId, Worker],
    machines: Mapping[WorkerId, MeshExecutor],
    *,
    metrics: Metrics | None = None,
    operation: OperationSpec | None = None,
    observers: Sequence[Observer] = (),
    remote: RemoteWorkers | None = None,
    able: Callable[[], bool] | None = None,
    standby_error: Callable[[], NotLeader | None] = lambda: None,
) -> LocalService:
    """Returns the service of these actors and executors, not started yet.

    Without `operation` the service has neither tiers nor a journal, and no roles can be changed. `metrics` is for such
    a service; `operation` has its own. `remote` reaches the workers of other processes, and `able` then returns True if
    every phase has a worker. Raises ConfigError.
    """
    shared = partial(
        LocalService,
        router,
        workers,
        machines,
        model_name=deployment.model_name,
        model_config=deployment.model,
        fingerprint=deployment.identity.short,
        max_model_len=deployment.max_model_len,
        tokenizer=tokenizer,
        sampling_defaults=read_defaults(deployment.model_folder).sampling,
        remote=remote,
        able=able,
        standby_error=standby_error,
    )
    if operation is None:
        own = () if metrics is None else (metrics.observe,)
        return shared(metrics=metrics, observers=(*own, *observers))
    return _operated(shared, deployment, settings, operation, workers, router, machines, observers)


def _operated(
    make: Callable[..., LocalService],
    deployment: Deployment,
    settings: Settings,
    operation: OperationSpec,
    workers: Mapping[WorkerId, Worker],
    router: Actor,
    machines: Mapping[WorkerId, MeshExecutor],
    observers: Sequence[Observer],
) -> LocalService:
    metrics, records = operation.metrics, operation.records
    metrics.watch_pools(workers)
    scaling = autoscaling_of(settings, [each.config for each in machines.values()], operation.options, metrics)
    holders = partial(holders_of, {**workers, ROUTER: router})
    debug = DebugState(records, operation.transfer_stats, operation.places, holders)
    service = make(
        observers=(
            *(operation.journal.observe, metrics.observe, *scaling_observers(scaling)),
            *asked_observers(records, deployment, settings),
            *observers,
        ),
        metrics=metrics,
        journal=operation.journal,
        debug_state=debug if settings.debug_keep else None,
        recompiles=operation.recompiles,
        reshaper=operation.reshaper,
        pools=lambda driver: Pools(driver.post, operation.places, operation.options, operation.reshape_times, scaling),
        stores=operation.stores,
    )
    post_found(service.driver, operation.stores)
    post_compression_costs(service.driver, deployment, machines)
    return service


def metrics_of(
    deployment: Deployment, settings: Settings, machines: Mapping[WorkerId, MeshExecutor], recompiles: Callable[[], int]
) -> Metrics:
    """Returns the metrics of a stack in one process; each scrape reads counters of `machines`."""
    compat = tuple(name for name in settings.metrics_compat.split(",") if name)
    metrics = Metrics(deployment.model_name, deployment.workers, deployment.kv.bytes_per_page, recompiles, compat)
    watch_experts(metrics, deployment, machines)
    return metrics


def autoscaling_of(
    settings: Settings,
    workers: Sequence[WorkerConfig],
    able: Callable[[], Mapping[WorkerId, WorkerShapes]],
    metrics: Metrics,
) -> Autoscaling | None:
    """Returns the autoscaler of --autoscale and adds its gauges; None if it is off."""
    if settings.autoscale == OFF:
        return None
    shapes = able if settings.autoscale == FLIP else dict
    scaling = Autoscaling(Scaling(), workers, shapes, settings.drain_s)
    metrics.watch_scaling(scaling.scaler)
    return scaling


def scaling_observers(scaling: Autoscaling | None) -> tuple[Observer, ...]:
    return () if scaling is None else (scaling.scaler.observe,)


def recompiles_of(machines: Mapping[WorkerId, MeshExecutor]) -> int:
    return sum(machine.recompiles() for machine in machines.values())


def places_of(machines: Mapping[WorkerId, MeshExecutor]) -> list[Place]:
    return [place_of(machine.config, shapes_of(machine.pages)) for machine in machines.values()]


def worker_shapes(deployment: Deployment, settings: Settings) -> dict[WorkerId, WorkerShapes]:
    """Returns the shapes that each worker of the mesh can take; none beside a ring."""
    if deployment.mesh.is_ring:
        return {}
    return {
        mesh_row.worker: shapes_of_place(deployment, settings, mesh_row, mesh_row.worker)
        for mesh_row in deployment.mesh.workers()
    }


def shape_finder(able: Mapping[WorkerId, WorkerShapes]) -> Callable[[WorkerConfig], ReshapeTarget]:
    """Returns a function that finds the executor shape of a configuration."""

    def find(config: WorkerConfig) -> ReshapeTarget:
        found = next(each for each in able[config.worker].able.values() if each.config == config)
        assert isinstance(found, ReshapeTarget), f"{config.worker} is of another process"
        return found

    return find


def watch_experts(metrics: Metrics, deployment: Deployment, machines: Mapping[WorkerId, MeshExecutor]) -> None:
    """Adds expert load metrics if the model has experts; each scrape reads counters of `machines`."""
    if deployment.model.experts is not None:
        metrics.watch_experts(lambda: {worker: machine.expert_loads for worker, machine in machines.items()})


def asked_observers(records: Records, deployment: Deployment, settings: Settings) -> tuple[Observer, ...]:
    """Returns the observers of --debug_keep and --otlp_endpoint. Raises ConfigError without OpenTelemetry."""
    recording = (records.observe,) if settings.debug_keep else ()
    if not settings.otlp_endpoint:
        return recording
    try:
        otlp = import_module("jdisagg.serve.observability.otlp")
    except ImportError as error:
        raise ConfigError(
            f"--otlp_endpoint={settings.otlp_endpoint} needs {error.name}, which is not installed:"
            " pip install opentelemetry-exporter-otlp-proto-http"
        ) from error
    exporter = otlp.Exporter(settings.otlp_endpoint)
    atexit.register(exporter.close)
    return (*recording, otlp.Tracer(otlp.Source.of(deployment.model_name, __version__), exporter.put).observe)


def load_executors(
    deployment: Deployment,
    settings: Settings,
    devices: Sequence[Any],
    own: Mapping[WorkerId, WorkerConfig] | None = None,
    told: Callable[[str], None] = lambda line: None,
    kind: Callable[..., MeshExecutor] = MeshExecutor,
) -> dict[WorkerId, MeshExecutor]:
    """Loads every worker's executor on its own devices, with its own copy of the weights that it runs.

    `own` has the workers of this process by their names in the mesh; None means all. `devices` are their devices in the
    mesh's order. `told` is called with one line about the weights. `kind` makes an executor.
    Raises CheckpointError if a weight file changed since the model's identity was computed, or cannot be read.
    """
    own = {config.worker: config for config in deployment.workers} if own is None else own
    if not own:
        return {}
    assert deployment.identity  # every byte is read before the weights are loaded
    ids = sorted({device for name in own for device in deployment.place(name).device_ids})
    device_by_id = dict(zip(ids, devices, strict=False))
    source = open_source(deployment.model_folder, settings.load_format, deployment.model, settings.seed)
    weights = choose_weights(deployment, settings, source, told, choices_folder())
    grammars = grammars_of(settings, deployment.model_folder, deployment.model.vocab_size)

    draft = draft_of(deployment, settings, source)

    def load(name: WorkerId, config: WorkerConfig) -> MeshExecutor:
        mesh_row = deployment.place(name)
        own_devices = [device_by_id[device] for device in mesh_row.device_ids]
        contents = deployment.model, source, deployment.layout(config.role), deployment.layers_of(mesh_row)
        dtype = jnp.dtype(deployment.dtype_of(config.role))
        return kind(config, *contents, own_devices, dtype, weights, grammars, draft=draft)

    machines = side_by_side([partial(load, *each) for each in own.items()])
    deployment.files.check_unchanged()
    return {machine.config.worker: machine for machine in machines}


def draft_of(deployment: Deployment, settings: Settings, source: WeightSource) -> DraftModel | HeadModel | None:
    """Returns the draft model or head; `source` has the model's weights. Raises CheckpointError."""
    if deployment.draft is None:
        return None
    folder, config = deployment.draft
    if isinstance(config, HeadConfig):
        return HeadModel(HFSource(folder), config, source)
    opened, pages = open_source(folder, settings.load_format, config, settings.seed), deployment.draft_pages
    return DraftModel(opened, config) if pages is None else DraftModel(opened, config, pages.name)


def warm(
    machines: Mapping[WorkerId, MeshExecutor],
    progress: Progress,
    remote_programs: Callable[[MeshExecutor], Sequence[DeclaredProgram]] = lambda machine: (),
) -> None:
    """Compiles every declared program of every worker, with shipments between all pairs and `remote_programs`."""
    decoders = [machine for machine in machines.values() if machine.config.role is Role.DECODE]
    joint = JointProgress(progress)

    def warm_one(worker: WorkerId, machine: MeshExecutor) -> None:
        peers = decoders if machine.config.role is Role.PREFILL else []
        machine.warm(partial(joint.report, worker), peers, more=remote_programs(machine))

    try:
        side_by_side([partial(warm_one, *each) for each in machines.items()])
    finally:
        joint.stop()  # threads that still compile end after their program


def router_config(settings: Settings) -> RouterConfig:
    return RouterConfig(
        queue_limit=settings.queue_limit,
        queue_timeout_s=settings.queue_timeout_s,
        handoff_timeout_s=settings.handoff_timeout_s,
        prefill_timeout_s=settings.prefill_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        lease_s=settings.lease_s,
        max_retries=settings.max_retries,
        early_rejection=settings.early_rejection == "auto",
        routing=Routing(settings.routing),
        colocated_fallback=settings.colocated_fallback == "auto",
        routing_seed=settings.seed,
        max_loras=adapter_sizes(settings).get("max_loras", 0),
    )
