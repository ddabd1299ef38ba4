"""Where this process stands: --labels, and for what it does not say, the host's name and what schedulers tell."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from jdisagg.core.labels import LONGEST_LABEL, NAMES, Labels

# The first of a label's variables that is set says it: Kubernetes' downward API (names that manifests give), SLURM's
# topology plugin and node name, and what TPU VMs are told of their slice.
VARIABLES: dict[str, tuple[str, ...]] = {
    "host": ("NODE_NAME", "SLURMD_NODENAME", "HOSTNAME"),
    "rack": ("NODE_RACK",),
    "slice": ("MEGASCALE_SLICE_ID", "JOB_INDEX", "LWS_GROUP_INDEX"),
    "pod": ("NODE_BLOCK",),
}
JOBS = ("TPU_NAME", "JOBSET_NAME", "LWS_NAME")  # a slice is numbered within its job, or is all of it
SLURM_TREE = "SLURM_TOPOLOGY_ADDR"  # as spine.leaf.node; its pattern, switch.switch.node, is in the next
SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"


def here(text: str, environment: Mapping[str, str] = os.environ, hostname: str = "", process: int = 0) -> Labels:
    """Of this process. Raises ConfigError where `text`, the flag's, cannot be."""
    given = Labels.parse(text)
    hostname, process = hostname or socket.gethostname(), process or os.getpid()
    found = {name: _first(environment, VARIABLES.get(name, ())) for name in NAMES} | _slurm(environment)
    found["host"] = found["host"] or _clean(hostname)
    found["slice"] = _clean("/".join(filter(None, (_first(environment, JOBS), found["slice"]))))
    found["process"] = _clean(f"{hostname}/{process}")
    return replace(given, **{name: value for name, value in found.items() if value and not getattr(given, name)})


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return _clean(next((environment[name] for name in names if environment.get(name)), ""))


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Switches as SLURM's tree names them: the one above the node is its rack, the topmost its pod."""
    kinds = environment.get(SLURM_PATTERN, "").split(".")
    switches = [
        name
        for kind, name in zip(kinds, environment.get(SLURM_TREE, "").split("."), strict=False)
        if kind == "switch" and name
    ]
    named = {"rack": switches[-1]} if switches else {}
    return {name: _clean(value) for name, value in (named | ({"pod": switches[0]} if switches[1:] else {})).items()}


def _clean(text: str) -> str:
    """As a label can be: what schedulers say is not the user's mistake."""
    return "".join(each if each.isprintable() and each not in ", =" else "-" for each in text)[:LONGEST_LABEL]
