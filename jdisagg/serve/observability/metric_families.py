"""Prometheus families with the label `model_name`, and the folds that update them from the driver's events."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jdisagg.core.events import Received, Send

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

M = TypeVar("M", Counter, Gauge, Histogram)
Kind = type | tuple[type, type]  # an event or effect; for a message, (Send or Received, its type)
Fold = Callable[[str, Any, float], None]  # (actor, event or effect, now_s)


@dataclass(frozen=True, slots=True)
class Family(Generic[M]):
    """A Prometheus metric with the label `model_name` set."""

    metric: M
    model: str

    def of(self, *labels: str) -> M:
        return self.metric.labels(self.model, *labels)

    def remove(self, *labels: str) -> None:
        """Removes the samples with these labels. Raises KeyError without such samples."""
        self.metric.remove(self.model, *labels)


@dataclass(frozen=True, slots=True)
class Families:
    """Creates metric families in `registry`, with the prefix `jdisagg_`."""

    registry: CollectorRegistry
    model: str

    def counter(self, name: str, help: str, *labels: str) -> Family[Counter]:
        return Family(Counter(f"jdisagg_{name}", help, ("model_name", *labels), registry=self.registry), self.model)

    def gauge(self, name: str, help: str, *labels: str) -> Family[Gauge]:
        return Family(Gauge(f"jdisagg_{name}", help, ("model_name", *labels), registry=self.registry), self.model)

    def histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Family[Histogram]:
        names = ("model_name", *labels)
        made = Histogram(f"jdisagg_{name}", help, names, registry=self.registry, buckets=buckets)
        return Family(made, self.model)


class Group(Protocol):
    """Metrics of one subject that events update."""

    def folds(self) -> Mapping[Kind, Fold]: ...


def by_kind(groups: Iterable[Group]) -> dict[Kind, list[Fold]]:
    found: dict[Kind, list[Fold]] = {}
    for group in groups:
        for kind, fold in group.folds().items():
            found.setdefault(kind, []).append(fold)
    return found


def observe_times(histogram: Histogram, value: float, times: int) -> None:
    """Observes `value` `times` times at the cost of one observation.

    A dispatch of several steps gives each stream several tokens at equal intervals.
    """
    bounds: Any = histogram._upper_bounds  # as in `Histogram.observe`, which takes no count
    histogram._buckets[bisect_left(bounds, value)].inc(times)
    histogram._sum.inc(value * times)


def kind_of(item: Any) -> Kind:
    return (type(item), type(item.message)) if isinstance(item, Send | Received) else type(item)
