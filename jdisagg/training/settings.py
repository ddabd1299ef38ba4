"""A training run's settings: one TOML file, read into frozen dataclasses; unknown and missing keys are named errors."""

import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.model_config import ModelConfig
from jdisagg.training.batches import Phase
from jdisagg.training.step import OptimiserSettings
from jdisagg.training.teacher import TeacherSettings

Table = TypeVar("Table")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Where a run keeps its files, and how often it reports and saves (all in steps)."""

    out_dir: str
    export_dir: str
    seed: int
    save_every: int
    log_every: int
    eval_every: int
    eval_windows: int  # held-out windows of 512 tokens in the check-ups on the way; the last figure uses every file
    lesson_share: float  # share of the documented functions told a second time as a chat


@dataclass(frozen=True, slots=True)
class TrainSettings:
    run: RunSettings
    model: ModelConfig
    optimiser: OptimiserSettings
    phases: tuple[Phase, ...]
    teacher: TeacherSettings | None = None  # that the model learns from in place of the corpus


def read_settings(path: Path) -> TrainSettings:
    """Raises `ConfigError` for a file that cannot be read, `FlagError` for keys that are unknown or missing."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    unknown = sorted(tables.keys() - {"run", "model", "optimiser", "phase", "teacher"})
    if unknown:
        raise FlagError(f"unknown table {unknown[0]} in {path}; there are run, model, optimiser, phase and teacher")
    phases = tuple(read_table(Phase, "phase", phase) for phase in tables.get("phase", []))
    if not phases:
        raise FlagError(f"{path} has no [[phase]]: nothing to train")
    return TrainSettings(
        read_table(RunSettings, "run", tables.get("run", {})),
        read_table(ModelConfig, "model", {"family": "llama", **tables.get("model", {})}),
        read_table(OptimiserSettings, "optimiser", tables.get("optimiser", {})),
        phases,
        _teacher(tables["teacher"]) if "teacher" in tables else None,
    )


def _teacher(given: dict[str, Any]) -> TeacherSettings:
    found = read_table(TeacherSettings, "teacher", given)
    return replace(found, temperatures=tuple(found.temperatures))


def override(settings: TrainSettings, **given: Any) -> TrainSettings:
    """The settings with those run fields replaced whose given value is not None."""
    return replace(settings, run=replace(settings.run, **{k: v for k, v in given.items() if v is not None}))


def read_table(kind: type[Table], name: str, given: dict[str, Any]) -> Table:
    """Raises FlagError for keys that are unknown or missing."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise FlagError(f"unknown key {name}.{unknown[0]}; known are {', '.join(known)}")
    needed = {key for key, field in known.items() if field.default is MISSING}
    missing = sorted(needed - given.keys())
    if missing:
        raise FlagError(f"missing key {name}.{missing[0]}")
    return kind(**given)
