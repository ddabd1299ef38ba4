"""Opens the stores that keep pages of this process's workers below HBM: DRAM, disk and the shared pool."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.tiers import PagesFound, Tier
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.tiers.pool.open import open_pool
from jdisagg.kv.tiers.records import RecordLayout
from jdisagg.kv.tiers.stores import DiskStore, DramStore, FileInUseError, PageStore
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.driver.driver import LiveDriver
from jdisagg.serve.driver.kv_moves import WorkerStores


def open_stores(
    deployment: Deployment, settings: Settings, machines: Mapping[WorkerId, MeshExecutor]
) -> dict[WorkerId, WorkerStores]:
    """Returns the stores of each worker. Raises ConfigError if a file or a pool cannot be opened."""
    if not any(machine.config.has_tiers for machine in machines.values()):
        return {}
    model = deployment.kv_fingerprint
    return {worker: _stores(settings, machine, model) for worker, machine in machines.items()}


def _stores(settings: Settings, machine: MeshExecutor, model: str) -> WorkerStores:
    config, form = machine.config, machine.tier_pages.form
    stores: dict[Tier, PageStore] = {}
    if config.dram_pages:
        stores[Tier.DRAM] = DramStore(config.dram_pages, form.record_bytes)
    if config.disk_pages:
        stores[Tier.DISK] = _disk(settings, config, form, form.fingerprint(model))
    if config.shared_pool:
        stores[Tier.POOL] = open_pool(settings.pool, form.fingerprint(model))
    return WorkerStores(form.record_bytes, stores, form.fingerprint(model))


def _disk(settings: Settings, config: WorkerConfig, form: RecordLayout, fingerprint: str) -> DiskStore:
    """Opens the first numbered file of this role that no other worker has open; names of workers are not stable."""
    folder = _folder(settings.disk_path)
    for number in count():
        try:
            path = folder / f"{config.role}-{number}.kv"
            return DiskStore(path, config.disk_pages, form.record_bytes, fingerprint)
        except FileInUseError:
            continue
    raise AssertionError("the count of files never ends")


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--disk_path={path}: {error.strerror}") from error
    return folder


def post_found(driver: LiveDriver, stores: Mapping[WorkerId, WorkerStores]) -> None:
    """Posts the pages that disks hold from an earlier run. Called before the driver starts."""
    for worker, each in stores.items():
        disk = each.stores.get(Tier.DISK)
        found = disk.found() if isinstance(disk, DiskStore) else []
        if found:
            driver.post(worker, PagesFound(tuple(page for page, _ in found), b"".join(name for _, name in found)))
