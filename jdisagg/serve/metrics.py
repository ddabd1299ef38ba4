"""Prometheus metrics as a fold over what the driver observes. Nothing is exported that no observation feeds.

What is free on a worker is what the router was told, wherever the worker is; what workers of other processes count
comes by `MergedRegistry`.

Base units everywhere (seconds, bytes, tokens); every sample has the label `model_name`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jdisagg.core.events import (
    EmitTokens,
    EngineFailed,
    Finish,
    KVArrived,
    Received,
    Reject,
    RunDecode,
    RunPrefill,
    Send,
    ShipKV,
    Submit,
    WorkerJoined,
    WorkerLost,
)
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Ended, Preempted, Progress, Resend, Reserve, Reserved, StartPrefill, View
from jdisagg.core.plans import KVTransfer
from jdisagg.core.request import FinishReason, Request, RequestId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.worker_state import empty_view
from jdisagg.serve.metrics_compat import Aliases
from jdisagg.serve.remote_metrics import MergedRegistry
from jdisagg.serve.service import Capacity

TIMED_TOKENS = 16  # of an answer, from which its pace counts
LAGS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PACE_MARGIN = 0.5  # how much faster than it ever was a stack may yet prove
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class _RequestTimes:
    """One request between Submit and its end."""

    request: Request
    started: bool = False  # a prefill plan has held it
    first_s: float | None = None
    last_s: float = 0.0
    num_output: int = 0


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
        self.registry = CollectorRegistry()
        self._model, self._page_bytes = model_name, page_bytes
        self._workers: dict[str, WorkerConfig] = {config.worker: config for config in workers}
        self._running: dict[RequestId, _RequestTimes] = {}
        self._waiting = 0
        self._fastest_s = 0.0  # a token, over the best of all answers
        self._num_layers = max((config.layer_groups[-1][1] for config in workers if config.layer_groups), default=1)
        self._make_request_metrics()
        self._make_worker_metrics(recompiles)
        self.merged = MergedRegistry(self.registry)
        self._aliases = Aliases(self.merged, compat)
        self._folds: dict[type, Callable[[str, Any, float], None]] = {
            Submit: self._submit,
            EmitTokens: self._emit,
            Finish: self._finish,
            Reject: self._reject,
            RunPrefill: self._prefill,
            RunDecode: self._decode,
            ShipKV: self._ship,
            KVArrived: self._arrived,
            Send: self._send,
            Received: self._received,
            WorkerJoined: self._joined,
            WorkerLost: self._lost,
            EngineFailed: self._engine_failed,
        }

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"jdisagg_{name}", help, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"jdisagg_{name}", help, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"jdisagg_{name}", help, ("model_name", *labels), registry=self.registry, buckets=buckets)

    def _make_request_metrics(self) -> None:
        model = self._model
        self._requests = self._counter("requests", "Requests that ended, by reason", "reason")
        self._journal_drops = self._counter("journal_drops", "Journal files given up: they could not be written")
        self._rejects = self._counter("rejects", "Requests turned away because the queue was full")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were answered")
        self._output_tokens = self._counter("generation_tokens", "Output tokens given to clients").labels(model)
        ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        itl = self._histogram("inter_token_latency_seconds", "Between consecutive tokens of a request", SECONDS)
        self._ttft, self._itl = ttft.labels(model), itl.labels(model)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean after the first token, a request", SECONDS)
        self._e2e = self._histogram("request_seconds", "From arrival to the end", SECONDS)
        self._parts = self._histogram("request_part_seconds", "Where a request's time went", SECONDS, "part")
        self._input_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens of a request", TOKENS)
        lag = self._histogram("event_loop_lag_seconds", "By how much timers of the servers' event loop were late", LAGS)
        self.lagged = lag.labels(model).observe
        running = self._gauge("requests_running", "Requests whose prefill has begun").labels(model)
        waiting = self._gauge("requests_waiting", "Requests whose prefill has not begun").labels(model)
        running.set_function(lambda: len(self._running) - self._waiting)
        waiting.set_function(lambda: self._waiting)

    def _make_worker_metrics(self, recompiles: Callable[[], float] | None) -> None:
        self._kv_pages = self._gauge(
            "kv_pages", "KV pages that a reservation may take (free), and the others (used)", "worker", "state"
        )
        self._kv_usage = self._gauge("kv_usage_ratio", "Share of KV pages that no reservation may take", "worker")
        self._sequences = self._gauge("decode_sequences", "Sequences decoding, and room for more", "worker", "state")
        self._backlog = self._gauge("prefill_backlog_tokens", "Prompt tokens not yet prefilled", "worker")
        self._prefill_tokens = self._counter("prefill_tokens", "Tokens run through prefill", "worker")
        self._prefill_runs = self._counter("prefill_runs", "Prefill programs run", "worker")
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in kept KV", "worker")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV was there", "worker")
        self._decode_runs = self._counter("decode_runs", "Decode steps run", "worker")
        self._decode_batch = self._histogram("decode_batch_sequences", "Sequences in a step", SEQUENCES, "worker")
        self._ship_bytes = self._counter("shipped_bytes", "KV shipped between workers", "source", "destination")
        self._transfer_s = self._histogram(
            "transfer_seconds", "Of a request's KV: hidden behind its prefill, and exposed after it", SECONDS, "share"
        )
        self._stream_tokens = self._gauge(
            "stream_prompt_tokens", "--transfer=auto: prompt tokens from which KV leaves as it is computed", "worker"
        )
        self._resends = self._counter("parts_resent", "Parts of KV asked for again, broken or missing", "worker")
        self._ship_s = self._histogram(
            "ship_seconds", "Of a part, from packed to arrived", SECONDS, "source", "destination"
        )
        self._preemptions = self._counter("preemptions", "Sequences sent back to prefill for want of pages", "worker")
        self._nan_logits = self._counter("nan_logits", "Sequences ended because logits were no numbers", "worker")
        self._failures = self._counter("engine_failures", "Programs or transfers that raised", "worker")
        if recompiles is not None:
            gauge = self._gauge("recompiles", "Programs compiled since the server was ready")
            gauge.labels(self._model).set_function(recompiles)

    def journal_dropped(self) -> None:
        """The file of --record_dir takes no more."""
        self._journal_drops.labels(self._model).inc()

    def watch_held(self, worker: str, held_bytes: Callable[[], tuple[int, int]]) -> None:
        """`held_bytes`: of KV offered to other processes, and of KV pulled from them; `worker` names ours."""
        gauge = self._gauge("transport_bytes", "KV that offers and pulls hold, a process", "worker", "side")
        for index, side in enumerate(("offered", "pulled")):
            gauge.labels(self._model, worker, side).set_function(lambda index=index: held_bytes()[index])

    def watch_connections(self, count: Callable[[], int], reasons: Collection[str]) -> Callable[[str], None]:
        """`count`: of open HTTP connections. What comes back is called with the reason when the server closes one."""
        self._gauge("http_connections", "Open HTTP connections").labels(self._model).set_function(count)
        cuts = self._counter("http_connections_cut", "HTTP connections that the server ended or refused", "reason")
        by_reason = {reason: cuts.labels(self._model, reason) for reason in reasons}
        return lambda reason: by_reason[reason].inc()

    # ------------------------------------------------------------ in and out

    def observe(self, actor: str, item: Any, now_s: float) -> None:
        """Folds one event or effect of `actor`; what is not counted is let by."""
        fold = self._folds.get(type(item))
        if fold is not None:
            fold(actor, item, now_s)

    def render(self) -> bytes:
        """Prometheus text, the aliases behind our own names."""
        return generate_latest(self.merged) + generate_latest(self._aliases)

    # ------------------------------------------------------------ requests

    def _submit(self, actor: str, item: Submit, now_s: float) -> None:
        self._running[item.request.request_id] = _RequestTimes(item.request)
        self._waiting += 1

    def _start(self, times: _RequestTimes | None) -> None:
        if times is not None and not times.started:
            times.started = True
            self._waiting -= 1

    def _emit(self, actor: str, item: EmitTokens, now_s: float) -> None:
        times, count = self._running.get(item.request_id), len(item.sampled)
        self._output_tokens.inc(count)
        if times is None or count == 0:
            return
        if times.first_s is None:
            times.first_s = now_s
            self._ttft.observe(now_s - times.request.arrival_s)
            self._prompt_tokens.labels(self._model).inc(len(times.request.prompt))
        else:
            for _ in range(count):
                self._itl.observe((now_s - times.last_s) / count)
        times.last_s = now_s
        times.num_output += count

    def _finish(self, actor: str, item: Finish, now_s: float) -> None:
        times = self._running.pop(item.request_id, None)
        if times is None:
            return
        self._start(times)
        self._requests.labels(self._model, item.reason.value).inc()
        self._e2e.labels(self._model).observe(now_s - times.request.arrival_s)
        self._input_length.labels(self._model).observe(len(times.request.prompt))
        self._output_length.labels(self._model).observe(times.num_output)
        if times.first_s is not None and times.num_output > 1:
            mean_s = (times.last_s - times.first_s) / (times.num_output - 1)
            self._tpot.labels(self._model).observe(mean_s)
            if times.num_output >= TIMED_TOKENS:
                self._fastest_s = min(self._fastest_s or mean_s, mean_s)
        for part, nanoseconds in item.ledger.parts_ns().items():
            self._parts.labels(self._model, part).observe(nanoseconds / 1e9)
        if item.ledger.wire_ns:
            for share, nanoseconds in zip(("hidden", "exposed"), item.ledger.transfer_ns(), strict=True):
                self._transfer_s.labels(self._model, share).observe(nanoseconds / 1e9)

    def _reject(self, actor: str, item: Reject, now_s: float) -> None:
        self._start(self._running.pop(item.request_id, None))
        self._rejects.labels(self._model).inc()

    def capacity(self) -> Capacity | None:
        """What the workers that are there now can do at the most."""
        slots = sum(config.num_slots for config in [*self._workers.values()] if config.role.decodes)
        return Capacity(slots, self._fastest_s * PACE_MARGIN) if slots else None

    # ------------------------------------------------------------ workers

    def _prefill(self, actor: str, item: RunPrefill, now_s: float) -> None:
        for chunk in item.plan.chunks:
            self._start(self._running.get(chunk.request_id))
        self._prefill_runs.labels(self._model, actor).inc()
        self._prefill_tokens.labels(self._model, actor).inc(item.plan.num_tokens)
        for transfer in item.ships:
            self._shipped(transfer)

    def _decode(self, actor: str, item: RunDecode, now_s: float) -> None:
        self._decode_runs.labels(self._model, actor).inc()
        self._decode_batch.labels(self._model, actor).observe(len(item.plan.active))

    def _ship(self, actor: str, item: ShipKV, now_s: float) -> None:
        self._shipped(item.transfer)

    def _shipped(self, transfer: KVTransfer) -> None:
        first, stop = transfer.layers or (0, self._num_layers)
        page_bytes = self._page_bytes * (stop - first) / self._num_layers
        shipped = self._ship_bytes.labels(self._model, transfer.source, transfer.destination)
        shipped.inc(len(transfer.source_pages) * page_bytes)

    def _arrived(self, actor: str, item: KVArrived, now_s: float) -> None:
        transfer = item.transfer
        self._ship_s.labels(self._model, transfer.source, transfer.destination).observe(item.wire_s)

    def _engine_failed(self, actor: str, item: EngineFailed, now_s: float) -> None:
        self._failures.labels(self._model, actor).inc()

    def _send(self, actor: str, item: Send, now_s: float) -> None:
        if isinstance(item.message, Preempted):
            self._preemptions.labels(self._model, actor).inc()
        elif isinstance(item.message, Resend):
            self._resends.labels(self._model, actor).inc()
        elif isinstance(item.message, Ended) and item.message.reason is FinishReason.ERROR:
            self._nan_logits.labels(self._model, actor).inc()
        elif isinstance(item.message, Progress) and item.message.mark is Mark.PREFILL_STARTED:
            self._cache_hits.labels(self._model, actor).inc(item.message.cached_tokens)
        elif isinstance(item.message, Reserved) and self._only_decodes(actor):
            self._cache_hits.labels(self._model, actor).inc(item.message.cached_pages * item.message.page_size)

    def _only_decodes(self, actor: str) -> bool:
        config = self._workers.get(actor)
        return config is not None and not config.role.prefills

    def _received(self, actor: str, item: Received, now_s: float) -> None:
        if isinstance(item.message, View) and item.sender in self._workers:
            self._view(self._workers[item.sender], item.message)
        elif isinstance(item.message, StartPrefill) or (
            isinstance(item.message, Reserve) and self._only_decodes(actor)
        ):
            self._cache_queries.labels(self._model, actor).inc(len(item.message.request.prompt))

    def _joined(self, actor: str, item: WorkerJoined, now_s: float) -> None:
        config = self._workers[item.config.worker] = item.config
        self._view(config, empty_view(config))

    def _lost(self, actor: str, item: WorkerLost, now_s: float) -> None:
        """What is free on it is nobody's to use; what it counted here stays."""
        if self._workers.pop(item.worker, None) is None:
            return
        pages, sequences = ("free", "used"), ("room", "running")
        of_states = [(self._kv_pages, state) for state in pages] + [(self._sequences, state) for state in sequences]
        gauges = [(gauge,) for gauge in (self._kv_usage, self._backlog, self._stream_tokens)]
        for gauge, *state in of_states + gauges:
            with contextlib.suppress(KeyError):  # of the other phase
                gauge.remove(self._model, item.worker, *state)

    def _view(self, config: WorkerConfig, view: View) -> None:
        model, worker, total = self._model, config.worker, config.num_pages
        self._kv_pages.labels(model, worker, "free").set(view.free_pages)
        self._kv_pages.labels(model, worker, "used").set(total - view.free_pages)
        self._kv_usage.labels(model, worker).set(1 - view.free_pages / max(1, total))
        if config.role.decodes:
            self._sequences.labels(model, worker, "room").set(view.free_slots)
            self._sequences.labels(model, worker, "running").set(view.running)
        if config.role.prefills:
            self._backlog.labels(model, worker).set(view.waiting_tokens)
        if view.stream_tokens:
            self._stream_tokens.labels(model, worker).set(view.stream_tokens)
