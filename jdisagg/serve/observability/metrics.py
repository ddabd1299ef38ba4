"""Prometheus metrics, updated from the events and effects that the driver observes.

Free pages and slots are those that workers reported to the router, in all processes. Counters of workers in other
processes come from `MergedRegistry`. All units are base units (seconds, bytes, tokens); every sample has the label
`model_name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from jdisagg.core.errors import ConfigError
from jdisagg.core.events import EmitTokens, Finish, Received, Reject, RunStep, Submit
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Progress
from jdisagg.core.request import Request, RequestId, WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.policy.scaling import Load, Replicas, RoleScaler
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.driver.service import Capacity
from jdisagg.serve.observability.health import Troubles
from jdisagg.serve.observability.metric_families import (
    SECONDS,
    TOKENS,
    Families,
    Fold,
    Kind,
    by_kind,
    kind_of,
    observe_times,
)
from jdisagg.serve.observability.worker_metrics import (
    AdapterCollector,
    DraftMetrics,
    ExpertLoadCollector,
    Loads,
    MergedRegistry,
    PoolMetrics,
    PrefixCacheMetrics,
    StepMetrics,
    TierMetrics,
    TransferMetrics,
    Workers,
)

# Metrics of requests: counts, lengths and times.

TIMED_TOKENS = 16  # an answer's least number of tokens to count for the fastest pace


@dataclass(slots=True)
class RequestTimes:
    """The times of one request between Submit and its end."""

    request: Request
    has_started: bool = False  # True once a prefill step had the request
    first_s: float | None = None
    last_s: float = 0.0
    num_output: int = 0


class LatencyMetrics:
    """Latencies of requests, and their parts by the ledger."""

    def __init__(self, families: Families) -> None:
        ttft = families.histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        itl = families.histogram("inter_token_latency_seconds", "Between consecutive tokens of a request", SECONDS)
        tpot = families.histogram("time_per_output_token_seconds", "Mean after the first token, a request", SECONDS)
        self._ttft, self._itl, self._tpot = ttft.of(), itl.of(), tpot.of()
        self._whole = families.histogram("request_seconds", "From arrival to the end", SECONDS).of()
        self._parts = families.histogram("request_part_seconds", "Where a request's time went", SECONDS, "part")
        self._transfer = families.histogram(
            "transfer_seconds", "Of a request's KV: hidden behind its prefill, and exposed after it", SECONDS, "share"
        )
        self.fastest_s = 0.0  # seconds per token of the fastest answer; 0 before one

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        self._ttft.observe(now_s - times.request.arrival_s)

    def tokens(self, times: RequestTimes, count: int, now_s: float) -> None:
        """Observes `count` tokens that arrived together, after the first token."""
        observe_times(self._itl, (now_s - times.last_s) / count, count)

    def finish(self, times: RequestTimes, ledger: Ledger, now_s: float) -> None:
        self._whole.observe(now_s - times.request.arrival_s)
        if times.first_s is not None and times.num_output > 1:
            mean_s = (times.last_s - times.first_s) / (times.num_output - 1)
            self._tpot.observe(mean_s)
            if times.num_output >= TIMED_TOKENS:
                self.fastest_s = min(self.fastest_s or mean_s, mean_s)
        for part, nanoseconds in ledger.parts_ns().items():
            self._parts.of(part).observe(nanoseconds / 1e9)
        if ledger.wire_ns:
            for share, nanoseconds in zip(("hidden", "exposed"), ledger.transfer_ns(), strict=True):
                self._transfer.of(share).observe(nanoseconds / 1e9)


class RequestMetrics:
    """Requests of this process's router from submission to their end."""

    def __init__(self, families: Families) -> None:
        self.latency = LatencyMetrics(families)
        self._running: dict[RequestId, RequestTimes] = {}
        self._waiting = 0
        self._ended = families.counter("requests", "Requests that ended, by reason", "reason")
        self._rejected = families.counter(
            "rejects", "Requests turned away: the queue was full, or their objectives out of reach"
        )
        self._prompt_tokens = families.counter("prompt_tokens", "Prompt tokens of requests that were answered")
        self._output_tokens = families.counter("generation_tokens", "Output tokens given to clients").of()
        self._input_length = families.histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._output_length = families.histogram("request_generation_tokens", "Output tokens of a request", TOKENS)
        running = families.gauge("requests_running", "Requests whose prefill has begun").of()
        waiting = families.gauge("requests_waiting", "Requests whose prefill has not begun").of()
        running.set_function(lambda: len(self._running) - self._waiting)
        waiting.set_function(lambda: self._waiting)

    def folds(self) -> Mapping[Kind, Fold]:
        return {
            Submit: self._submit,
            RunStep: self._step,
            (Received, Progress): self._progress,
            EmitTokens: self._emit,
            Finish: self._finish,
            Reject: self._reject,
        }

    def adapters(self) -> tuple[list[str], list[str]]:
        """Returns the adapter names of running and of waiting requests. Safe from any thread."""
        used = [(times.request.sampling.adapter, times.has_started) for times in [*self._running.values()]]
        return [each.name for each, on in used if each and on], [each.name for each, on in used if each and not on]

    def _submit(self, actor: str, item: Submit, now_s: float) -> None:
        self._running[item.request.request_id] = RequestTimes(item.request)
        self._waiting += 1

    def _step(self, actor: str, item: RunStep, now_s: float) -> None:
        for chunk in item.plan.prefill.chunks if item.plan.prefill else ():
            self._start(self._running.get(chunk.request_id))

    def _progress(self, actor: str, item: Received, now_s: float) -> None:
        """Notes the prefill start of a request on a worker of another process, whose steps are not observed here."""
        assert isinstance(item.message, Progress)
        if item.message.mark is Mark.PREFILL_STARTED:
            self._start(self._running.get(item.message.attempt.request_id))

    def _start(self, times: RequestTimes | None) -> None:
        if times is not None and not times.has_started:
            times.has_started = True
            self._waiting -= 1

    def _emit(self, actor: str, item: EmitTokens, now_s: float) -> None:
        times, count = self._running.get(item.request_id), len(item.delta.sampled)
        self._output_tokens.inc(count)
        if times is None or count == 0:
            return
        if times.first_s is None:
            times.first_s = now_s
            self.latency.first_token(times, now_s)
            self._prompt_tokens.of().inc(len(times.request.prompt))
        else:
            self.latency.tokens(times, count, now_s)
        times.last_s = now_s
        times.num_output += count

    def _finish(self, actor: str, item: Finish, now_s: float) -> None:
        times = self._running.pop(item.request_id, None)
        if times is None:
            return
        self._start(times)
        self._ended.of(item.reason.value).inc()
        self._input_length.of().observe(len(times.request.prompt))
        self._output_length.of().observe(times.num_output)
        self.latency.finish(times, item.ledger, now_s)

    def _reject(self, actor: str, item: Reject, now_s: float) -> None:
        self._start(self._running.pop(item.request_id, None))
        self._rejected.of().inc()


# Aliases: our metrics under the names that dashboards of other servers use.

# Our names (without the prefix and _total) to those of other servers.
NAMES: dict[str, dict[str, str]] = {
    "vllm": {
        "requests_running": "vllm:num_requests_running",
        "requests_waiting": "vllm:num_requests_waiting",
        "kv_usage_ratio": "vllm:kv_cache_usage_perc",
        "lora_requests_info": "vllm:lora_requests_info",
        "preemptions": "vllm:num_preemptions",
        "spec_decode_drafts": "vllm:spec_decode_num_drafts",
        "spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens",
        "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
        "prefix_cache_queries": "vllm:prefix_cache_queries",
        "prefix_cache_hits": "vllm:prefix_cache_hits",
        "prompt_tokens": "vllm:prompt_tokens",
        "generation_tokens": "vllm:generation_tokens",
        "requests": "vllm:request_success",
        "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
        "time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
        "request_seconds": "vllm:e2e_request_latency_seconds",
        "request_prompt_tokens": "vllm:request_prompt_tokens",
        "request_generation_tokens": "vllm:request_generation_tokens",
        "shipped_bytes": "vllm:nixl_bytes_transferred",
        "ship_seconds": "vllm:nixl_xfer_time_seconds",
    },
    "jetstream": {
        "requests_waiting": "jetstream_num_requests_waiting",
        "kv_usage_ratio": "jetstream_kv_cache_utilization_perc",
        "requests": "jetstream_request_success_count",
        "time_to_first_token_seconds": "jetstream_time_to_first_token",
        "time_per_output_token_seconds": "jetstream_time_per_output_token",
        "request_seconds": "jetstream_time_per_request",
        "request_prompt_tokens": "jetstream_request_input_length",
        "request_generation_tokens": "jetstream_request_output_length",
    },
}
LABELS = {"vllm": {"worker": "engine", "reason": "finished_reason"}, "jetstream": {"worker": "id"}}


class Aliases(CollectorRegistry):
    """A registry whose samples are those of another one, renamed."""

    def __init__(self, source: CollectorRegistry, kinds: Collection[str]) -> None:
        super().__init__()
        unknown = sorted(set(kinds) - NAMES.keys())
        if unknown:
            raise ConfigError(f"metrics_compat has {unknown[0]!r}, must be of {', '.join(NAMES)}")
        self._source, self._kinds = source, tuple(kinds)

    def collect(self) -> Iterator[Metric]:
        """Yields every family that has an alias, under that name."""
        families = [*self._source.collect()] if self._kinds else []
        for kind in self._kinds:
            for family in families:
                theirs = NAMES[kind].get(family.name.removeprefix("jdisagg_"))
                if theirs is not None:
                    yield _renamed(family, theirs, LABELS[kind])


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        Sample(
            name + each.name.removeprefix(family.name),
            {labels.get(key, key): value for key, value in each.labels.items()},
            *each[2:],
        )
        for each in family.samples
    ]
    return renamed


LAGS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PACE_MARGIN = 0.5  # a stack is assumed to be able to take this share of the least seconds per token so far


class Metrics:
    """All metrics of a process. `observe` is called on the driver's thread, `render` from any thread."""

    def __init__(
        self,
        model_name: str,
        workers: Collection[WorkerConfig] = (),
        page_bytes: int = 0,
        recompiles: Callable[[], float] | None = None,
        compat: Collection[str] = (),
    ) -> None:
        """`page_bytes` counts all layers of a KV page. `compat` ("vllm", "jetstream") adds that server's names."""
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

    # ------------------------------------------------------------ updates and output

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        """Updates metrics from one event or effect of `actor`; other types are ignored."""
        for fold in self._folds.get(kind_of(item), ()):
            fold(actor, item, now_s)

    def render(self) -> bytes:
        """Returns the Prometheus text, aliases after our own names."""
        return generate_latest(self.merged) + generate_latest(self._aliases)

    def capacity(self) -> Capacity | None:
        """Returns the capacity of the workers that are present now; None without decode workers."""
        slots = sum(config.num_slots for config in [*self._workers.values()] if config.role.decodes)
        return Capacity(slots, self._requests.latency.fastest_s * PACE_MARGIN) if slots else None

    def _adapter_slots(self) -> int:
        return max((config.max_loras for config in [*self._workers.values()]), default=0)

    # ------------------------------------------------------------ values that no event has

    def journal_dropped(self) -> None:
        """Notes that the file of --record_dir cannot be written any more."""
        self._journal_drops.of().inc()
        self.troubles.journal_ended()

    def watch_pools(self, workers: Mapping[WorkerId, Worker]) -> None:
        for name, worker in workers.items():
            self._pools.watch(name, worker)
            self._tiers.watch(name, worker)

    def limited(self, limit: str) -> None:
        self._limited.of(limit).inc()

    def watch_held(self, worker: str, held_bytes: Callable[[], tuple[int, int]]) -> None:
        """Adds gauges of KV bytes offered to other processes and pulled from them; `worker` is ours."""
        gauge = self._families.gauge("transport_bytes", "KV that offers and pulls hold, a process", "worker", "side")
        for index, side in enumerate(("offered", "pulled")):
            gauge.of(worker, side).set_function(lambda index=index: held_bytes()[index])

    def watch_experts(self, loads: Loads) -> None:
        """Adds expert load of this process's executors; other processes' samples join the same families."""
        self.merged.local.register(ExpertLoadCollector(self._families.model, loads))

    def watch_scaling(self, scaler: RoleScaler) -> None:
        """Adds gauges of the autoscaler's last evaluation; NaN before the first one."""
        desired = self._families.gauge("desired_replicas", "Workers that the load asks for (--autoscale)", "role")
        busy = self._families.gauge("predicted_busy_workers", "Workers that it will keep busy (--autoscale)", "role")
        flips = self._families.gauge("autoscaler_flips", "Changes of roles that the autoscaler has asked for")
        flips.of().set_function(lambda: scaler.autoscaler.flips)
        for role in (Role.PREFILL, Role.DECODE):
            desired.of(role).set_function(lambda role=role: _of_role(scaler.autoscaler.desired(), role))
            busy.of(role).set_function(lambda role=role: _of_role(scaler.load, role))

    def watch_connections(self, count: Callable[[], int], reasons: Collection[str]) -> Callable[[str], None]:
        """Adds metrics of open HTTP connections; returns a function to call with the reason for each closed one."""
        self._families.gauge("http_connections", "Open HTTP connections").of().set_function(count)
        cuts = self._families.counter(
            "http_connections_cut", "HTTP connections that the server ended or refused", "reason"
        )
        by_reason = {reason: cuts.of(reason) for reason in reasons}
        return lambda reason: by_reason[reason].inc()


def _of_role(known: Load | Replicas | None, role: Role) -> float:
    return math.nan if known is None else known.prefill if role is Role.PREFILL else known.decode
