"""One field of the settings: its default, its group and its line of help."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, group: str, help: str, choices: tuple[str, ...] = (), everyday: bool = False) -> Any:
    metadata = {"group": group, "help": help, "choices": choices, "everyday": everyday}
    return field(default=default, metadata=metadata)


def everyday(default: Any, group: str, help: str, choices: tuple[str, ...] = ()) -> Any:
    """One that --help explains; of the others it has the names, and --helpfull all."""
    return setting(default, group, help, choices, everyday=True)
