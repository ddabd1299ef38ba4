"""The settings of a head's training: one TOML file with [target], [head] and [optimiser]."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.training.answers import TargetSettings
from jdisagg.training.heads import HeadSettings
from jdisagg.training.settings import read_table
from jdisagg.training.step import OptimiserSettings

TABLES = ("target", "head", "optimiser")


@dataclass(frozen=True, slots=True)
class HeadTrainSettings:
    target: TargetSettings
    head: HeadSettings
    optimiser: OptimiserSettings


def read_tables(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def read_head_settings(path: Path) -> HeadTrainSettings | None:
    """None where the file is about a model. Raises ConfigError, FlagError for tables and keys unknown or missing."""
    tables = read_tables(path)
    if "head" not in tables:
        return None
    unknown = sorted(tables.keys() - set(TABLES))
    if unknown:
        raise FlagError(f"unknown table {unknown[0]} in {path}; beside a head there are {', '.join(TABLES)}")
    found = read_table(TargetSettings, "target", tables.get("target", {}))
    return HeadTrainSettings(
        replace(found, temperatures=tuple(found.temperatures)),
        read_table(HeadSettings, "head", tables["head"]),
        read_table(OptimiserSettings, "optimiser", tables.get("optimiser", {})),
    )
