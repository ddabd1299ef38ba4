"""The page of metrics, read from the registry that `/metrics` renders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import table
from jdisagg.policy.scaling import RoleScaler, Scaling
from jdisagg.serve.observability.metrics import NAMES, Metrics

INTRO = """# Metrics

`GET /metrics` of the router's process, in Prometheus' text format; it speaks of all workers, wherever they
run. Base units everywhere: seconds, bytes, tokens. Every sample has the label `model_name`. Queries to start with stand
under [alerts](operations.md#alerts)."""
COMPATIBLE = "## Under other servers' names\n\n`--metrics_compat=vllm,jetstream` exports these as well."


def registered() -> list[Any]:
    """Every family of a running router."""
    metrics = Metrics("model", recompiles=lambda: 0.0)
    metrics.watch_held("prefill-0", lambda: (0, 0))
    metrics.watch_scaling(RoleScaler(Scaling(), ()))
    metrics.watch_connections(lambda: 0, ("silent",))
    return [*metrics._families.registry._collector_to_names]


def rows() -> Iterator[tuple[str, str, str, str]]:
    for collector in registered():
        family = next(iter(collector.describe()))
        labels = ", ".join(f"`{each}`" for each in collector._labelnames if each != "model_name")
        suffix = "_total" if family.type == "counter" else ""
        yield f"`{family.name}{suffix}`", family.type, labels, family.documentation


def compatible() -> Iterator[tuple[str, str, str]]:
    ours = sorted({name for names in NAMES.values() for name in names})
    for name in ours:
        vllm, jetstream = (NAMES[kind].get(name, "") for kind in ("vllm", "jetstream"))
        yield f"`jdisagg_{name}`", coded(vllm), coded(jetstream)


def coded(name: str) -> str:
    return f"`{name}`" if name else ""


def text() -> str:
    own = table(("metric", "kind", "labels", "meaning"), sorted(rows()))
    theirs = table(("ours", "`vllm`", "`jetstream`"), compatible())
    return f"{INTRO}\n\n{own}\n\n{COMPATIBLE}\n\n{theirs}"
