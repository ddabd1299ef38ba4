"""The files of a job, as `python -m jdisagg.plan --emit=...` writes them: what `jdisagg.cluster` makes, as text."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdisagg import config, flags
from jdisagg.cluster import compose, gke_tpu, kubernetes, scalers, slurm
from jdisagg.cluster.job import Job, job_of, with_fronts
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.settings import Settings

KINDS = ("slurm", "k8s", "gke_tpu", "compose")
WIDTH = 120


@dataclass(frozen=True)
class JobValues:
    """What a plan says of a job beside the settings of its processes; `note` is the first line of every file."""

    settings: Settings
    name: str
    image: str
    devices_per_host: int
    tpu: str
    note: str
    routers: int = 1
    fronts: int = 0

    @property
    def platform(self) -> str:
        return "gpu" if self.settings.platform == "auto" else self.settings.platform

    def job(self) -> Job:
        """Raises ConfigError for what cannot be placed."""
        return self._fronted(job_of(self.settings, self.name, self.image, self.platform, self.devices_per_host))

    def whole(self, platform: str) -> Job:
        """The job where every worker is one process, until somebody cuts it. Raises ConfigError."""
        return self._fronted(job_of(self.settings, self.name, self.image, platform, gke_tpu.WHOLE))

    def _fronted(self, job: Job) -> Job:
        return with_fronts(job, self.routers, self.fronts)

    def check_one_server(self, kind: str) -> None:
        """Raises ConfigError where more than a router is asked for."""
        if (self.routers, self.fronts) != (1, 0):
            asked = f"--routers={self.routers} and --fronts={self.fronts}"
            raise ConfigError(f"{asked}: --emit={kind} starts one router and no fronts; k8s and gke_tpu have them")


def settings_of_file(path: str) -> Settings:
    """Of `jdisagg.launch --config=PATH` and nothing else, whatever the environment says. Raises ConfigError."""
    settings = Settings(**config.read_toml(path, flags.define_settings(flags.own())))
    settings.check()
    return settings


def files(values: JobValues, kinds: Sequence[str]) -> dict[str, str]:
    """Name in the folder -> text, of these kinds. Raises ConfigError."""
    unknown = [each for each in kinds if each not in KINDS]
    if unknown:
        raise FlagError(f"--emit names {unknown[0]!r}, must be of {', '.join(KINDS)}")
    found: dict[str, str] = {}
    for kind in kinds:
        found |= WRITERS[kind](values)
    return found


def write(folder: str, texts: Mapping[str, str]) -> list[Path]:
    """Raises ConfigError where a file cannot be written."""
    paths = [Path(folder) / name for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--job_folder={folder}: {path}: {error.strerror}") from error
    return paths


def _slurm(values: JobValues) -> dict[str, str]:
    if values.platform == "tpu":
        raise ConfigError("--emit=slurm is for GPUs and CPUs: of TPUs gke_tpu has slices")
    values.check_one_server("slurm")
    return {"slurm.sbatch": slurm.script(values.job(), values.note)}


def _kubernetes(values: JobValues) -> dict[str, str]:
    if values.platform == "tpu":
        raise ConfigError("--emit=k8s is for GPUs and CPUs: of TPUs gke_tpu has slices")
    job = values.job()
    kinds = {
        "router": kubernetes.router(job),
        "lws": kubernetes.leader_worker_sets(job),
        "disaggregatedset": kubernetes.disaggregated_set(job),
        "jobset": kubernetes.job_sets(job),
    }
    if scalers.scaled(job):
        kinds |= {"hpa": scalers.pod_autoscalers(job), "keda": scalers.scaled_objects(job)}
    return {f"k8s/{name}.yaml": _yaml(documents, values.note) for name, documents in kinds.items()}


def _gke_tpu(values: JobValues) -> dict[str, str]:
    if values.tpu not in gke_tpu.SLICES:
        raise FlagError(f"--tpu is {values.tpu!r}, must be one of {', '.join(gke_tpu.SLICES)}")
    made = gke_tpu.manifests(values.whole("tpu"), values.tpu)
    return {f"gke_tpu/{name}": _yaml(documents, values.note) for name, documents in made.items()}


def _compose(values: JobValues) -> dict[str, str]:
    values.check_one_server("compose")
    job = values.whole(values.platform)
    return {
        "compose.yaml": _yaml([compose.compose(job)], values.note),
        "Dockerfile": compose.dockerfile(job, values.note),
    }


WRITERS = {"slurm": _slurm, "k8s": _kubernetes, "gke_tpu": _gke_tpu, "compose": _compose}


def _yaml(documents: Sequence[dict[str, Any]], note: str) -> str:
    """Raises ConfigError where PyYAML is not installed."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("--emit writes YAML and PyYAML is not here: pip install 'jdisagg[jobs]'") from error

    class Plain(yaml.SafeDumper):
        """Writes what occurs twice twice: manifests have no anchors."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    text = yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=WIDTH, explicit_start=len(documents) > 1)
    return f"# {note}\n{text}"
