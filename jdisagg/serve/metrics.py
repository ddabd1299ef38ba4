"""Prometheus metrics as a fold over what the driver observes. Nothing is exported that no observation feeds.

What is free on a worker is what the router was told, wherever the worker is; what workers of other processes count
comes by `MergedRegistry`.

Base units everywhere (seconds, bytes, tokens); every sample has the label `model_name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.autoscaler import Load, Replicas
from jdisagg.policy.role_scaler import RoleScaler
from jdisagg.policy.worker import Worker
from jdisagg.serve.adapter_metrics import AdapterCollector
from jdisagg.serve.expert_metrics import ExpertLoadCollector, Loads
from jdisagg.serve.metric_families import Families, by_kind, kind_of
from jdisagg.serve.metrics_compat import Aliases
from jdisagg.serve.remote_metrics import MergedRegistry
from jdisagg.serve.request_metrics import RequestMetrics
from jdisagg.serve.service import Capacity
from jdisagg.serve.tier_metrics import TierMetrics
from jdisagg.serve.troubles import Troubles
from jdisagg.serve.worker_metrics import (
    DraftMetrics,
    PoolMetrics,
    PrefixCacheMetrics,
    StepMetrics,
    TransferMetrics,
    Workers,
)

LAGS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PACE_MARGIN = 0.5  # how much faster than it ever was a stack may yet prove


class Metrics:
    """`observe` is called on the driver's thread, `render` from anywhere."""

    def __init__(
        self,
        model_name: str,
        workers: Collection[WorkerConfig] = (),
        page_bytes: int = 0,
        recompiles: Callable[[], float] | None = None,
        compat: Collection[str] = (),
    ) -> None:
        """`page_bytes`: bytes of a KV page over all layers. `compat`: "vllm", "jetstream" add their names of ours."""
        registry = CollectorRegistry()
        self._families = families = Families(registry, model_name)
        self._workers: Workers = {config.worker: config for config in workers}
        self._requests, self.troubles = RequestMetrics(families), Troubles(families)
        self._pools = PoolMetrics(families, self._workers)
        self._tiers = TierMetrics(families)
        registry.register(AdapterCollector(model_name, self._adapter_slots, self._requests.adapters))
        self._folds = by_kind(
            [
                self._requests,
                self.troubles,
                StepMetrics(families),
                DraftMetrics(families),
                PrefixCacheMetrics(families, self._workers),
                TransferMetrics(families, workers, page_bytes),
                self._pools,
                self._tiers,
            ]
        )
        self._journal_drops = families.counter("journal_drops", "Journal files given up: they could not be written")
        self._limited = families.counter("requests_limited", "Requests over a limit of their client", "limit")
        lag = families.histogram(
            "event_loop_lag_seconds", "By how much timers of the servers' event loop were late", LAGS
        )
        self.lagged = lag.of().observe
        if recompiles is not None:
            compiled = families.gauge("recompiles", "Programs compiled since the server was ready")
            compiled.of().set_function(recompiles)
        self.merged = MergedRegistry(registry)
        self._aliases = Aliases(self.merged, compat)

    # ------------------------------------------------------------ in and out

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        """Folds one event or effect of `actor`; what is not counted is let by."""
        for fold in self._folds.get(kind_of(item), ()):
            fold(actor, item, now_s)

    def render(self) -> bytes:
        """Prometheus text, the aliases behind our own names."""
        return generate_latest(self.merged) + generate_latest(self._aliases)

    def capacity(self) -> Capacity | None:
        """What the workers that are there now can do at the most."""
        slots = sum(config.num_slots for config in [*self._workers.values()] if config.role.decodes)
        return Capacity(slots, self._requests.latency.fastest_s * PACE_MARGIN) if slots else None

    def _adapter_slots(self) -> int:
        return max((config.max_loras for config in [*self._workers.values()]), default=0)

    # ------------------------------------------------------------ what no event says

    def journal_dropped(self) -> None:
        """The file of --record_dir takes no more."""
        self._journal_drops.of().inc()
        self.troubles.journal_ended()

    def watch_pools(self, workers: Mapping[WorkerId, Worker]) -> None:
        """What the pages of this process's workers are for."""
        for name, worker in workers.items():
            self._pools.watch(name, worker)
            self._tiers.watch(name, worker)

    def limited(self, limit: str) -> None:
        """A request was over this limit of its client."""
        self._limited.of(limit).inc()

    def watch_held(self, worker: str, held_bytes: Callable[[], tuple[int, int]]) -> None:
        """`held_bytes`: of KV offered to other processes, and of KV pulled from them; `worker` names ours."""
        gauge = self._families.gauge("transport_bytes", "KV that offers and pulls hold, a process", "worker", "side")
        for index, side in enumerate(("offered", "pulled")):
            gauge.of(worker, side).set_function(lambda index=index: held_bytes()[index])

    def watch_experts(self, loads: Loads) -> None:
        """Of a model with experts: what this process' machines have counted; another's comes to the same families."""
        self.merged.local.register(ExpertLoadCollector(self._families.model, loads))

    def watch_scaling(self, scaler: RoleScaler) -> None:
        """What the autoscaler says of the load, as it was at its last look; nothing before it knows."""
        desired = self._families.gauge("desired_replicas", "Workers that the load asks for (--autoscale)", "role")
        busy = self._families.gauge("predicted_busy_workers", "Workers that it will keep busy (--autoscale)", "role")
        flips = self._families.gauge("autoscaler_flips", "Changes of roles that the autoscaler has asked for")
        flips.of().set_function(lambda: scaler.autoscaler.flips)
        for role in (Role.PREFILL, Role.DECODE):
            desired.of(role).set_function(lambda role=role: _of_role(scaler.autoscaler.desired(), role))
            busy.of(role).set_function(lambda role=role: _of_role(scaler.load, role))

    def watch_connections(self, count: Callable[[], int], reasons: Collection[str]) -> Callable[[str], None]:
        """`count`: of open HTTP connections. What comes back is called with the reason when the server closes one."""
        self._families.gauge("http_connections", "Open HTTP connections").of().set_function(count)
        cuts = self._families.counter(
            "http_connections_cut", "HTTP connections that the server ended or refused", "reason"
        )
        by_reason = {reason: cuts.of(reason) for reason in reasons}
        return lambda reason: by_reason[reason].inc()


def _of_role(known: Load | Replicas | None, role: Role) -> float:
    return math.nan if known is None else known.prefill if role is Role.PREFILL else known.decode
