"""Settings resolved from flags, environment (`JDISAGG_<NAME>`), a TOML file and defaults, the earlier winning."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from jdisagg import flags
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.settings import Settings


def resolve(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[Settings, flags.FlagValues]:
    """Raises ConfigError, in one line, for anything that cannot be."""
    given, values = flags.parse(argv)
    from_file = read_toml(values["config"].value) if values["config"].value else {}
    settings = Settings(**{**from_file, **_from_environment(environment), **given})
    settings.check()
    return settings, values


def read_toml(path: str) -> dict[str, Any]:
    """Settings of a TOML file; tables only group them. Raises ConfigError for a key or a kind of value unknown here."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"--config={path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"--config={path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config={path}: {error}") from error
    known = {each.name: each for each in fields(Settings)}
    found: dict[str, Any] = {}
    for key, value in _flattened(tree):
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            raise FlagError(
                f"--config={path}: unknown key {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
            )
        found[key] = _checked(known[key], value, f"--config={path}: {key}")
    return found


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


def _checked(setting: Field[Any], value: Any, where: str) -> Any:
    kind = type(setting.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise FlagError(f"{where} is {value!r}, must be of type {kind.__name__}")
    return value


def _truth(text: str) -> bool:
    """As flags take it. Raises ValueError."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError("must be true or false")
    return words[text.lower()]


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(Settings):
        text = environment.get(f"JDISAGG_{each.name.upper()}")
        if text is not None:
            try:
                found[each.name] = _truth(text) if type(each.default) is bool else type(each.default)(text)
            except ValueError as error:
                raise FlagError(f"JDISAGG_{each.name.upper()} is {text!r}: {error}") from error
    return found
