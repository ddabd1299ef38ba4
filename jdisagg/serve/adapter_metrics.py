"""Which adapters run and wait, in the one family by which vLLM tells it and its routers read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

NAME = "jdisagg_lora_requests_info"
HELP = "Adapters of requests that run and that wait, by name; the value is the time"

Asked = Callable[[], tuple[Iterable[str], Iterable[str]]]  # names of those that run, and of those that wait


class AdapterCollector(Collector):
    """Nothing where no worker has room for adapters."""

    _labelnames = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")

    def __init__(self, model: str, slots: Callable[[], int], asked: Asked) -> None:
        self._model, self._slots, self._asked = model, slots, asked

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(NAME, HELP, labels=self._labelnames)

    def collect(self) -> Iterator[Metric]:
        slots = self._slots()
        if not slots:
            return
        (family,) = self.describe()
        assert isinstance(family, GaugeMetricFamily)
        running, waiting = (",".join(sorted({*names})) for names in self._asked())
        family.add_metric((self._model, str(slots), running, waiting), time.time())
        yield family
