"""Programs compiled ahead: a folder of jax's program cache, made by `jdisagg aot --save`.

Its `programs.json` records the versions and settings of the compilation. A start with --compile_cache_dir=FOLDER
finds the programs there. If the versions or settings differ, it says so in one line with both values, and compiles;
with --compile_cache_dir=only:FOLDER it ends instead.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.model_identity import SHORT_DIGITS, config_digest
from jdisagg.core.settings import Settings
from jdisagg.parallel.compiler_flags import COMPILER_FLAGS
from jdisagg.parallel.topology import machine_name

MANIFEST, ONLY = "programs.json", "only:"
COMPILERS = {"cpu": "jaxlib", "gpu": "jax-cuda13-plugin", "tpu": "libtpu"}
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables of the compilers
# Settings in these groups or with these names decide which programs there are.
SHAPING = frozenset({"mesh", "sizes", "speculative", "mixed_steps", "dtype", "weight_dtype", "kv_dtype", "embeddings"})

log = logging.getLogger(__name__)


def compiler_versions(platform: str) -> dict[str, str]:
    """Returns the versions and flags that compile programs for "cpu", "gpu" or "tpu" in this process."""
    packages = ("jdisagg", "jax", "jaxlib", COMPILERS[platform])
    # programs for other platforms do not depend on the host
    machine = {"machine": machine_name()} if platform == "cpu" else {}
    return {
        **{name: _version(name) for name in packages},
        **{name: os.environ.get(name, "") for name in FLAGS},
        "compiler_flags": " ".join(f"{each.name}={each.value}" for each in COMPILER_FLAGS if platform != "cpu"),
        **machine,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def shape_of(settings: Settings, model: ModelConfig) -> dict[str, Any]:
    """Returns the part of a run that decides which programs there are: settings and the model's configuration. Weights
    are arguments of programs, so any checkpoint of the model can use them; its path may differ by machine."""
    shaping = (each.name for each in fields(Settings) if not SHAPING.isdisjoint((each.metadata["group"], each.name)))
    named = {"model": f"{model.family}-{config_digest(model)[:SHORT_DIGITS]}"}
    return named | {name: getattr(settings, name) for name in shaping}


def write_manifest(
    folder: Path, platform: str, target: str, settings: Settings, model: ModelConfig, programs: int
) -> None:
    """Writes the versions and settings of a folder's programs."""
    origin = {"platform": platform, "target": target, "programs": programs}
    written = {**origin, "made_by": compiler_versions(platform), "settings": shape_of(settings, model)}
    (folder / MANIFEST).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest; None if the folder has no programs compiled ahead. Raises ConfigError for an unreadable
    one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        assert (
            isinstance(read["made_by"], dict) and isinstance(read["settings"], dict) and read["platform"] in COMPILERS
        )
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{path} is no list of programs made ahead: {error}") from error
    return read


def folder_of(setting: str) -> tuple[Path, bool]:
    """Returns the folder of --compile_cache_dir, and whether a start may use no other programs."""
    return Path(setting.removeprefix(ONLY)), setting.startswith(ONLY)


def fits(setting: str) -> bool:
    """Returns True if the folder of --compile_cache_dir has programs of this process's versions and flags. A folder of
    other versions gives a warning, or with "only:" a ConfigError."""
    folder, only = folder_of(setting)
    manifest = read_manifest(folder)
    if manifest is None:
        if only:
            raise ConfigError(
                f"--compile_cache_dir={setting}: no {MANIFEST} there, as python -m jdisagg aot --save makes"
            )
        return False
    return _is_same(setting, manifest["made_by"], compiler_versions(manifest["platform"]), str)


def check_settings(settings: Settings, read_model: Callable[[], ModelConfig]) -> None:
    """Warns if programs compiled ahead belong to another run; raises ConfigError if no others may run."""
    folder, _ = folder_of(settings.compile_cache_dir)
    manifest = read_manifest(folder)
    if manifest is not None:
        _is_same(settings.compile_cache_dir, manifest["settings"], shape_of(settings, read_model()), "--{}".format)


def _is_same(setting: str, saved: Mapping[str, Any], here: Mapping[str, Any], named: Callable[[str], str]) -> bool:
    """Returns True if both are equal; otherwise reports the first difference."""
    differ = [name for name in here if saved.get(name) != here[name]]
    if not differ:
        return True
    folder, only = folder_of(setting)
    name, number = differ[0], len(differ) - 1
    what = f"the programs in {folder} were made by {named(name)}={saved.get(name)}, this is {named(name)}={here[name]}"
    what += f", and {number} more" if number else ""
    if only:
        raise ConfigError(f"--compile_cache_dir={setting}: {what}; make them anew by python -m jdisagg aot --save")
    log.warning("%s: what differs is compiled here", what)
    return False
