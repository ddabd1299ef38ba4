"""Metrics of worker processes, pushed to the router's process each second, so that its /metrics cover all workers.

A process sends the samples that name a worker (those of programs, shipments and failures; what is free comes with the
workers' views already) and the router's process shows them beside its own. They are forgotten with the process's link.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

from jdisagg.core.errors import BadTicket

PUSH_INTERVAL_S = 1.0
WORKER_LABELS = frozenset({"worker", "source", "destination"})
Samples = dict[str, list[Sample]]  # by the name of their family


def samples_of(registry: CollectorRegistry) -> list[list[Any]]:
    """[family, sample, labels, value] of every sample that names a worker, JSON values only."""
    return [
        [family.name, each.name, each.labels, each.value]
        for family in registry.collect()
        for each in family.samples
        if WORKER_LABELS & each.labels.keys()
    ]


def read_samples(rows: Any) -> Samples:
    """What `samples_of` made. Raises BadTicket where it is nothing of the kind."""
    found: Samples = {}
    try:
        for family, name, labels, value in rows:
            texts = {str(key): str(text) for key, text in labels.items()}
            if not (isinstance(name, str) and name.startswith(family)):
                raise ValueError(f"{name!r} is no sample of {family!r}")
            found.setdefault(family, []).append(Sample(name, texts, float(value)))
    except (TypeError, ValueError, AttributeError) as error:
        raise BadTicket(f"a peer counts what cannot be read: {error}") from error
    return found


def family_of(name: str) -> str:
    """The family that a sample of this name is of."""
    for suffix in ("_total", "_sum", "_count"):
        name = name.removesuffix(suffix)
    return name


class MergedRegistry(CollectorRegistry):
    """The samples of this process and, in the same families, those that others sent. Any thread may call."""

    def __init__(self, local: CollectorRegistry) -> None:
        super().__init__()
        self.local = local
        self._lock = threading.Lock()
        self._remote: dict[Any, Samples] = {}

    def update(self, link: Any, samples: Samples) -> None:
        """The latest samples of one process; they replace those before."""
        with self._lock:
            self._remote[link] = samples

    def forget(self, link: Any) -> None:
        with self._lock:
            self._remote.pop(link, None)

    def values(self, names: Collection[str]) -> Iterator[Sample]:
        """The samples of these names alone, of all processes: what is not asked for is not worked out."""
        with self._lock:
            remote = list(self._remote.values())
        for family in self.local.restricted_registry(names).collect():
            yield from family.samples
        for samples in remote:
            for name in names:
                yield from (each for each in samples.get(family_of(name), ()) if each.name == name)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            remote = list(self._remote.values())
        for family in self.local.collect():
            for samples in remote:
                family.samples.extend(samples.get(family.name, ()))
            yield family
