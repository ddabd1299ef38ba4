"""What a run is told: flags, environment (`JDISAGG_<NAME>`), a TOML file and defaults, the earlier winning."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jdisagg import flags
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.settings import REMOVED, Settings


def resolve(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[Settings, flags.FlagValues]:
    """Those of `jdisagg.launch`. Raises ConfigError, in one line, for anything that cannot be."""
    values = flags.define_settings(flags.own())
    flags.read(values, argv)
    fill(values, environment)
    return settings_of(values), values


def settings_of(values: flags.FlagValues, **instead: Any) -> Settings:
    """Checked; `instead` of what some flags say, where they are the command's own affair. Raises ConfigError."""
    given: dict[str, Any] = {each.name: values[each.name].value for each in fields(Settings)}
    settings = Settings(**given | instead)
    settings.check()
    return settings


def fill(values: flags.FlagValues, environment: Mapping[str, str] = os.environ) -> None:
    """Flags that were not given, from the environment or else the file that --config names. Raises ConfigError."""
    for name in values:
        text = environment.get(f"JDISAGG_{name.upper()}")
        if text is not None and name not in flags.NO_SETTINGS:
            flags.give(values, name, text, f"JDISAGG_{name.upper()}")
    for name, why in REMOVED.items():
        if f"JDISAGG_{name.upper()}" in environment:
            raise FlagError(f"JDISAGG_{name.upper()} {why}")
    if values["config"].value:
        for key, value in read_toml(values["config"].value, values).items():
            flags.give(values, key, value, f"--config={values['config'].value}: {key}")


def read_toml(path: str, values: flags.FlagValues) -> dict[str, Any]:
    """Values of these flags in a TOML file; tables only group them, and what is another command's is passed over.

    Raises ConfigError for a key or a kind of value unknown here.
    """
    found: dict[str, Any] = {}
    known = {name for name in values if name not in flags.NO_SETTINGS}
    for key, value in _flattened(parse_toml(path)):
        if key in known:
            found[key] = _checked(flags.kind_of(values, key), value, f"--config={path}: {key}")
        elif key in REMOVED:
            raise FlagError(f"--config={path}: {key!r} {REMOVED[key]}")
        elif key not in flags.WORDS:
            nearest = difflib.get_close_matches(key, known, n=1)
            raise FlagError(
                f"--config={path}: unknown key {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
            )
    return found


def parse_toml(path: str) -> dict[str, Any]:
    """The whole file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"--config={path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"--config={path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config={path}: {error}") from error


def as_toml(settings: Settings) -> str:
    """The resolved whole, readable by `--config`."""
    lines: list[str] = []
    for group in flags.GROUPS:
        lines.append(f"[{group}]")
        for each in fields(Settings):
            if each.metadata["group"] == group:
                lines.append(f"{each.name} = {json.dumps(getattr(settings, each.name))}")
        lines.append("")
    return "\n".join(lines)


def _flattened(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        pairs.extend(_flattened(value) if isinstance(value, dict) else [(key, value)])
    return pairs


def _checked(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is list and isinstance(value, str):
        return value
    if type(value) is not kind:
        raise FlagError(f"{where} is {value!r}, must be of type {kind.__name__}")
    return value
