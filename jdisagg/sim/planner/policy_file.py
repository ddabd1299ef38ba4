"""The plan as `jdisagg.launch` takes it: a TOML file of settings, each in its group, and why in comments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.planner.space import Candidate, Kind


def settings_of(candidate: Candidate, given: ClusterSpec) -> dict[str, Any]:
    """What was simulated, by the names of `Settings`."""
    prefill = next(each for each in given.workers if each.role.prefills)
    decode = next(each for each in given.workers if each.role.decodes)
    found: dict[str, Any] = {
        "mesh": str(candidate.mesh),
        "max_model_len": decode.max_model_len,
        "max_num_seqs": decode.num_slots,
        "max_num_batched_tokens": prefill.prefill_buckets[-1],
        "max_chunk_seqs": prefill.max_chunk_seqs,
        "page_size": decode.page_size,
        "steps_in_flight": decode.steps_in_flight,
        "reserve_tokens": decode.reserve_tokens,
    }
    if candidate.kind is Kind.DISAGGREGATED:
        found["transfer"] = str(candidate.transfer)
    if given.routing is not None:
        found["routing"] = str(given.routing)
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
