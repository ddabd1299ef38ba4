"""Adapters: what a few numbers a matrix add to a model's weights (LoRA, Hu et al. 2021), and what names one.

A request says which one it asks for, so that whoever computes it, be it after a restart or instead of another, knows
what to read. An adapter is its files: the digest of their bytes tells two of one name apart, and is in the names of KV
pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
USUAL_SLOTS = 4
DIGEST = re.compile(r"[0-9a-f]{32}")
SALT = "\0"  # no client's cache_salt begins so


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, as a request names it."""

    name: str
    digest: str  # of its files
    folder: str

    @property
    def salt(self) -> str:
        """What its KV is named by."""
        return f"{SALT}{self.digest}"


def salted(cache_salt: str, adapter: Adapter | None) -> str:
    """What the KV of a tenant's requests to an adapter is named by: it is shared with no other's."""
    return cache_salt if adapter is None else adapter.salt + cache_salt


def adapter_sizes(settings: Settings) -> dict[str, Any]:
    """How many adapters one step may hold, and of what rank; nothing where none are asked for. Raises ConfigError."""
    named = len(named_folders(settings.lora))
    if not (named or settings.enable_lora or settings.max_loras):
        return {}
    return {"max_loras": settings.max_loras or named or USUAL_SLOTS, "max_lora_rank": settings.max_lora_rank}


def named_folders(text: str) -> dict[str, str]:
    """--lora: folders by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in filter(None, (each.strip() for each in text.split(","))):
        name, equals, folder = entry.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--lora has {entry!r}, must be NAME=FOLDER, several with commas")
        if NAME.fullmatch(name) is None:
            raise ConfigError(f"--lora names {name!r}, must be up to 128 letters, digits and any of . _ / : -")
        if name in found:
            raise ConfigError(f"--lora names {name!r} twice, for {found[name]} and {folder}")
        found[name] = folder
    return found
