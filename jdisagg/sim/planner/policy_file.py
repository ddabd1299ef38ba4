"""The plan as `jdisagg.launch` takes it: a TOML file of settings, each in its group, and why in comments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.sim.fleet import Sizes
from jdisagg.sim.planner.space import Candidate, Kind


def settings_of(candidate: Candidate, sizes: Sizes) -> dict[str, Any]:
    """What was simulated, by the names of `Settings`."""
    stages = max(pool.pp for pool in candidate.mesh.pools)
    found: dict[str, Any] = {
        "mesh": str(candidate.mesh),
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": sizes.num_slots * stages,
        "max_num_batched_tokens": candidate.chunk_tokens,
        "max_chunk_seqs": sizes.max_chunk_seqs,
        "page_size": sizes.page_size,
        "turns_ahead": sizes.turns_ahead,
        "reserve_tokens": sizes.reserve_tokens,
    }
    if candidate.kind is Kind.DISAGGREGATED:
        found["transfer"] = str(candidate.transfer)
    return found


def as_policy(settings: Mapping[str, Any], why: Sequence[str]) -> str:
    """TOML text. Raises ConfigError for a setting that cannot be."""
    known = {each.name: each for each in fields(Settings)}
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"no setting {', '.join(unknown)} among those of jdisagg.launch")
    Settings(**settings).check()
    groups: dict[str, list[str]] = {}
    for name, value in settings.items():
        groups.setdefault(known[name].metadata["group"], []).append(f"{name} = {json.dumps(value)}")
    lines = [f"# {line}" for line in why]
    for group, rows in groups.items():
        lines += ["", f"[{group}]", *rows]
    return "\n".join(lines) + "\n"
