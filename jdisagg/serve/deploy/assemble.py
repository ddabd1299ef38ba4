"""From a deployment to a running stack: weights loaded, programs warm, actors and driver put together."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jdisagg import __version__
from jdisagg.core.errors import ConfigError
from jdisagg.core.journal import Header
from jdisagg.core.layout.kv_layout import DTYPE_BYTES
from jdisagg.core.model_config import AS_ACTIVATIONS, SCALED, ModelConfig, WeightFormat
from jdisagg.core.request import WorkerId, adapter_sizes
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.mesh_executor import MeshExecutor, Shape
from jdisagg.engine.spec.draft_layers import DraftModel
from jdisagg.kv.shipping import shapes_of
from jdisagg.model.calibration import TEXT, Loss, measure_loss
from jdisagg.model.checkpoint import open_source, read_defaults, size_text
from jdisagg.model.draft_head import HeadConfig, HeadModel
from jdisagg.model.products import ProductTimes, time_products
from jdisagg.model.sources import HFSource
from jdisagg.model.sources import Source as WeightSource
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.router.router import Router
from jdisagg.policy.scaling import Scaling
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy.compression_costs import post_compression_costs
from jdisagg.serve.deploy.deployment import AUTO, STORED, Deployment, WorkerShapes
from jdisagg.serve.deploy.deployment import shapes_of as shapes_of_place
from jdisagg.serve.deploy.pools import Place, Pools, place_of
from jdisagg.serve.driver.autoscaling import FLIP, OFF, Autoscaling
from jdisagg.serve.driver.driver import Observer
from jdisagg.serve.driver.executors import JointProgress, Progress, side_by_side
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.driver.role_change import Choice, ChoiceMemory, MeshReshaper, choices_folder
from jdisagg.serve.driver.tier_stores import open_stores, post_found
from jdisagg.serve.frontends.adapters import adapters_of
from jdisagg.serve.frontends.grammars import grammars_of
from jdisagg.serve.observability.cluster_view import holders_of
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import DebugState, Records, open_journal, transfer_stats_of

# What the matrices of a run are to hold, decided when they are loaded: asked for, or measured where that is
# "auto".

LARGEST_KL = 1e-3  # nats a token that "auto" may lose
GAIN = 0.85  # of f32's time that a coarser dtype may take to be worth it: far beyond what timings differ by
CANDIDATES = ("bfloat16", "int8")
CHUNK = 128  # rows of a prefill chunk that is timed
CALIBRATION_TOKENS = 96


def choose_weights(
    deployment: Deployment, settings: Settings, source: WeightSource, told: Callable[[str], None], folder: Path | None
) -> WeightFormat:
    """`told` is called with one line where anything was decided, and whether it was measured now or before.

    What was measured is remembered in `folder`, where there is one: a second start is served with the same weights.
    """
    asked = deployment.weight_dtype
    if asked in SCALED and settings.weight_dtype in (AUTO, STORED):
        weights = deployment.weights
        told(f"{weights}, as the checkpoint stores them{kept_experts(deployment.model, weights, deployment.dtype)}")
        return weights
    if asked != AUTO and asked not in SCALED:
        return WeightFormat(asked)
    memory = ChoiceMemory.of(deployment, folder)
    choice, when = memory.find(), "measured"
    if choice is None:
        choice = Choice(*_measured(deployment, settings, source), date.today().isoformat())
        memory.keep(choice)
    else:
        when = f"remembered from {choice.date}"
    weights = choice.weights
    told(f"{choice.why}; {when}{kept_experts(deployment.model, weights, deployment.dtype)}")
    return weights


def _measured(deployment: Deployment, settings: Settings, source: WeightSource) -> tuple[WeightFormat, str]:
    """What is served, and why in one line."""
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    tokens = tokenizer.encode(TEXT)[:CALIBRATION_TOKENS]

    def loss_of(dtype: str) -> Loss:
        return measure_loss(source, deployment.model, dtype, tokens)

    if deployment.weight_dtype != AUTO:
        return _asked(loss_of(deployment.weight_dtype))
    rows = (deployment.sizes.max_num_seqs, CHUNK)
    times = {each: time_products(deployment.model, each, rows) for each in (AS_ACTIVATIONS, *CANDIDATES)}
    return chosen(deployment.dtype, times, loss_of)


def kept_experts(model: ModelConfig, weights: WeightFormat, dtype: str) -> str:
    """What stays full of a model with experts where its matrices are scaled, the words that end the line about them."""
    if not weights.is_scaled or model.experts is None:
        return ""
    held = size_text(model.expert_params * DTYPE_BYTES[dtype])
    share = model.expert_params / model.num_params()
    return f"; experts stay {dtype}: {held}, {share:.0%} of all weights, in each worker"


def _asked(loss: Loss) -> tuple[WeightFormat, str]:
    kept = f"; full stay {', '.join(sorted(loss.weights.full))}" if loss.weights.full else ""
    return loss.weights, f"{loss.weights.dtype}: {described(loss)}{kept}"


def described(loss: Loss) -> str:
    """What it costs, in the words of every line that says so."""
    return f"KL {loss.kl:.2g} nats a token, {loss.agreement:.0%} of greedy tokens as the full model's"


def chosen(full: str, times: Mapping[str, ProductTimes], loss_of: Callable[[str], Loss]) -> tuple[WeightFormat, str]:
    """The fastest dtype that is clearly faster than the `full` one and loses little, else that, and why in one line."""
    most_s = GAIN * times[AS_ACTIVATIONS].total_s
    faster = sorted((each for each in times if times[each].total_s <= most_s), key=lambda each: times[each].total_s)
    said = ", ".join(f"{full if dtype == AS_ACTIVATIONS else dtype} {time.text}" for dtype, time in times.items())
    for dtype in faster:
        loss = loss_of(dtype)
        said += f"; {dtype}: {described(loss)}"
        if loss.kl < LARGEST_KL:
            return loss.weights, f"auto: {dtype} (processor time of a layer's products: {said})"
    return WeightFormat(), f"auto: {full} (processor time of a layer's products: {said})"


def build(
    deployment: Deployment,
    settings: Settings,
    devices: Sequence[Any],
    progress: Progress = lambda name, done, total: None,
    observers: Sequence[Observer] = (),
    told: Callable[[str], None] = lambda line: None,
) -> LocalService:
    """Loads and warms the whole stack; the service still has to be started. `told` is called with one line, what
    loading decided. Raises CheckpointError or ConfigError."""
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    adapters_of(settings, deployment.model, deployment.model_name)  # a wrong one is told before anything is loaded
    machines = dict[WorkerId, MeshExecutor]()
    recompiles = partial(recompiles_of, machines)
    metrics = metrics_of(deployment, settings, machines, recompiles)
    config, records = router_config(settings), Records(settings.debug_keep)
    header = Header(config, deployment.workers, deployment.identity_line)
    journal = open_journal(header, settings.record_dir, metrics.journal_dropped)
    workers = {config.worker: Worker(config) for config in deployment.workers}
    machines.update(load_executors(deployment, settings, devices, told=told))
    stores = open_stores(deployment, settings, machines)
    warm(machines, progress)  # last, so that a wrong setting does not cost it
    metrics.watch_pools(workers)
    places, able = partial(places_of, machines), worker_shapes(deployment, settings)
    reshaper = MeshReshaper(machines, shape_finder(able))
    debug = DebugState(records, lambda: transfer_stats_of(workers), places, partial(holders_of, workers))
    scaling = autoscaling_of(settings, deployment.workers, lambda: able, metrics)
    asked = (*scaling_observers(scaling), *asked_observers(records, deployment, settings))
    service = LocalService(
        Router(config, deployment.workers, records.note),
        workers,
        machines,
        model_name=deployment.model_name,
        model_config=deployment.model,
        fingerprint=deployment.identity.short,
        max_model_len=deployment.max_model_len,
        tokenizer=tokenizer,
        sampling_defaults=read_defaults(deployment.model_folder).sampling,
        observers=(journal.observe, metrics.observe, *asked, *observers),
        metrics=metrics,
        journal=journal,
        debug_state=debug if settings.debug_keep else None,
        recompiles=recompiles,
        reshaper=reshaper,
        pools=lambda driver: Pools(driver.post, places, lambda: able, lambda: reshaper.times, scaling),
        stores=stores,
    )
    post_found(service.driver, stores)
    post_compression_costs(service.driver, deployment, machines)
    return service


def metrics_of(
    deployment: Deployment, settings: Settings, machines: Mapping[WorkerId, MeshExecutor], recompiles: Callable[[], int]
) -> Metrics:
    """Of a stack that has these workers; `machines` are asked at each scrape."""
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
    """What --autoscale asks for, and its gauges; None where it is off."""
    if settings.autoscale == OFF:
        return None
    shapes = able if settings.autoscale == FLIP else dict
    scaling = Autoscaling(Scaling(), workers, shapes, settings.drain_s)
    metrics.watch_scaling(scaling.scaler)
    return scaling


def scaling_observers(scaling: Autoscaling | None) -> tuple[Observer, ...]:
    """What it looks through."""
    return () if scaling is None else (scaling.scaler.observe,)


def recompiles_of(machines: Mapping[WorkerId, MeshExecutor]) -> int:
    """Programs that were compiled and not by warming."""
    return sum(machine.recompiles() for machine in machines.values())


def places_of(machines: Mapping[WorkerId, MeshExecutor]) -> list[Place]:
    """Where the workers of this process stand now."""
    return [place_of(machine.config, shapes_of(machine.pages)) for machine in machines.values()]


def worker_shapes(deployment: Deployment, settings: Settings) -> dict[WorkerId, WorkerShapes]:
    """What each worker of the mesh can be; nothing is known of those beside a ring."""
    if deployment.mesh.is_ring:
        return {}
    return {
        place.worker: shapes_of_place(deployment, settings, place, place.worker) for place in deployment.mesh.workers()
    }


def shape_finder(able: Mapping[WorkerId, WorkerShapes]) -> Callable[[WorkerConfig], Shape]:
    """How a machine of one of these configs is cut."""

    def find(config: WorkerConfig) -> Shape:
        found = next(each for each in able[config.worker].able.values() if each.config == config)
        assert isinstance(found, Shape), f"{config.worker} is of another process"
        return found

    return find


def watch_experts(metrics: Metrics, deployment: Deployment, machines: Mapping[WorkerId, MeshExecutor]) -> None:
    """Where the model has experts; `machines` are asked at each scrape."""
    if deployment.model.experts is not None:
        metrics.watch_experts(lambda: {worker: machine.expert_loads for worker, machine in machines.items()})


def asked_observers(records: Records, deployment: Deployment, settings: Settings) -> tuple[Observer, ...]:
    """What keeps what /debug shows, where --debug_keep asks for any, and what traces, where --otlp_endpoint says to."""
    kept = (records.observe,) if settings.debug_keep else ()
    if not settings.otlp_endpoint:
        return kept
    try:
        otlp = import_module("jdisagg.serve.observability.otlp")
    except ImportError as error:
        raise ConfigError(
            f"--otlp_endpoint={settings.otlp_endpoint} needs {error.name}, which is not installed:"
            " pip install opentelemetry-exporter-otlp-proto-http"
        ) from error
    exporter = otlp.Exporter(settings.otlp_endpoint)
    atexit.register(exporter.close)
    return (*kept, otlp.Tracer(otlp.Source.of(deployment.model_name, __version__), exporter.put).observe)


def load_executors(
    deployment: Deployment,
    settings: Settings,
    devices: Sequence[Any],
    own: Mapping[WorkerId, WorkerConfig] | None = None,
    told: Callable[[str], None] = lambda line: None,
    kind: Callable[..., MeshExecutor] = MeshExecutor,
) -> dict[WorkerId, MeshExecutor]:
    """Every worker's machine on its own devices, with its own copy of the weights it runs.

    `own` are the workers of this process by their names in the mesh, None where all are; `devices` those that they
    stand on, in the mesh's order. `told` is called with what was decided about the weights. kind: of machines.
    Raises CheckpointError where a weight file changed since the model's identity was computed, or cannot be read.
    """
    own = {config.worker: config for config in deployment.workers} if own is None else own
    if not own:
        return {}
    assert deployment.identity  # every byte is read before the weights are loaded
    ids = sorted({device for name in own for device in deployment.place(name).device_ids})
    here = dict(zip(ids, devices, strict=False))
    source = open_source(deployment.model_folder, settings.load_format, deployment.model, settings.seed)
    weights = choose_weights(deployment, settings, source, told, choices_folder())
    grammars = grammars_of(settings, deployment.model_folder, deployment.model.vocab_size)

    draft = draft_of(deployment, settings, source)

    def load(name: WorkerId, config: WorkerConfig) -> MeshExecutor:
        place = deployment.place(name)
        places = [here[device] for device in place.device_ids]
        what = deployment.model, source, deployment.layout(config.role), deployment.layers_of(place)
        dtype = jnp.dtype(deployment.dtype_of(config.role))
        return kind(config, *what, places, dtype, weights, grammars, draft=draft)

    machines = side_by_side([partial(load, *each) for each in own.items()])
    deployment.files.check_unchanged()
    return {machine.config.worker: machine for machine in machines}


def draft_of(deployment: Deployment, settings: Settings, source: WeightSource) -> DraftModel | HeadModel | None:
    """The model or head that guesses what is drawn; source: of the model's weights. Raises CheckpointError."""
    if deployment.draft is None:
        return None
    folder, config = deployment.draft
    if isinstance(config, HeadConfig):
        return HeadModel(HFSource(folder), config, source)
    opened, kept = open_source(folder, settings.load_format, config, settings.seed), deployment.draft_pages
    return DraftModel(opened, config) if kept is None else DraftModel(opened, config, kept.name)


def warm(
    machines: Mapping[WorkerId, MeshExecutor],
    progress: Progress,
    remote_programs: Callable[[MeshExecutor], Sequence[DeclaredProgram]] = lambda machine: (),
) -> None:
    """Compiles every declared program of every worker: shipments between all pairs, and its `remote_programs`."""
    decoders = [machine for machine in machines.values() if machine.config.role is Role.DECODE]
    joint = JointProgress(progress)

    def warm_one(worker: WorkerId, machine: MeshExecutor) -> None:
        peers = decoders if machine.config.role is Role.PREFILL else []
        machine.warm(partial(joint.tell, worker), peers, more=remote_programs(machine))

    try:
        side_by_side([partial(warm_one, *each) for each in machines.items()])
    finally:
        joint.stop()  # whoever still warms, ends with its program


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
