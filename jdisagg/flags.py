"""The flags that several commands share: each is declared here once, or is a field of `Settings`.

A command declares its flags by `own_flags()`, `define` and, for those of its own, absl; `jdisagg/command.py` runs it.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from absl import flags

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.settings import AT_LEAST_ONE, NOT_NEGATIVE, REMOVED, REMOVED_VALUES, Settings

FlagValues = flags.FlagValues
GROUPS = ("model", "mesh", "sizes", "scheduling", "transfer", "tiers", "cluster", "server", "one-shot", "running")
NO_SETTINGS = ("help", "helpfull", "h", "config", "print_config")  # neither a key of a file nor an environment variable


@dataclass(frozen=True)
class Word:
    """A flag's type, help and bounds, the same in every command; each command has its own default."""

    kind: type
    help: str
    least: Any = None  # None: no bound
    most: Any = None
    choices: tuple[str, ...] = ()


def _of_settings() -> dict[str, Word]:
    least = {**dict.fromkeys(AT_LEAST_ONE, 1), **dict.fromkeys(NOT_NEGATIVE, 0)}
    return {
        each.name: Word(type(each.default), each.metadata["help"], least.get(each.name), None, each.metadata["choices"])
        for each in fields(Settings)
    }


WORDS = {
    **_of_settings(),
    "attainment": Word(float, "share of requests that must keep both objectives", 0.0, 1.0),
    "cost": Word(str, "distserve, roofline or profile:FILE; sim: also kernels:DEVICE"),
    "devices": Word(int, "how many there are", 1),
    "devices_per_host": Word(int, "--emit: of each host; a worker of more is a group of processes", 1),
    "engine": Word(str, "--cost=distserve: whose fit"),
    "hardware": Word(str, "the devices' data sheet, as h100; sim: or by role, as h100,decode:a100"),
    "host_s": Word(float, "of the host, a plan", 0.0),
    "image": Word(str, "--emit: of every container"),
    "inputs": Word(float, "input lengths times this"),
    "job_name": Word(str, "--emit: of the job and of what belongs to it"),
    "json": Word(str, "file for the figures, for programs"),
    "outputs": Word(float, "output lengths times this"),
    "rate": Word(float, "requests a second; 0: as recorded (plan: as many as go)", 0.0),
    "save": Word(str, "folder in which compiled programs are kept, for runs of the same settings"),
    "slo_tpot_s": Word(float, "objective for the mean gap between tokens", 0.0),
    "slo_ttft_s": Word(float, "objective for the first token", 0.0),
    "target": Word(str, "devices that are not here, as v5p:2x2x4 or h100:8"),
    "tpu": Word(str, "--emit=gke_tpu: the chip, one of v5e, v5p, v6e"),
    "trace": Word(str, "KIND:FILE, KIND one of azure, mooncake, lengths, or mix:INPUT+OUTPUT@SHARE,..."),
}
FIELDS = frozenset(each.name for each in fields(Settings))


def own() -> FlagValues:
    """Returns flags that are separate from those of imported libraries, with those that every command has."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "show this", short_name="h", flag_values=values)
    flags.DEFINE_bool("helpfull", False, "show this, and every setting of a run with its meaning", flag_values=values)
    flags.DEFINE_string("config", "", "TOML file with any of these as keys; flags win", flag_values=values)
    return values


def define(values: FlagValues, choices: Mapping[str, Sequence[str]] | None = None, /, **defaults: Any) -> None:
    """Declares flags of `FLAG_SPECS` with this command's defaults, and with its choices if it has others."""
    for name, default in defaults.items():
        declaration = WORDS[name]
        least = declaration.least if declaration.least is None or default is None else min(declaration.least, default)
        choices_offered = list((choices or {}).get(name, declaration.choices))
        if choices_offered:
            flags.DEFINE_enum(name, default, choices_offered, declaration.help, flag_values=values)
        elif declaration.kind is int:
            flags.DEFINE_integer(name, default, declaration.help, least, declaration.most, flag_values=values)
        elif declaration.kind is float:
            flags.DEFINE_float(name, default, declaration.help, least, declaration.most, flag_values=values)
        else:
            flags.DEFINE_string(name, default, declaration.help, flag_values=values)


def define_settings(values: FlagValues) -> FlagValues:
    """Declares a flag for each setting that `values` lacks; `Settings.check` refuses bad values."""
    kinds: dict[type, Any] = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for each in fields(Settings):
        if each.name not in values:
            kinds[type(each.default)](each.name, each.default, each.metadata["help"], flag_values=values)
    flags.DEFINE_bool("print_config", False, "print the resolved settings as TOML and stop", flag_values=values)
    return values


def read(values: FlagValues, argv: Sequence[str], positional: str = "") -> None:
    """Parses `argv` (program name first) into `values`; --max-model-len means --max_model_len. `positional`: the flag
    that takes one bare argument. Raises FlagError with one line."""
    try:
        rest = values([argv[0], *map(underscored, argv[1:])])
    except flags.UnrecognizedFlagError as error:
        raise FlagError(_unknown(error.flagname, list(values))) from error
    except flags.Error as error:
        why = _removed_value(map(underscored, argv[1:])) or str(error).replace("\n", " ")
        raise FlagError(why) from error
    if len(rest) == 2 and positional and not values[positional].present:
        values[positional].parse(rest.pop())
    if len(rest) > 1:
        raise FlagError(f"{rest[1]!r} is not a flag; flags are written --name=value")


def give(values: FlagValues, name: str, value: Any, where: str) -> None:
    """Sets a flag that is not on the command line. Raises FlagError that begins with `where`."""
    if values[name].present:
        return
    try:
        values[name].parse(value)
    except flags.Error as error:
        if (name, value) in REMOVED_VALUES:
            raise FlagError(f"{where} is {value!r}: it {REMOVED_VALUES[name, value]}") from error
        why = str(error).replace("\n", " ").partition(": ")[2]
        raise FlagError(f"{where} is {value!r}: {why}") from error


def kind_of(values: FlagValues, name: str) -> type:
    """Returns the type of the flag's value."""
    kinds: dict[str, type] = {"int": int, "float": float, "bool": bool, "comma separated list of strings": list}
    return kinds.get(values[name].flag_type(), str)


def help_of(values: FlagValues, settings: bool = False) -> str:
    """Returns one line per flag in alphabetical order; with `settings`, these follow by group."""
    shown = [values[name] for name in sorted(values) if len(name) > 1]
    shown = [flag for flag in shown if not settings or flag.name not in {*FIELDS, *NO_SETTINGS}]
    lines = [_help_line(flag.name, flag.default, flag.help or "", ()) for flag in shown if flag.name != "helpfull"]
    return "\n".join([*lines, help_text(bool(values["helpfull"].value))] if settings else lines)


def help_text(full: bool = False) -> str:
    """Returns one line per setting, by group; unless `full`, one line per group names the less common ones."""
    lines = []
    for group in GROUPS:
        lines.append(f"\n{group}:")
        group_settings = [each for each in fields(Settings) if each.metadata["group"] == group]
        shown = [each for each in group_settings if full or each.metadata["everyday"]]
        lines += [_help_line(e.name, e.default, e.metadata["help"], e.metadata["choices"]) for e in shown]
        if rest := " ".join(f"--{each.name}" for each in group_settings if each not in shown):
            lines.append(f"  also: {rest} (--helpfull explains)")
    lines.append(
        "\n  --config=FILE, --print_config, --help, --helpfull   (every flag is also a key of the --config file)"
    )
    return "\n".join(lines)


def _help_line(name: str, default: Any, text: str, choices: tuple[str, ...]) -> str:
    shown = "|".join(choices) if choices else text
    text = f"{shown}: {text}" if choices else text
    return f"  --{name}={default}".ljust(38) + f" {text}"


def underscored(argument: str) -> str:
    """Returns the flag as it is declared: --max-model-len=1 means --max_model_len=1."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _removed_value(arguments: Iterable[str]) -> str:
    """Returns the error for the first --name=value whose value was removed; empty if there is none."""
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if (name, value) in REMOVED_VALUES:
            return f"--{name}={value} {REMOVED_VALUES[name, value]}"
    return ""


def _unknown(name: str, known: list[str]) -> str:
    """Returns the error for a flag that this command does not have: its replacement, or the nearest known name."""
    if name in REMOVED:
        return f"--{name} {REMOVED[name]}"
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean --{nearest[0]}?" if nearest else "; --help lists them"
    return f"unknown flag --{name}{hint}"


# The values of a run, by priority: flags, environment (`JDISAGG_<NAME>`), a TOML file, defaults.


def resolve(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[Settings, FlagValues]:
    """Returns the settings of `jdisagg launch`. Raises ConfigError with one line for a bad value."""
    values = define_settings(own())
    read(values, argv)
    fill(values, environment)
    return settings_of(values), values


def settings_of(values: FlagValues, **instead: Any) -> Settings:
    """Returns checked settings; `instead` replaces the values of some flags. Raises ConfigError."""
    flag_values: dict[str, Any] = {each.name: values[each.name].value for each in fields(Settings)}
    settings = Settings(**flag_values | instead)
    settings.check()
    return settings


def fill(values: FlagValues, environment: Mapping[str, str] = os.environ) -> None:
    """Fills flags that were not given, from the environment or else the file of --config. Raises ConfigError."""
    for name in values:
        text = environment.get(f"JDISAGG_{name.upper()}")
        if text is not None and name not in NO_SETTINGS:
            give(values, name, text, f"JDISAGG_{name.upper()}")
    for name, why in REMOVED.items():
        if f"JDISAGG_{name.upper()}" in environment:
            raise FlagError(f"JDISAGG_{name.upper()} {why}")
    if values["config"].value:
        for key, value in read_toml(values["config"].value, values).items():
            give(values, key, value, f"--config={values['config'].value}: {key}")


def read_toml(path: str, values: FlagValues) -> dict[str, Any]:
    """Returns values of these flags in a TOML file; tables only group them, and keys of other commands are skipped.
    Raises ConfigError for an unknown key or a value of the wrong type."""
    values_by_name: dict[str, Any] = {}
    known = {name for name in values if name not in NO_SETTINGS}
    for key, value in _flattened(parse_toml(path)):
        if key in known:
            values_by_name[key] = _checked(kind_of(values, key), value, f"--config={path}: {key}")
        elif key in REMOVED:
            raise FlagError(f"--config={path}: {key!r} {REMOVED[key]}")
        elif key not in WORDS:
            nearest = difflib.get_close_matches(key, known, n=1)
            raise FlagError(
                f"--config={path}: unknown key {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
            )
    return values_by_name


def parse_toml(path: str) -> dict[str, Any]:
    """Returns the content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"--config={path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"--config={path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config={path}: {error}") from error


def as_toml(settings: Settings) -> str:
    """Returns the resolved settings as text that `--config` reads."""
    lines: list[str] = []
    for group in GROUPS:
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
