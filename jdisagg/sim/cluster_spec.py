"""The workers of a simulation from a mesh and settings: their configurations, costs and ports."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jdisagg.core.default_sizes import MULTI_STEP, Buckets, ChosenSizes, Devices, choose_page_size, choose_sizes
from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import CHIPS
from jdisagg.core.labels import NOWHERE, Labels
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.stages import cut_layers, own_layers
from jdisagg.core.mesh_spec import MeshSpec, Schedule, WorkerMesh
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.settings import Settings
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import MOST, Role, WorkerConfig, WorkerSizes, kv_sizes, worker_config
from jdisagg.sim.cost_models import CostModel, RingRoofline, Roofline, distserve_fit, distserve_kv_tokens
from jdisagg.sim.hardware import ChipSpec, hardware
from jdisagg.sim.kernel_tables import KernelTables
from jdisagg.sim.links import DomainLinks, FairLinks
from jdisagg.sim.tiers import TierSpec
from jdisagg.sim.traces import Trace

ONE_TOKEN = KVTransfer(Attempt(RequestId("one"), 0), WorkerId("a"), WorkerId("b"), (1,), (1,), 1)
FREE_LINK = math.inf  # bytes per second of a port through which KV takes no time
NO_DEVICE_SLOTS, NO_DEVICE_TOKENS, NO_DEVICE_SEQUENCES, NO_DEVICE_PAGE = 256, 2048, 64, 16  # slots: per stage

CostOf = Callable[[WorkerMesh], tuple[CostModel, int]]  # returns the costs, and the worker's capacity in KV tokens
PortOf = Callable[[WorkerMesh], float]  # returns bytes per second of the worker's port, each way


def plain_settings(max_model_len: int, **other_settings: Any) -> Settings:
    """Returns settings that match the engines of published results. Sizes are constant, a dispatch has one decode step,
    a step has either prompts or decode rows, KV is shipped chunk by chunk, and there is no prefix caching.
    `other_settings` override them."""
    plain = {
        "page_size": NO_DEVICE_PAGE,
        "max_num_batched_tokens": NO_DEVICE_TOKENS,
        "max_chunk_seqs": NO_DEVICE_SEQUENCES,
        "prefill_buckets": str(MOST),  # larger than any chunk, so that there is one size
        "table_buckets": str(MOST),
        "multi_step": 1,
        "mixed_steps": "off",
        "prefix_caching": "off",
        "short_prompt_tokens": 0,
        "reserve_tokens": 512,
        "transfer": "chunk",
        "stage_admission": "off",
    }
    return Settings(max_model_len=max_model_len, **{**plain, **other_settings})


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The arguments of a `Cluster`: its workers, their costs and the links between them."""

    workers: tuple[WorkerConfig, ...]
    costs: dict[WorkerId, CostModel]
    links: FairLinks
    slowdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by phase: see `sim.shared`
    message_s: float = 50e-6  # per message between actors
    latency_s: float = 0.0  # per part of KV, in addition to its bytes
    routing: Routing | None = None  # None: the simulator's default
    tiers: TierSpec | None = None  # None: KV that leaves HBM is lost
    in_role: Callable[[WorkerConfig, Role], WorkerConfig] | None = None  # configures a worker in another role


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts of `workers` workers each, in mesh order, that share a NIC: bytes per second, each way."""

    workers: int
    nic_bytes_per_s: float

    def topology(self, mesh: MeshSpec) -> Topology:
        labels = {
            place.worker: Labels(host=f"host-{index // self.workers}") for index, place in enumerate(mesh.workers())
        }
        return Topology(labels, {each.host: self.nic_bytes_per_s for each in labels.values()})


@dataclass(frozen=True, slots=True)
class Topology:
    """Locations of workers, and the uplinks of hosts, racks and pods: bytes per second, each way."""

    labels: Mapping[WorkerId, Labels]
    uplinks: Mapping[str, float]

    def links(self, ports: Mapping[Hashable, float]) -> DomainLinks:
        """Returns the links; `ports` are the workers' own ports."""
        uplinks = {(way, place): rate for place, rate in self.uplinks.items() for way in ("out", "in")}
        places: dict[Hashable, tuple[str, ...]] = {
            worker: tuple(place for place in (each.host, each.rack or each.slice, each.pod) if place)
            for worker, each in self.labels.items()
        }
        return DomainLinks({**ports, **uplinks}, places)


def cluster_spec(
    mesh: MeshSpec,
    settings: Settings,
    cost_of: CostOf,
    port_bytes_per_s: float | PortOf,
    hosts: Hosts | Topology | None = None,
    **fields: Any,
) -> ClusterSpec:
    """Returns every worker of the mesh with its costs, configured as the server would be with these settings.
    `port_bytes_per_s`: of each worker, each way; FREE_LINK: its port takes no time. `fields`: fields of every
    `WorkerConfig` that override the settings."""
    topology = hosts.topology(mesh) if isinstance(hosts, Hosts) else hosts
    found = {place.worker: cost_of(place) for place in mesh.workers()}
    costs = {worker: cost for worker, (cost, _) in found.items()}
    page, chosen = choose(mesh, settings, found)
    by_worker: dict[WorkerId, tuple[WorkerMesh, WorkerSizes]] = {}

    def in_role(config: WorkerConfig, role: Role) -> WorkerConfig:
        place, sizes = by_worker[config.worker]
        return replace(worker_config(settings, replace(place, role=role), sizes), labels=config.labels, **fields)

    workers = list[WorkerConfig]()
    ports: dict[Hashable, float] = {}
    for place in mesh.workers():
        cost, kv_tokens = found[place.worker]
        if kv_tokens < page:
            raise ConfigError(f"{place.worker} has room for {kv_tokens} tokens of KV, a page holds {page}")
        kv_fields: dict[str, Any] = _kv_sizes(mesh, place, cost, page) | {
            "kv_token_bytes": round(cost.transfer_bytes(ONE_TOKEN))
        }
        sizes = WorkerSizes(chosen, kv_tokens // page, page, settings.max_model_len, **kv_fields)
        by_worker[place.worker] = place, sizes
        labels = topology.labels[place.worker] if topology is not None else NOWHERE
        workers.append(replace(worker_config(settings, place, sizes), labels=labels, **fields))
        rate = port_bytes_per_s(place) if callable(port_bytes_per_s) else port_bytes_per_s
        ports |= {(way, place.worker): rate for way in ("out", "in") if rate < FREE_LINK}
    links = FairLinks(ports) if topology is None else topology.links(ports)
    return ClusterSpec(tuple(workers), costs, links, in_role=in_role)


def choose(
    mesh: MeshSpec, settings: Settings, found: Mapping[WorkerId, tuple[CostModel, int]]
) -> tuple[int, ChosenSizes]:
    """Returns the page size and the sizes that the server would choose for these devices. Costs of no known device
    (fits, kernel tables) get constants. `found`: each worker's costs and its capacity in tokens."""
    decoding, prefilling = mesh.place_of(decodes=True), mesh.place_of(decodes=False)
    roofline, other = (_roofline(found[place.worker][0]) for place in (decoding, prefilling))
    if roofline is None or other is None:
        page, chunk = settings.page_size or NO_DEVICE_PAGE, settings.max_num_batched_tokens or NO_DEVICE_TOKENS
        slots = settings.max_num_seqs or NO_DEVICE_SLOTS * decoding.pp
        steps = settings.multi_step or 1, settings.multi_step or MULTI_STEP
        sequences = settings.max_chunk_seqs or NO_DEVICE_SEQUENCES
        return page, ChosenSizes(slots, chunk, sequences, *steps, Buckets(chunk, settings.max_model_len))
    here, there = (Devices(each.chip.platform, CHIPS.get(each.chip.name), None) for each in (roofline, other))
    longest = settings.max_model_len
    page = choose_page_size(settings, mesh, here, _layout(roofline, 1), longest)
    room = {worker: tokens for worker, (_, tokens) in found.items()}
    return page.value, choose_sizes(settings, roofline.model.config, mesh, (here, there), page, longest, room)


def _roofline(cost: CostModel) -> Roofline | None:
    """Returns the roofline behind these costs, or None if they are of no known device."""
    roofline = cost.stages if isinstance(cost, RingRoofline) else cost
    return roofline if isinstance(roofline, Roofline) else None


def _layout(roofline: Roofline, page: int) -> KVLayout:
    return KVLayout.of(roofline.model.config, page, roofline.model.dtype, roofline.chip.platform == "tpu")


def _kv_sizes(mesh: MeshSpec, place: WorkerMesh, cost: CostModel, page: int) -> dict[str, Any]:
    """Returns how KV is stored and sent in layer groups, if the model and the devices are known."""
    roofline = _roofline(cost)
    if roofline is None:
        return {}
    layers = own_layers(roofline.model.config, cut_layers(roofline.model.config, mesh), place)
    named = replace(_layout(roofline, page), dtype="bfloat16")  # its bytes are those of the cost model
    return kv_sizes(layers, named)


def with_tiers(
    given: ClusterSpec, tiers: TierSpec, dram_tokens: int = 0, disk_tokens: int = 0, *, peer_fetch: bool = False
) -> ClusterSpec:
    """Returns the cluster with workers that keep tokens below HBM and may fetch from each other; no rings
    (ConfigError).
    """
    for each in given.workers:
        if each.is_ring:
            raise ConfigError(f"{each.worker} is a ring of {each.decode.n}, which keeps no KV below HBM")
    workers = [
        replace(
            each,
            dram_pages=-(-dram_tokens // each.page_size),
            disk_pages=-(-disk_tokens // each.page_size),
            shared_pool=tiers.pool_tokens > 0,
            peer_fetch=peer_fetch,
        )
        for each in given.workers
    ]
    return replace(given, workers=tuple(workers), tiers=tiers)


def longest(trace: Trace) -> int:
    """Returns the tokens of the trace's longest request, input and output together."""
    return int((trace.input_tokens + trace.output_tokens).max()) if len(trace) else 1


def published(name: str, engine: str = "distserve", host_s: float = 0.0) -> CostOf:
    """Returns DistServe's fits and its engine's KV capacities."""

    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        if place.schedule is Schedule.RING:
            raise ConfigError(f"{place.worker} is a ring of {place.pp}; only stages were measured: say pp{place.pp}")
        return distserve_fit(name, place.tp, engine, host_s), distserve_kv_tokens(name, place.tp, place.pp)

    return cost_of


def by_roofline(roofline: Callable[[int], Roofline], host_devices: int = 0) -> CostOf:
    """Returns a roofline for each `tp` and its capacity for KV. `host_devices`: see `RingRoofline`."""

    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        return _of_roofline(roofline(place.tp), place, host_devices)

    return cost_of


def _of_roofline(model: Roofline, place: WorkerMesh, host_devices: int = 0) -> tuple[CostModel, int]:
    ring = place.schedule is Schedule.RING
    return RingRoofline(model, place.pp, host_devices) if ring else model, model.kv_tokens(place.pp)


def by_device(devices: Mapping[Role, ChipSpec], roofline: Callable[[ChipSpec, int], Roofline]) -> CostOf:
    """Returns costs as `by_roofline`, with each role's workers on its own kind of device (`devices_of`)."""

    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        return _of_roofline(roofline(devices[place.role], place.tp), place)

    return cost_of


def devices_of(text: str) -> dict[Role, ChipSpec]:
    """Parses devices by role, as "h100" (all) or "h100,decode:a100" (all but decode workers). Raises ConfigError for an
    unknown chip or role, and for a role given twice."""
    chips: dict[str, ChipSpec] = {}
    for word in text.split(","):
        role, _, name = word.strip().rpartition(":")
        if role in chips or role not in ("", *map(str, Role)):
            raise ConfigError(
                f"devices {text!r}: {word!r} is no CHIP or ROLE:CHIP (a role of {', '.join(Role)}, each once)"
            )
        chips[role] = hardware(name)
    rest = chips.get("", next(iter(chips.values())))
    return {role: chips.get(str(role), rest) for role in Role}


def by_kernels(tables: Callable[[int], KernelTables], kv_tokens: int) -> CostOf:
    """Returns measured kernels for each `tp`, and the measured capacity of the engine."""
    return lambda place: (tables(place.tp), kv_tokens)


def with_room(cost_of: CostOf, kv_tokens: int) -> CostOf:
    """Returns the same costs with a capacity of `kv_tokens` KV tokens per worker."""
    return lambda place: (cost_of(place)[0], kv_tokens)
