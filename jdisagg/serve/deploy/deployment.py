"""Derives a deployment from the settings before anything is loaded: model, meshes, and every worker's sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from jdisagg.core.default_sizes import ChosenSizes, Devices, Size, choose_page_size, choose_sizes
from jdisagg.core.errors import CheckpointError, ConfigError, MeshError
from jdisagg.core.hardware import Chip
from jdisagg.core.layout.kv_layout import LANES, DraftPages, KVLayout
from jdisagg.core.layout.reshard import StageShape, draft_shape
from jdisagg.core.layout.stages import cut_layers, own_layers, split_layers
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec, WorkerMesh
from jdisagg.core.model_config import AS_ACTIVATIONS, ModelConfig, WeightFormat
from jdisagg.core.model_identity import ModelIdentity
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role, WorkerConfig, WorkerSizes, kv_runs, kv_sizes, worker_config
from jdisagg.engine.mesh_executor import ReshapeTarget
from jdisagg.model.checkpoint import read_model, stored_weights, why_no_model
from jdisagg.model.draft_head import HeadConfig
from jdisagg.model.gguf.file import gguf_name, is_gguf
from jdisagg.model.identity import ModelFiles
from jdisagg.serve.deploy.memory import Budget, num_pages
from jdisagg.serve.deploy.speculation import Draft, draft_layout, kept_draft, read_draft, read_speculation, with_head
from jdisagg.serve.frontends.grammars import why_no_grammars

EMBEDDED_MODEL = Path(__file__).parents[2] / "embedded"
AUTO, STORED = "auto", "stored"
PAGE_DTYPES = {"fp8": "float8_e4m3fn"}  # by the names of --kv_dtype
TYPICAL_ERROR = {
    "int8": 0.005,
    "fp8": 0.024,
    "int4": 0.1,
}  # relative error of a layer, measured by benchmarks/compression.py

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployment:
    """One stack, ready to be built.

    `layers` has the layers of each decode stage; they are also the layer groups of prefill meshes without stages
    (`layers_of`).
    """

    files: ModelFiles
    model_name: str
    model: ModelConfig
    mesh: MeshSpec
    layers: tuple[range, ...]
    dtype: str
    weights: WeightFormat  # "auto" only on the CPU; loading decides it, and which matrices int8 and fp8 leave unscaled
    kv: KVLayout  # of decode and colocated workers
    prefill_kv: KVLayout  # of prefill workers
    max_model_len: int
    workers: tuple[WorkerConfig, ...]
    sizes: ChosenSizes
    device_bytes: int | None = None  # one device's memory; None on the CPU
    dtypes: Mapping[Role, str] = field(default_factory=dict[Role, str])  # activation dtypes of roles, if not `dtype`
    draft: Draft | None = None  # the draft model or head of speculative decoding
    draft_files: ModelFiles | None = None  # files of the draft model or head
    draft_pages: DraftPages | None = None  # None if a draft model's KV is not kept

    @property
    def model_folder(self) -> Path:
        return self.files.place

    @property
    def identity(self) -> ModelIdentity:
        """The model's identity. The first call reads every byte of the model. Raises CheckpointError."""
        return self.files.identity

    @property
    def identity_line(self) -> str:
        """The model's description for other processes, records and refusals; equal lines name equal models."""
        return self.identity.described(self.model_name)

    @property
    def kv_fingerprint(self) -> str:
        """The model's fingerprint with all else that changes its KV values: rounded weights and a draft head.

        A draft model whose KV is kept beside the model's is named by `draft_pages`.
        """
        found = f"{self.identity.fingerprint} {self.weight_dtype}"
        return f"{found} {self.head_fingerprint}" if self.head_fingerprint else found

    @property
    def head_fingerprint(self) -> str:
        """The fingerprint of the draft head whose KV is stored as an extra layer of the model's; empty without one."""
        if self.draft is None or self.draft_files is None or not isinstance(self.draft[1], HeadConfig):
            return ""
        return self.draft_files.identity.fingerprint

    def dtype_of(self, role: Role) -> str:
        return self.dtypes.get(role, self.dtype)

    @property
    def weight_dtype(self) -> str:
        return self.weights.dtype

    def layout(self, role: Role) -> KVLayout:
        return self.prefill_kv if role is Role.PREFILL else self.kv

    def shapes(self, mesh_row: WorkerMesh) -> list[StageShape]:
        """Returns the shape of each layer group of the worker, a draft model's pages last."""
        kv = self.layout(mesh_row.role)
        runs = kv_runs(self.layers_of(mesh_row), kv)
        shapes = [StageShape(run, mesh_row.tp, kv.page_size, kv.dtype) for run in runs]
        if self.draft_pages is not None and self.draft is not None and isinstance(self.draft[1], ModelConfig):
            pages = replace(self.draft_pages, layout=draft_layout(self.draft[1], kv))
            shapes.append(draft_shape(pages, mesh_row.tp))
        return shapes

    def layers_of(self, mesh_row: WorkerMesh) -> tuple[range, ...]:
        return own_layers(self.model, self.layers, mesh_row)

    def place(self, worker: WorkerId) -> WorkerMesh:
        return next(each for each in self.mesh.workers() if each.worker == worker)


def resolve_deployment(
    settings: Settings, platform: str, device_bytes: int | None, sized: bool = True, chip: Chip | None = None
) -> Deployment:
    """Returns the deployment of `settings` on devices of `platform` ("cpu", "tpu", "gpu") of `device_bytes` bytes.

    Sizes that the settings leave out follow from `chip`, the devices' data sheet, if there is one. If not `sized`,
    workers run in other processes, which know their memory; each worker has the pages of one sequence here.
    Logs a warning for workers that share devices; each then gets an equal share of their memory.
    Raises ConfigError, MeshError or CheckpointError, each in one line.
    """
    files = model_files(settings)
    folder, model = files.place, read_model(files.place)
    mesh = mesh_of(settings)
    for line in (*sharing_warnings(mesh), *compression_warnings(settings)):
        log.warning(line)
    dtype, prefill_dtype = dtypes_of(settings, mesh, platform)
    weights = weights_of(settings, folder, model, " and a ".join(mesh.platforms) or platform)
    longest = longest_of(settings, model)
    devices = Devices(platform, chip, device_bytes)
    page, kv, prefill_kv = layouts_of(settings, model, mesh, devices, (dtype, prefill_dtype))
    draft = read_draft(settings.speculative, folder, model)
    kv, prefill_kv = (with_head(each, draft, settings, mesh) for each in (kv, prefill_kv))
    layouts = {role: prefill_kv if role is Role.PREFILL else kv for role in Role}
    layers = cut_layers(model, mesh)
    draft_files, draft_pages = _identified_draft(draft, settings, mesh, (kv, prefill_kv), devices)
    budget = Budget(model, layers, dtype, weights, device_bytes, draft[1] if draft else None, draft_pages is not None)
    budgets = {role: replace(budget, dtype=prefill_dtype if role is Role.PREFILL else dtype) for role in Role}

    def pages_of(mesh_row: WorkerMesh, slots: int) -> int:
        layout, held = layouts[mesh_row.role], budgets[mesh_row.role].of(mesh_row, mesh)
        return num_pages(settings, slots, mesh_row, layout, longest, held) if sized else layout.pages_for(longest)

    def room_of(mesh_row: WorkerMesh) -> int | None:
        known = sized and (settings.kv_tokens or budgets[mesh_row.role].of(mesh_row, mesh).device_bytes is not None)
        return pages_of(mesh_row, 1) * layouts[mesh_row.role].page_size if known else None

    room = {mesh_row.worker: room_of(mesh_row) for mesh_row in mesh.workers()}  # in tokens; None if memory is unknown
    held_by = devices.of(mesh.place_of(decodes=True)), devices.of(mesh.place_of(decodes=False))
    sizes = choose_sizes(settings, model, mesh, held_by, page, longest, room)
    speculation, has_grammars = read_speculation(settings.speculative), not why_no_grammars(settings)

    def sizes_of(mesh_row: WorkerMesh) -> WorkerSizes:
        page_size = layouts[mesh_row.role].page_size
        known = pages_of(mesh_row, sizes.max_num_seqs), page_size, longest, speculation, has_grammars
        return WorkerSizes(sizes, *known, **kv_sizes(own_layers(model, layers, mesh_row), kv, draft_pages))

    workers = tuple(worker_config(settings, mesh_row, sizes_of(mesh_row)) for mesh_row in mesh.workers())
    dtypes = {role: budgets[role].dtype for role in Role}
    rest = kv, prefill_kv, longest, workers, sizes, device_bytes, dtypes, draft, draft_files, draft_pages
    return Deployment(files, settings.served_model_name or name_of(folder), model, mesh, layers, dtype, weights, *rest)


def model_files(settings: Settings) -> ModelFiles:
    """Returns the files of --model and --tokenizer; nothing of the weights is read. Raises CheckpointError."""
    path = place_of(settings)
    tokenizer = Path(settings.tokenizer) if settings.tokenizer else path
    cache = Path(settings.cache) if settings.cache else None
    return ModelFiles(path, read_model(path), settings.load_format, settings.seed, tokenizer, cache)


def _identified_draft(
    draft: Draft | None, settings: Settings, mesh: MeshSpec, layouts: tuple[KVLayout, KVLayout], devices: Devices
) -> tuple[ModelFiles | None, DraftPages | None]:
    """Returns the files of the draft model or head, and the layout of a draft model's kept KV, named by fingerprint.

    A draft has no tokenizer, and a head is never random.
    """
    if draft is None:
        return None, None
    path, config = draft
    load_format = "hf" if isinstance(config, HeadConfig) else settings.load_format
    cache = Path(settings.cache) if settings.cache else None
    files = ModelFiles(path, config, load_format, settings.seed, cache=cache)
    pages = kept_draft(draft, settings, mesh, layouts, "", devices)
    return files, None if pages is None else replace(pages, name=files.identity.fingerprint)


def longest_of(settings: Settings, model: ModelConfig) -> int:
    """Returns the most tokens of one sequence. Raises ConfigError if that exceeds the model's positions."""
    if settings.max_model_len > model.max_position:
        over = f"--max_model_len={settings.max_model_len} is over the model's {model.max_position} positions"
        raise ConfigError(over)
    return settings.max_model_len or model.max_position


def layouts_of(
    settings: Settings, model: ModelConfig, mesh: MeshSpec, devices: Devices, dtypes: tuple[str, str]
) -> tuple[Size, KVLayout, KVLayout]:
    """Returns the page size, and the KV layouts of decode and of prefill workers; `dtypes` has both dtypes."""
    kv_dtype = PAGE_DTYPES.get(settings.kv_dtype, settings.kv_dtype) if settings.kv_dtype != AUTO else dtypes[0]
    tiled = "tpu" in (mesh.platforms or (devices.platform,))
    page = choose_page_size(
        settings, mesh, devices, KVLayout.of(model, 1, kv_dtype, tiled), longest_of(settings, model)
    )
    kv = KVLayout.of(model, page.value, kv_dtype, tiled)
    prefill_dtype = next(name for name in (settings.prefill_kv_dtype, settings.kv_dtype, dtypes[1]) if name != AUTO)
    sent = replace(
        kv, page_size=settings.prefill_page_size or page.value, dtype=PAGE_DTYPES.get(prefill_dtype, prefill_dtype)
    )
    check_scaled(settings, model, mesh, kv, sent)
    return page, kv, sent


def check_scaled(settings: Settings, model: ModelConfig, mesh: MeshSpec, kv: KVLayout, sent: KVLayout) -> None:
    """Raises ConfigError if quantised pages are impossible here. `sent` is the layout of prefill workers."""
    own = [each for each in (kv, sent) if each.scaled]
    if not own:
        return
    both = f"--kv_dtype={settings.kv_dtype}, --prefill_kv_dtype={settings.prefill_kv_dtype}"
    if mesh.is_ring:
        raise ConfigError(f"{both} and --mesh={mesh}: a ring's pages are not quantised")
    if model.latent:
        raise ConfigError(f"{both} and a model of {model.family}: latents are not quantised")
    if len({each.dtype for each in own}) > 1:
        raise ConfigError(f"{both}: pages of one cannot become the other's; give both the same, or one of them a float")
    for name in ("transfer_compress", "tier_compress"):
        if getattr(settings, name) != "none":
            raise ConfigError(f"{both} and --{name}={getattr(settings, name)}: quantised pages travel as they are")
    for each in own:
        if each.tiled and (each.parts == 1 or each.head_dim % LANES):
            raise ConfigError(f"{both} and heads of {model.head_dim} on a TPU: quantised rows are of {LANES} numbers")
        if each.tiled and 2 * each.page_size % LANES:
            raise ConfigError(f"{both} and pages of {each.page_size} tokens on a TPU: say --page_size={LANES // 2}")


def dtypes_of(settings: Settings, mesh: MeshSpec, platform: str) -> tuple[str, str]:
    """Returns the activation dtypes of decode and of prefill workers: the settings', else their devices' default."""

    def usual(prefills: bool) -> str:
        found = [pool.platform or platform for pool in mesh.pools if (pool.role is Role.PREFILL) == prefills]
        return "float32" if (found or [platform])[0] == "cpu" else "bfloat16"

    dtype = settings.dtype if settings.dtype != "auto" else usual(False)
    given = [name for name in (settings.prefill_dtype, settings.dtype) if name != "auto"]
    return dtype, given[0] if given else usual(True)


def weights_of(settings: Settings, folder: Path, model: ModelConfig, platform: str) -> WeightFormat:
    """Returns the weight format of --weight_dtype for the model in `folder`. Raises ConfigError, CheckpointError."""
    if settings.weight_dtype in (STORED, AUTO):
        stored = stored_weights(folder, settings.load_format, model)
        if stored is not None and (stored.dtype != "fp8" or platform == "gpu"):
            return stored
    return WeightFormat(weight_dtype_of(settings.weight_dtype, platform))


def weight_dtype_of(dtype: str, platform: str) -> str:
    """Resolves --weight_dtype for devices of `platform`. Raises ConfigError for fp8 on other platforms than GPUs."""
    if dtype == "fp8" and platform != "gpu":
        raise ConfigError(f"--weight_dtype=fp8 needs a GPU's products, and this is a {platform}; int8 is as small")
    return AS_ACTIVATIONS if dtype == STORED or (dtype == AUTO and platform != "cpu") else dtype


def place_of(settings: Settings) -> Path:
    """Returns the model's folder or GGUF file. Raises CheckpointError if there is no model."""
    path = Path(settings.model) if settings.model else EMBEDDED_MODEL
    why = why_no_model(path)
    if why is not None:
        raise CheckpointError(f"--model={settings.model or path}: {why}")
    return path


def mesh_of(settings: Settings) -> MeshSpec:
    """Parses --mesh; "auto" means two prefill shards and two decode stages. Raises MeshError, ConfigError."""
    if settings.mesh != AUTO:
        mesh = MeshSpec.parse(settings.mesh)
        if mesh.is_ring and settings.tiers:
            raise ConfigError(f"{settings.tiers} and --mesh={settings.mesh}: a ring keeps KV in HBM alone")
        return mesh
    model = read_model(place_of(settings))
    return MeshSpec.parse(f"prefill:tp2,decode:pp{min(2, model.num_layers)}")


def name_of(path: Path) -> str:
    """Returns the model's name for clients, unless --served_model_name gives another."""
    return "embedded" if path == EMBEDDED_MODEL else gguf_name(path) if is_gguf(path) else path.resolve().name


def sharing_warnings(mesh: MeshSpec) -> list[str]:
    """Returns one line for each group of workers that share devices."""
    return [
        f"{' and '.join(workers)} share device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}: for testing only,"
        f" they take turns on {'them' if len(ids) > 1 else 'it'}, and each gets 1/{len(workers)} of the memory"
        for workers, ids in mesh.shared().items()
    ]


def compression_warnings(settings: Settings) -> list[str]:
    """Returns a warning if the requested compression would rarely be used."""
    wire, bound = settings.transfer_compress, settings.transfer_error_bound
    if bound >= TYPICAL_ERROR.get(wire, 0.0):
        return []
    return [
        f"--transfer_compress={wire} loses about {TYPICAL_ERROR[wire]:g} of a layer, more than"
        f" --transfer_error_bound={bound:g} allows: most KV will travel uncompressed"
    ]


# The roles and mesh shapes that a worker can take on its own devices.


class Sized(Protocol):
    """A configuration that a worker can take; for a worker of this process also its mesh (`mesh_executor.Shape`)."""

    @property
    def config(self) -> WorkerConfig: ...


@dataclass(frozen=True, slots=True)
class WorkerShapes:
    """The shapes that a worker can take, by mesh text ("decode:pp2"), and why others are impossible."""

    num_devices: int
    able: Mapping[str, Sized]
    impossible: Mapping[str, str]
    usual: Mapping[Role, str]  # the default mesh text of each role
    fixed: str = ""  # the reason why the worker cannot change, if it cannot

    def find(self, role: str, mesh: str) -> Sized:
        """Returns the shape of a role and a mesh; "" is the role's default mesh. Raises ConfigError, MeshError."""
        if role not in list(Role):
            raise ConfigError(f"role is {role[:20]!r}, must be one of {', '.join(Role)}")
        if not mesh:
            return self._named(self.usual.get(Role(role), role))
        (pool, *others) = MeshSpec.pools_of(f"{role}:{mesh}")
        if others or pool.count != 1 or pool.first_device is not None:
            raise MeshError(f"mesh is {mesh[:40]!r}, must be one worker's, as pp2tp2, and stays on its devices")
        if pool.pp * pool.tp != self.num_devices:
            raise MeshError(
                f"mesh {mesh} is of {pool.pp * pool.tp} devices, and the worker stands on {self.num_devices}"
            )
        return self._named(str(pool))

    def _named(self, name: str) -> Sized:
        if name in self.able:
            return self.able[name]
        raise MeshError(
            self.impossible.get(name) or self.fixed or f"{name} is none of what it can be: {', '.join(self.able)}"
        )


def shapes_of(deployment: Deployment, settings: Settings, mesh_row: WorkerMesh, name: WorkerId) -> WorkerShapes:
    """Returns the shapes that the worker `name` of a mesh row can take."""
    able, impossible, usual = dict[str, ReshapeTarget](), dict[str, str](), dict[Role, str]()
    for pool in _cuts(len(mesh_row.device_ids)):
        text = str(pool)
        try:
            changed = replace(mesh_row, role=pool.role, pp=pool.pp, tp=pool.tp)
            able[text] = _shape(deployment, settings, changed, name, deployment.layout(mesh_row.role))
        except ConfigError as error:
            impossible[text] = str(error)
        is_current = any(
            (each.role, each.pp, each.tp) == (pool.role, pool.pp, pool.tp) for each in deployment.mesh.pools
        )
        if is_current or pool.role not in usual:
            usual[pool.role] = text
    return WorkerShapes(len(mesh_row.device_ids), able, impossible, usual)


def _cuts(devices: int) -> Iterator[PoolSpec]:
    """Yields every role and mesh on `devices` devices: most stages first, for prefill fewest stages first."""
    tps = [tp for tp in range(1, devices + 1) if devices % tp == 0]
    for role in Role:
        for tp in reversed(tps) if role is Role.PREFILL else tps:
            yield PoolSpec(role, pp=devices // tp, tp=tp)


def _shape(
    deployment: Deployment, settings: Settings, mesh_row: WorkerMesh, name: WorkerId, own: KVLayout
) -> ReshapeTarget:
    """Returns the worker's shape for a mesh row; `own` is its layout at start. Raises ConfigError, MeshError."""
    model, layout = deployment.model, deployment.layout(mesh_row.role)
    if settings.tiers and layout != own:
        raise ConfigError(f"{mesh_row.role}: pages would be {layout}, those that {settings.tiers} keep are {own}")
    stages = split_layers(model, mesh_row.pp) if mesh_row.role.decodes else deployment.layers
    layers = own_layers(model, stages, mesh_row)
    draft_pages, draft = deployment.draft_pages, deployment.draft[1] if deployment.draft else None
    held = deployment.weights, deployment.device_bytes, draft
    budget = Budget(model, stages, deployment.dtype_of(mesh_row.role), *held, is_draft_kept=draft_pages is not None)
    longest = deployment.max_model_len
    pages = num_pages(
        settings, deployment.sizes.max_num_seqs, mesh_row, layout, longest, budget.of(mesh_row, deployment.mesh)
    )
    speculation, has_grammars = read_speculation(settings.speculative), not why_no_grammars(settings)
    known = pages, layout.page_size, longest, speculation, has_grammars
    sizes = WorkerSizes(deployment.sizes, *known, **kv_sizes(layers, deployment.kv, draft_pages))
    return ReshapeTarget(worker_config(settings, replace(mesh_row, worker=name), sizes), layout, layers)
