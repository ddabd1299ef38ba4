"""From a mesh's text to the workers of a simulation: their sizes, their costs, and the ports between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from jdisagg.core.default_sizes import chunk_sequences, decode_slots, one_stage_multi_step, page_size, step_tokens
from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import CHIPS, Chip
from jdisagg.core.labels import NOWHERE, Labels
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.mesh_spec import MeshSpec, Schedule, WorkerMesh
from jdisagg.core.request import Attempt, RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import Ring, Role, Stages, TransferMode, WorkerConfig
from jdisagg.sim.cost_models import CostModel, RingRoofline, Roofline, distserve_fit, distserve_kv_tokens
from jdisagg.sim.hardware import Hardware, hardware
from jdisagg.sim.kernel_tables import KernelTables
from jdisagg.sim.links import DomainLinks, FairLinks
from jdisagg.sim.tiers import TierSpec
from jdisagg.sim.traces import Trace

ONE_TOKEN = KVTransfer(Attempt(RequestId("one"), 0), WorkerId("a"), WorkerId("b"), (1,), (1,), 1)
PAGE_SIZE, STEP_TOKENS = 16, 2048  # where nobody said another, and no data sheet does


def slots_per_stage(max_num_seqs: int, stages: int, otherwise: int = 256) -> int:
    """Of a worker of so many sequences and stages, as `jdisagg.launch` rounds them; 0 sequences: `otherwise`."""
    return -(-max_num_seqs // stages) or otherwise


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all workers of a cluster are given alike."""

    max_model_len: int
    page_size: int = PAGE_SIZE
    num_slots: int = 256  # a stage
    max_num_seqs: int = 0  # of a worker, in whole microbatches; 0: num_slots for each of its stages
    by_device: bool = False  # `chosen`, slots for 0, and turns of one stage, where there is a sheet of the device
    chunk_tokens: int = STEP_TOKENS
    max_chunk_seqs: int = 64
    chunks_in_flight: int = 2  # of a stage
    steps_in_flight: int = 2
    multi_step: int = 8  # of a ring
    reserve_tokens: int = 512
    decode_steps_per_chunk: int = 1
    transfer: TransferMode = TransferMode.CHUNK
    reservations_ahead: int = 2
    mixed_steps: bool = False  # chunks and decode rows in one step, where a worker has both
    prefix_caching: bool = False  # full pages are kept; only prompts whose blocks have names find any

    def chosen(self, mesh: MeshSpec, cost_of: CostOf) -> Sizes:
        """The same, with a page and tokens a step for 0 as a run on these devices would choose them."""
        decoding, prefilling = (mesh.place_of(decodes=decodes) for decodes in (True, False))
        page, tokens = self.page_size, self.chunk_tokens
        held, computed = (self._by_sheet(cost_of(place)[0]) for place in (decoding, prefilling))
        if page == 0 and held is not None:
            line, sheet = held
            kv = KVLayout.of(line.model.config, 1, line.model.dtype, sheet.platform == "tpu")
            page = page_size(sheet.platform, kv, decoding.tp, self.max_model_len).value
        sizes = replace(self, page_size=page or PAGE_SIZE, chunk_tokens=tokens or STEP_TOKENS)
        if tokens or computed is None:
            return sizes
        line, sheet = computed
        tokens = step_tokens(line.model.config, prefilling.tp, sheet.platform, sheet, None).value
        return replace(sizes, chunk_tokens=tokens, max_chunk_seqs=chunk_sequences(sheet.platform, tokens).value)

    def slots(self, place: WorkerMesh, cost: CostModel, kv_tokens: int) -> int:
        """Of each stage of a worker that costs so much and has room for so many tokens."""
        stages = place.pp if place.role.decodes else 1
        found = self._by_sheet(cost)
        if self.max_num_seqs or found is None:
            return slots_per_stage(self.max_num_seqs, stages, self.num_slots)
        line, chip = found
        held = line.model.config, place.tp, stages, chip.platform, chip
        return decode_slots(*held, kv_tokens, self.max_model_len).value // stages

    def turns(self, place: WorkerMesh, cost: CostModel) -> int:
        """The most of a dispatch."""
        if place.schedule is Schedule.RING:
            return self.multi_step
        found = self._by_sheet(cost)
        alone = place.role.decodes and place.pp == 1
        return one_stage_multi_step(found[1].platform, place.role) if found and alone else 1

    def _by_sheet(self, cost: CostModel) -> tuple[Roofline, Chip] | None:
        """What devices cost, and their data sheet, where sizes go by one."""
        line = cost.stages if isinstance(cost, RingRoofline) else cost
        chip = CHIPS.get(line.chip.name) if self.by_device and isinstance(line, Roofline) else None
        return (line, chip) if chip is not None and isinstance(line, Roofline) else None

    def config(self, place: WorkerMesh, cost: CostModel, kv_tokens: int) -> WorkerConfig:
        pages, ring = kv_tokens // self.page_size, place.schedule is Schedule.RING
        stages, depth = (place.pp, 1) if place.role.decodes else (1, place.pp)  # of decode, of prefill alone
        if pages < 1:
            raise ConfigError(f"{place.worker} has room for {kv_tokens} tokens of KV, a page holds {self.page_size}")
        return WorkerConfig(
            worker=place.worker,
            role=place.role,
            num_pages=pages,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            num_slots=self.slots(place, cost, kv_tokens) * stages,
            decode=Ring(place.pp, self.turns(place, cost)) if ring else Stages(stages, self.turns(place, cost)),
            prefill_stages=depth,
            stage_admission=not ring,
            prefill_buckets=(self.chunk_tokens,),
            table_buckets=(-(-self.max_model_len // self.page_size),),
            max_chunk_seqs=self.max_chunk_seqs,
            steps_in_flight=self.steps_in_flight,
            reserve_tokens=self.reserve_tokens,
            decode_steps_per_chunk=self.decode_steps_per_chunk,
            chunks_in_flight=self.chunks_in_flight + depth - 1,
            transfer=self.transfer,
            reservations_ahead=self.reservations_ahead,
            mixed_steps=self.mixed_steps and place.role is Role.COLOCATED,
            prefix_caching=self.prefix_caching,
        )


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What `Cluster` takes."""

    workers: tuple[WorkerConfig, ...]
    costs: dict[WorkerId, CostModel]
    links: FairLinks
    slowdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # devices share cores: see `sim.shared`
    message_s: float = 50e-6  # of a word between actors
    latency_s: float = 0.0  # of a part of KV, besides its bytes
    routing: Routing | None = None  # None: the simulator's own
    tiers: TierSpec | None = None  # None: what leaves HBM is gone


CostOf = Callable[[WorkerMesh], tuple[CostModel, int]]  # and the KV tokens that the worker has room for


@dataclass(frozen=True, slots=True)
class Hosts:
    """Each `workers` of the mesh, in its order, stand on one host and share its NIC: bytes a second, each way."""

    workers: int
    nic_bytes_per_s: float

    def topology(self, mesh: MeshSpec) -> Topology:
        labels = {
            place.worker: Labels(host=f"host-{index // self.workers}") for index, place in enumerate(mesh.workers())
        }
        return Topology(labels, {each.host: self.nic_bytes_per_s for each in labels.values()})


@dataclass(frozen=True, slots=True)
class Topology:
    """Where workers stand, and the uplinks of the places named there: bytes a second, each way."""

    labels: Mapping[WorkerId, Labels]
    uplinks: Mapping[str, float]

    def links(self, ports: Mapping[Hashable, float]) -> DomainLinks:
        """`ports`: the workers' own."""
        uplinks = {(way, place): rate for place, rate in self.uplinks.items() for way in ("out", "in")}
        places: dict[Hashable, tuple[str, ...]] = {
            worker: tuple(place for place in (each.host, each.rack or each.slice, each.pod) if place)
            for worker, each in self.labels.items()
        }
        return DomainLinks({**ports, **uplinks}, places)


def cluster_spec(
    mesh: MeshSpec,
    sizes: Sizes,
    cost_of: CostOf,
    port_bytes_per_s: float | None = None,
    hosts: Hosts | Topology | None = None,
) -> ClusterSpec:
    """Every worker of the mesh. port_bytes_per_s: of each worker, each way; None: no port takes time.

    Without ports and hosts the network takes no time at all, to compare with.
    """
    topology = hosts.topology(mesh) if isinstance(hosts, Hosts) else hosts
    workers, costs = [], {}
    ports: dict[Hashable, float] = {}
    for place in mesh.workers():
        costs[place.worker], kv_tokens = cost_of(place)
        labels = topology.labels[place.worker] if topology is not None else NOWHERE
        token_bytes = round(costs[place.worker].transfer_bytes(ONE_TOKEN))
        workers.append(
            replace(sizes.config(place, costs[place.worker], kv_tokens), labels=labels, kv_token_bytes=token_bytes)
        )
        ports |= {(way, place.worker): port_bytes_per_s for way in ("out", "in") if port_bytes_per_s}
    links = FairLinks(ports) if topology is None else topology.links(ports)
    return ClusterSpec(tuple(workers), costs, links)


def with_tiers(
    given: ClusterSpec, tiers: TierSpec, dram_tokens: int = 0, disk_tokens: int = 0, *, peer_fetch: bool = False
) -> ClusterSpec:
    """The same cluster, whose workers keep so many tokens each below HBM, and may fetch from each other.

    Raises ConfigError for a ring.
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
    """Tokens of the trace's longest request, input and output together."""
    return int((trace.input_tokens + trace.output_tokens).max()) if len(trace) else 1


def published(name: str, engine: str = "distserve", host_s: float = 0.0) -> CostOf:
    """DistServe's fits and its engine's KV capacities."""

    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        if place.schedule is Schedule.RING:
            raise ConfigError(f"{place.worker} is a ring of {place.pp}; only stages were measured: say pp{place.pp}")
        return distserve_fit(name, place.tp, engine, host_s), distserve_kv_tokens(name, place.tp, place.pp)

    return cost_of


def by_roofline(roofline: Callable[[int], Roofline], host_devices: int = 0) -> CostOf:
    """A roofline for each `tp`, and the room that it leaves for KV. host_devices: see `RingRoofline`."""

    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        return _of_roofline(roofline(place.tp), place, host_devices)

    return cost_of


def _of_roofline(model: Roofline, place: WorkerMesh, host_devices: int = 0) -> tuple[CostModel, int]:
    ring = place.schedule is Schedule.RING
    return RingRoofline(model, place.pp, host_devices) if ring else model, model.kv_tokens(place.pp)


def by_device(devices: Mapping[Role, Hardware], roofline: Callable[[Hardware, int], Roofline]) -> CostOf:
    """As `by_roofline`, each role's workers on devices of their own kind (`devices_of`)."""

    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        return _of_roofline(roofline(devices[place.role], place.tp), place)

    return cost_of


def devices_of(text: str) -> dict[Role, Hardware]:
    """Devices by role, as "h100" (all), "h100,decode:a100" (all but decode workers) or "prefill:h100,decode:xeon8480".

    Raises ConfigError for a chip or a role that there is not, and for a role that is said twice.
    """
    said: dict[str, Hardware] = {}
    for word in text.split(","):
        role, _, name = word.strip().rpartition(":")
        if role in said or role not in ("", *map(str, Role)):
            raise ConfigError(
                f"devices {text!r}: {word!r} is no CHIP or ROLE:CHIP (a role of {', '.join(Role)}, each once)"
            )
        said[role] = hardware(name)
    rest = said.get("", next(iter(said.values())))
    return {role: said.get(str(role), rest) for role in Role}


def by_kernels(tables: Callable[[int], KernelTables], kv_tokens: int) -> CostOf:
    """Measured kernels for each `tp`, and the room that the engine was found to have."""
    return lambda place: (tables(place.tp), kv_tokens)


def with_room(cost_of: CostOf, kv_tokens: int) -> CostOf:
    """The same costs, and room for so many tokens of KV in each worker."""
    return lambda place: (cost_of(place)[0], kv_tokens)
