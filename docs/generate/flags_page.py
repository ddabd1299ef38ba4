"""The page of flags: every command's, by its own table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module

from absl import flags as absl_flags

from docs.generate.markdown import table
from jdisagg import flags
from jdisagg.__main__ import commands, module_of
from jdisagg.core.settings import Settings

HEAD = ("flag", "default", "meaning")
INTRO = """# Flags

Every flag is also a key of the TOML file of `--config` and an environment variable (`JDISAGG_MAX_NUM_SEQS=16`); flags
win over the file. A flag of one name means one thing in all commands. `--max-model-len` and
`--max_model_len` are the same."""


def declared(command: str) -> flags.FlagValues:
    """Returns the flags of `jdisagg COMMAND`, which its module declares by `declare()`."""
    return import_module(module_of(command)).declare()


def text() -> str:
    parts = [INTRO, settings_text()]
    for name, law in commands().items():
        if name != "launch":
            parts.append(command_text(name, law))
    return "\n\n".join(parts)


def settings_text() -> str:
    """The launcher's, which several other commands have too, by group; before them what it has alone."""
    own = table(HEAD, list(rows_of(declared("launch"), True)))
    parts = [f"## jdisagg.launch\n\n{own}\n\nAnd all settings of a run."]
    parts.append("## Settings of a run\n\nOf `jdisagg.launch`, `jdisagg.LLM(...)`, `jdisagg aot`, `jdisagg profile`.")
    for group in flags.GROUPS:
        rows = [
            (f"`--{each.name}`", shown(each.default), meaning(each.metadata["help"], each.metadata["choices"]))
            for each in fields(Settings)
            if each.metadata["group"] == group
        ]
        parts.append(f"### {group.capitalize()}\n\n{table(HEAD, rows)}")
    return "\n\n".join(parts)


def command_text(name: str, law: str) -> str:
    values = declared(name)
    all_settings = "print_config" in values
    rows = list(rows_of(values, all_settings))
    note = "\n\nAnd all settings of a run." if all_settings else ""
    return f"## jdisagg {name}\n\n{law}\n\n{table(HEAD, rows)}{note}"


def rows_of(values: flags.FlagValues, all_settings: bool) -> Iterator[tuple[str, str, str]]:
    for name in sorted(values):
        hidden = {"help", "helpfull", *([*flags.FIELDS, *flags.NO_SETTINGS] if all_settings else [])}
        if len(name) > 1 and name not in hidden:
            flag = values[name]
            choices = tuple(flag.parser.enum_values) if isinstance(flag, absl_flags.EnumFlag) else ()
            yield f"`--{name}`", shown(flag.default), meaning(flag.help or "", choices)


def shown(default: object) -> str:
    return f"`{','.join(default) if isinstance(default, list) else default}`" if default not in ("", None) else ""


def meaning(help: str, choices: tuple[str, ...]) -> str:
    return f"{' | '.join(f'`{each}`' for each in choices)}: {help}" if choices else help
