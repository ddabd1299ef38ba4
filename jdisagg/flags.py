"""Flags: how every command reads them, with the nearest name for a misspelt one; and those that `Settings` has.

A command declares its flags in an `own()` and is run by `command`: --help, one line and exit code 2 for a mistake.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from absl import flags

from jdisagg.core.errors import FlagError, JdisaggError
from jdisagg.core.settings import Settings

FlagValues = flags.FlagValues
BAD_USE, INTERRUPTED = 2, 130
GROUPS = ("model", "mesh", "sizes", "scheduling", "transfer", "cluster", "server", "one-shot", "running")


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], FlagValues]:
    """The settings given in `argv` (program name first) and the flags themselves. Raises FlagError in one line."""
    values = declare()
    read(values, argv)
    return {each.name: values[each.name].value for each in fields(Settings) if values[each.name].present}, values


def own() -> FlagValues:
    """Flags apart from those that imported libraries declare; none yet but --help."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "show this", short_name="h", flag_values=values)
    return values


def read(values: FlagValues, argv: Sequence[str], *, others: bool = False) -> list[str]:
    """Fills `values` from `argv` (program name first), --max-model-len meaning --max_model_len.

    Returns what is left of `argv`: the program's name and, where `others` may follow, the flags that are not in
    `values`. Raises FlagError in one line.
    """
    try:
        rest = values([argv[0], *map(underscored, argv[1:])], known_only=others)
    except flags.UnrecognizedFlagError as error:
        raise FlagError(_unknown(error.flagname, list(values))) from error
    except flags.Error as error:
        raise FlagError(str(error).replace("\n", " ")) from error
    if len(rest) > 1 and not others:
        raise FlagError(f"{rest[1]!r} is not a flag; flags are written --name=value")
    return rest


def command(
    name: str, law: str | None, values: FlagValues, argv: Sequence[str], body: Callable[[FlagValues], int]
) -> int:
    """Exit code of `body` with the flags of `argv`, or 2 with one line on stderr that begins with `name`.

    `law` (the docstring of the command's file) is what --help shows before the flags.
    """
    try:
        read(values, argv)
        if values["help"].value:
            print(f"{law or ''}\n{help_of(values)}")
            return 0
        return body(values)
    except JdisaggError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        return INTERRUPTED


def help_of(values: FlagValues) -> str:
    """One line a flag, in the order of the alphabet."""
    shown = [values[name] for name in sorted(values) if len(name) > 1]
    return "\n".join(_help_line(flag.name, flag.default, flag.help or "", ()) for flag in shown)


def declare() -> FlagValues:
    """A flag for each of the settings."""
    values = own()
    define: dict[type, Any] = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for each in fields(Settings):
        define[type(each.default)](each.name, each.default, each.metadata["help"], flag_values=values)
    flags.DEFINE_string("config", "", "TOML file with any of these as keys; flags win", flag_values=values)
    flags.DEFINE_bool("print_config", False, "print the resolved settings as TOML and stop", flag_values=values)
    return values


def define_settings(values: FlagValues, *names: str) -> None:
    """Flags for some of the settings, by the names, words and defaults that `jdisagg.launch` has for them."""
    for each in fields(Settings):
        if each.name in names:
            choices, text = list(each.metadata["choices"]), each.metadata["help"]
            flags.DEFINE_enum(each.name, str(each.default), choices, text, flag_values=values)


def help_text() -> str:
    """One line a flag, grouped."""
    lines = ["python -m jdisagg.launch [--flag=value ...]   (every flag is also a key of the --config file)"]
    for group in GROUPS:
        lines.append(f"\n{group}:")
        for each in fields(Settings):
            if each.metadata["group"] == group:
                lines.append(_help_line(each.name, each.default, each.metadata["help"], each.metadata["choices"]))
    lines.append("\n  --config=FILE, --print_config, --help")
    return "\n".join(lines)


def _help_line(name: str, default: Any, text: str, choices: tuple[str, ...]) -> str:
    shown = "|".join(choices) if choices else text
    text = f"{shown}: {text}" if choices else text
    return f"  --{name}={default}".ljust(38) + f" {text}"


def underscored(argument: str) -> str:
    """The flag as it is declared: --max-model-len=1 means --max_model_len=1."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean --{nearest[0]}?" if nearest else "; --help lists them"
    return f"unknown flag --{name}{hint}"
