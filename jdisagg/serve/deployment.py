"""What a run will be, worked out before anything is loaded: the model, the meshes, and every worker's sizes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jdisagg.core.adapters import adapter_sizes
from jdisagg.core.errors import CheckpointError, ConfigError, MeshError
from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.labels import Labels
from jdisagg.core.mesh_spec import MeshSpec, Schedule, WorkerMesh
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import WorkerId
from jdisagg.core.reshard import StageShape
from jdisagg.core.settings import Settings, int_list
from jdisagg.core.stages import ring_cut, split_layers, split_prefill
from jdisagg.core.targets import GIB
from jdisagg.core.weight_format import AS_ACTIVATIONS, AS_MADE, WeightFormat
from jdisagg.core.worker_config import RAW, Compress, Digests, Role, TransferMode, WorkerConfig, chunk_tokens
from jdisagg.model.checkpoint import read_model, stored_weights, weight_files, why_no_model
from jdisagg.model.gguf_file import gguf_name, is_gguf
from jdisagg.model.weight_bytes import adapter_bytes, ring_shard_bytes, shard_bytes
from jdisagg.serve.speculation import read_draft, read_speculation

EMBEDDED_MODEL = Path(__file__).parent.parent / "embedded"
AUTO, STORED = "auto", "stored"
TYPICAL_ERROR = {"int8": 0.005, "fp8": 0.024, "int4": 0.1}  # of a layer, by benchmarks/compression.py
CPU_KV_BYTES = 1 << 30  # of each worker, where --kv_tokens does not say

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One stack, ready to be built. `layers` are the decode stages' runs, and the layer groups of prefill meshes that
    have no stages of their own (`layers_of`)."""

    model_folder: Path
    model_name: str
    model: ModelConfig
    mesh: MeshSpec
    layers: tuple[range, ...]
    dtype: str
    weights: WeightFormat  # "auto" only on the CPU, where loading decides, as it does what stays full of int8 and fp8
    kv: KVLayout  # of decode and colocated workers
    prefill_kv: KVLayout  # of prefill workers
    max_model_len: int
    workers: tuple[WorkerConfig, ...]
    device_bytes: int | None = None  # of memory, of one device; None on the CPU
    dtypes: Mapping[Role, str] = field(default_factory=dict[Role, str])  # of activations, where they are not `dtype`
    draft: tuple[Path, ModelConfig] | None = None  # the model that guesses what is drawn

    def dtype_of(self, role: Role) -> str:
        """Of activations of workers of this role."""
        return self.dtypes.get(role, self.dtype)

    @property
    def weight_dtype(self) -> str:
        return self.weights.dtype

    def layout(self, role: Role) -> KVLayout:
        """How workers of this role hold KV."""
        return self.prefill_kv if role is Role.PREFILL else self.kv

    def shapes(self, place: WorkerMesh) -> list[StageShape]:
        """The layer groups of the worker at this place."""
        kv = self.layout(place.role)
        return [StageShape(run, place.tp, kv.page_size, kv.dtype) for run in self.layers_of(place)]

    def layers_of(self, place: WorkerMesh) -> tuple[range, ...]:
        """Of the worker's stages or layer groups."""
        return own_layers(self.model, self.layers, place)

    def place(self, worker: WorkerId) -> WorkerMesh:
        return next(each for each in self.mesh.workers() if each.worker == worker)


def resolve_deployment(settings: Settings, platform: str, device_bytes: int | None, sized: bool = True) -> Deployment:
    """What `settings` ask for, on devices of `platform` ("cpu", "tpu", "gpu") with `device_bytes` of memory each.

    Not `sized`: workers are other processes' affair, which know their memory; each has one sequence's pages here.
    Logs a warning for workers that share devices; each then gets an equal part of their memory.
    Raises ConfigError, MeshError or CheckpointError, each in one line.
    """
    folder = place_of(settings)
    model = read_model(folder)
    mesh = mesh_of(settings)
    for line in (*sharing_warnings(mesh), *compression_warnings(settings)):
        log.warning(line)
    dtype, prefill_dtype = dtypes_of(settings, mesh, platform)
    weights = weights_of(settings, folder, model, " and a ".join(mesh.platforms) or platform)
    kv_dtype = settings.kv_dtype if settings.kv_dtype != "auto" else dtype
    kv = KVLayout.of(model, settings.page_size, kv_dtype, tiled="tpu" in (mesh.platforms or (platform,)))
    prefill_kv = replace(
        kv,
        page_size=settings.prefill_page_size or settings.page_size,
        dtype=next(name for name in (settings.prefill_kv_dtype, settings.kv_dtype, prefill_dtype) if name != "auto"),
    )
    layouts = {role: prefill_kv if role is Role.PREFILL else kv for role in Role}
    longest = min(settings.max_model_len or model.max_position, model.max_position)
    if settings.max_model_len > model.max_position:
        over = f"--max_model_len={settings.max_model_len} is over the model's {model.max_position} positions"
        raise ConfigError(over)
    layers = cut_layers(model, mesh)
    draft = read_draft(settings.speculative, folder, model)
    budget = Budget(model, layers, dtype, weights, device_bytes, draft[1] if draft else None)
    budgets = {role: replace(budget, dtype=prefill_dtype if role is Role.PREFILL else dtype) for role in Role}
    name = settings.served_model_name or name_of(folder)
    workers = tuple(
        worker_config(
            settings,
            place,
            layouts[place.role].page_size,
            longest,
            num_pages(settings, place, layouts[place.role], longest, budgets[place.role].of(place, mesh))
            if sized
            else layouts[place.role].pages_for(longest),
        )
        for place in mesh.workers()
    )
    shipped = [shipping_of(settings, own_layers(model, layers, place), kv) for place in mesh.workers()]
    workers = tuple(replace(each, **how) for each, how in zip(workers, shipped, strict=True))
    workers = tuple(replace(each, stage_admission=False) if each.ring_stages > 1 else each for each in workers)
    dtypes = {role: budgets[role].dtype for role in Role}
    kept = kv, prefill_kv, longest, workers, device_bytes, dtypes, draft
    return Deployment(folder, name, model, mesh, layers, dtype, weights, *kept)


def dtypes_of(settings: Settings, mesh: MeshSpec, platform: str) -> tuple[str, str]:
    """Of workers that decode, and of prefill workers: what is asked for, else what their devices are best at."""

    def usual(prefills: bool) -> str:
        found = [pool.platform or platform for pool in mesh.pools if (pool.role is Role.PREFILL) == prefills]
        return "float32" if (found or [platform])[0] == "cpu" else "bfloat16"

    dtype = settings.dtype if settings.dtype != "auto" else usual(False)
    asked = [name for name in (settings.prefill_dtype, settings.dtype) if name != "auto"]
    return dtype, asked[0] if asked else usual(True)


def cut_layers(model: ModelConfig, mesh: MeshSpec) -> tuple[range, ...]:
    """The layers of each decode stage. Raises MeshError."""
    return ring_cut(model, mesh.decode_pp).runs if mesh.is_ring else split_layers(model, mesh.decode_pp)


def own_layers(model: ModelConfig, decode_stages: tuple[range, ...], place: WorkerMesh) -> tuple[range, ...]:
    """Of the stages or layer groups of a worker beside decode workers with such stages. Raises MeshError."""
    staged = place.role is Role.PREFILL and place.pp > 1
    return split_prefill(model.num_layers, place.pp) if staged else decode_stages


def model_fingerprint(deployment: Deployment, settings: Settings) -> str:
    return fingerprint_of(deployment.model_folder, deployment.model, settings)


def fingerprint_of(folder: Path, model: ModelConfig, settings: Settings) -> str:
    """Of the model's numbers and its weights, by their files' sizes."""
    text = json.dumps(asdict(model), sort_keys=True) + settings.load_format + str(settings.seed)
    files = sorted((path.name, path.stat().st_size) for path in weight_files(folder))
    return hashlib.sha256((text + json.dumps(files)).encode()).hexdigest()[:16]


def weights_of(settings: Settings, folder: Path, model: ModelConfig, platform: str) -> WeightFormat:
    """What --weight_dtype comes to for the model in `folder`. Raises ConfigError, CheckpointError."""
    if settings.weight_dtype in (STORED, AUTO):
        stored = stored_weights(folder, settings.load_format, model)
        if stored is not None and (stored.dtype != "fp8" or platform == "gpu"):
            return stored
    return WeightFormat(weight_dtype_of(settings.weight_dtype, platform))


def weight_dtype_of(asked: str, platform: str) -> str:
    """--weight_dtype on devices of `platform`. Raises ConfigError for fp8 where its products do not exist."""
    if asked == "fp8" and platform != "gpu":
        raise ConfigError(f"--weight_dtype=fp8 needs a GPU's products, and this is a {platform}; int8 is as small")
    return AS_ACTIVATIONS if asked == STORED or (asked == AUTO and platform != "cpu") else asked


def place_of(settings: Settings) -> Path:
    """Where the model lies. Raises CheckpointError where there is none."""
    place = Path(settings.model) if settings.model else EMBEDDED_MODEL
    why = why_no_model(place)
    if why is not None:
        raise CheckpointError(f"--model={settings.model or place}: {why}")
    return place


def mesh_of(settings: Settings) -> MeshSpec:
    """--mesh; where it is "auto", two shards of prefill and two stages of decode. Raises MeshError, ConfigError."""
    if settings.mesh != AUTO:
        mesh = MeshSpec.parse(settings.mesh)
        if mesh.is_ring and settings.tiers:
            raise ConfigError(f"{settings.tiers} and --mesh={settings.mesh}: a ring keeps KV in HBM alone")
        return mesh
    model = read_model(place_of(settings))
    return MeshSpec.parse(f"prefill:tp2,decode:pp{min(2, model.num_layers)}")


def name_of(place: Path) -> str:
    """What clients call the model at `place`, unless they are told another name."""
    return "embedded" if place == EMBEDDED_MODEL else gguf_name(place) if is_gguf(place) else place.resolve().name


def sharing_warnings(mesh: MeshSpec) -> list[str]:
    """One line for each group of workers that share devices."""
    return [
        f"{' and '.join(workers)} share device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}: for testing only,"
        f" they take turns on {'them' if len(ids) > 1 else 'it'}, and each gets 1/{len(workers)} of the memory"
        for workers, ids in mesh.shared().items()
    ]


def compression_warnings(settings: Settings) -> list[str]:
    """Where what is asked for would hardly ever happen."""
    wire, bound = settings.transfer_compress, settings.transfer_error_bound
    if bound >= TYPICAL_ERROR.get(wire, 0.0):
        return []
    return [
        f"--transfer_compress={wire} loses about {TYPICAL_ERROR[wire]:g} of a layer, more than"
        f" --transfer_error_bound={bound:g} allows: most KV will travel uncompressed"
    ]


def worker_config(settings: Settings, place: WorkerMesh, page_size: int, longest: int, num_pages: int) -> WorkerConfig:
    """One worker's sizes; slots are rounded up to whole microbatches."""
    stages, depth = (1, place.pp) if place.role is Role.PREFILL else (place.pp, 1)  # of decode, of prefill alone
    slots = -(-settings.max_num_seqs // stages) * stages
    ring = place.schedule is Schedule.RING  # whose program takes all slots, and no prompts
    speculation = read_speculation(settings.speculative)
    short = short_tokens(settings, slots // stages, page_size) if place.role is Role.DECODE and not ring else 0
    mixed = settings.mixed_steps == "on" and (short > 0 or place.role is Role.COLOCATED)
    widths = int_list(settings.table_buckets, "table_buckets") or _halvings(longest, 256, 4)
    pages = sorted({-(-width // page_size) for width in (*widths, longest) if width <= longest})
    return WorkerConfig(
        worker=place.worker,
        role=place.role,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=longest,
        num_slots=slots,
        num_microbatches=1 if ring else stages,
        prefill_stages=depth,
        chunks_in_flight=depth + 1,  # one for each stage, and one that waits for the first
        ring_stages=place.pp if ring else 1,
        decode_turns=settings.decode_turns if ring else 1,
        prefill_buckets=(short,) if short else chunk_sizes(settings, slots // stages if mixed else 0, page_size),
        draft_tokens=0 if ring else speculation.tokens,
        guesses=speculation.guesses,
        draft_auto=speculation.auto and not ring,
        draft_ngrams=not speculation.draft,
        table_buckets=tuple(pages),
        max_chunk_seqs=settings.max_chunk_seqs,
        steps_in_flight=settings.steps_in_flight,
        reserve_tokens=settings.reserve_tokens,
        prefix_caching=settings.prefix_caching == "on",
        dram_pages=-(-settings.dram_tokens // page_size),
        disk_pages=-(-settings.disk_tokens // page_size),
        shared_pool=bool(settings.pool),
        peer_fetch=settings.peer_fetch,
        tier_wire=RAW if settings.tier_compress == "none" else settings.tier_compress,
        mixed_steps=mixed,
        short_prompt_tokens=short,
        embeds=settings.embeddings != "off",
        ack_timeout_s=settings.handoff_timeout_s,
        claim_timeout_s=settings.handoff_timeout_s * 2 / 3,  # the router waits for that long, and is to hear of it
        labels=Labels.parse(settings.labels),
        **adapter_sizes(settings),
        router_grace_s=0.0 if settings.role == "all" else settings.router_grace_s,
    )


def chunk_sizes(settings: Settings, rows: int, page_size: int) -> tuple[int, ...]:
    """Declared chunks, ascending, beside `rows` decode rows."""
    chunk = chunk_tokens(settings.max_num_batched_tokens, rows, page_size)
    sizes = int_list(settings.prefill_buckets, "prefill_buckets") or _halvings(chunk, 64, 4)
    return sizes if sizes[-1] == chunk else (*(size for size in sizes if size < chunk), chunk)


def short_tokens(settings: Settings, rows: int, page_size: int) -> int:
    """The chunk of a decode worker with `rows` rows a step, in whole pages; 0 where the budget of a step has no room.

    Only where it keeps pages for their content does it ever hold all but the end of a prompt.
    """
    if settings.prefix_caching != "on":
        return 0
    tokens = min(settings.short_prompt_tokens, settings.max_num_batched_tokens - rows)
    return max(0, tokens - tokens % page_size)


def shipping_of(settings: Settings, layers: tuple[range, ...], kv: KVLayout) -> dict[str, Any]:
    """How workers ship KV: when it leaves, in which layer groups, and what its bytes are."""
    return {
        "transfer": TransferMode(settings.transfer),
        "digests": Digests(settings.transfer_digests),
        "stage_admission": settings.stage_admission == "on",
        "layer_groups": tuple((run.start, run.stop) for run in layers),
        "kv_token_bytes": kv.bytes_per_page // kv.page_size,
        "compress": Compress(settings.transfer_compress),
        "error_bound": settings.transfer_error_bound,
        # Pages and dtypes may differ.
        "kv_layout": f"{kv.num_layers} layers x {kv.num_kv_heads} x {kv.parts} x {kv.head_dim}",
    }


def _halvings(largest: int, smallest: int, ratio: int) -> tuple[int, ...]:
    """`largest` divided by `ratio` again and again while it stays over `smallest`, ascending."""
    sizes = [largest]
    while sizes[0] // ratio >= smallest:
        sizes.insert(0, sizes[0] // ratio)
    return tuple(sizes)


class NoRoom(MeshError):
    """The devices' memory does not hold the weights and the KV of one sequence."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What is to be held, and one device's memory in bytes (None on the CPU: the host's is shared).

    Matrices that only loading finds to be better left full take of what --hbm_fraction leaves over.
    """

    model: ModelConfig
    layers: tuple[range, ...]  # of the decode stages
    dtype: str  # of activations
    weights: WeightFormat
    device_bytes: int | None
    draft: ModelConfig | None = None  # that guesses, beside the last stage

    def of(self, place: WorkerMesh, mesh: MeshSpec) -> Budget:
        """The worker's part, where it shares a device with others."""
        if self.device_bytes is None or place.platform == "cpu":
            return replace(self, device_bytes=None)
        on = mesh.on_device()
        shares = max(len(on[device]) for device in place.device_ids)
        return replace(self, device_bytes=self.device_bytes // shares)

    def stages(self, place: WorkerMesh) -> list[tuple[range, int]]:
        """Layers and bytes of weights of one device of each stage; without stages a prefill worker's devices hold all
        layers, in as many groups as there are decode stages, and of tied tables one for each end.
        """
        if place.schedule is Schedule.RING:
            cut = ring_cut(self.model, place.pp)
            held = ring_shard_bytes(self.model, cut, place.tp, self.dtype, self.weights)
            return [(range(len(cut.numbers)), held)]
        layers = own_layers(self.model, self.layers, place)
        groups = [(run, shard_bytes(self.model, run, place.tp, self.dtype, self.weights)) for run in layers]
        if place.pp > 1:
            return groups
        return [(range(self.model.num_layers), sum(held for _, held in groups))]


def num_pages(settings: Settings, place: WorkerMesh, kv: KVLayout, longest: int, budget: Budget) -> int:
    """Pages of one worker's pool: what --kv_tokens says, else every slot's longest sequence as far as memory goes."""
    wanted = settings.max_num_seqs * kv.pages_for(longest)
    if settings.kv_tokens:
        pages = kv.pages_for(settings.kv_tokens)
    elif budget.device_bytes is None:
        pages = min(wanted, CPU_KV_BYTES // kv.held_page_bytes(place.tp))
    else:
        return _pages_of_memory(settings, place, kv, longest, budget)
    if pages < kv.pages_for(longest):
        raise ConfigError(
            f"{place.worker}: room for {max(pages, 0) * kv.page_size} KV tokens, but one sequence may have {longest};"
            " lower --max_model_len, or raise --kv_tokens or the mesh"
        )
    return pages


def _pages_of_memory(settings: Settings, place: WorkerMesh, kv: KVLayout, longest: int, budget: Budget) -> int:
    """Pages that the fullest of the worker's devices holds beside its weights."""
    assert budget.device_bytes is not None
    allowed, found = int(budget.device_bytes * settings.hbm_fraction), []
    stages = budget.stages(place)
    for number, (layers, held_bytes) in enumerate(stages, 1):
        held_bytes += adapter_bytes(settings, budget.model, layers, place.tp, budget.dtype)  # noqa: PLW2901
        page_bytes = len(layers) * kv.layer_page_bytes(place.tp)
        of_draft = 0
        if budget.draft is not None and place.role.decodes and number == len(stages):
            of_draft = shard_bytes(budget.draft, range(budget.draft.num_layers), place.tp, budget.dtype, AS_MADE)
            small = KVLayout.of(budget.draft, kv.page_size, kv.dtype, kv.tiled)
            page_bytes += small.held_page_bytes(place.tp) // place.tp
        found.append(((allowed - held_bytes - of_draft) // page_bytes, held_bytes + of_draft))
    pages, held_bytes = min(found)
    if pages < kv.pages_for(longest):
        raise NoRoom(
            f"{place.worker} does not fit: {held_bytes / GIB:.2f} GiB of weights on a device with"
            f" {budget.device_bytes / GIB:.2f} GiB (--hbm_fraction={settings.hbm_fraction:g} of it is"
            f" {allowed / GIB:.2f}) leave room for {max(pages, 0) * kv.page_size} KV tokens, and one sequence may have"
            f" {longest}; use more devices, or lower --max_model_len"
        )
    return pages
