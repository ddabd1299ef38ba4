"""How evenly tokens are spread over experts, as Prometheus asks for it: read from what the machines have counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jdisagg.engine.expert_load import ExpertLoad

LABELS = ("model_name", "worker", "layer")
Loads = Callable[[], Mapping[str, Sequence[ExpertLoad]]]  # of each worker, layer group by layer group


class ExpertLoadCollector(Collector):
    """The families of expert load, without samples where no worker of this process has counted anything."""

    def __init__(self, model: str, loads: Loads) -> None:
        self._model, self._loads = model, loads

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "jdisagg_expert_load_tokens",
            "Tokens that the layer's experts were sent, each once an expert",
            labels=LABELS,
        )
        busiest = CounterMetricFamily(
            "jdisagg_expert_load_busiest_tokens", "Those of each program's busiest expert", labels=LABELS
        )
        imbalance = GaugeMetricFamily(
            "jdisagg_expert_load_imbalance_ratio", "Tokens of the busiest expert over those of the mean", labels=LABELS
        )
        for worker, loads in self._loads().items():
            for load in loads:
                for layer, counts, most in zip(load.layers, *load.totals(), strict=True):
                    labels, total = (self._model, worker, str(layer)), int(counts.sum())
                    tokens.add_metric(labels, total)
                    busiest.add_metric(labels, int(most))
                    imbalance.add_metric(labels, int(most) * len(counts) / max(total, 1))
        yield from (tokens, busiest, imbalance)
