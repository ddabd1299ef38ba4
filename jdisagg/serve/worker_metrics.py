"""Metrics of workers: steps that they run, prefixes that they find again, KV that they ship, room that they have."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jdisagg.core.events import (
    EngineFailed,
    KVArrived,
    Received,
    RunStep,
    Send,
    ShipKV,
    StepDone,
    WorkerJoined,
    WorkerLost,
)
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Ended, Joined, Preempted, Progress, Resend, Reserve, Reserved, StartPrefill, View
from jdisagg.core.request import FinishReason
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.worker import Worker
from jdisagg.policy.worker_state import empty_view
from jdisagg.serve.metric_families import SECONDS, SEQUENCES, Families, Fold, Kind

Workers = dict[str, WorkerConfig]  # those that are there now, by name
USES = ("free", "in_flight", "live", "cached")  # of a page


class StepMetrics:
    """Programs that ran, and how they went wrong."""

    def __init__(self, families: Families) -> None:
        self._prefill_tokens = families.counter("prefill_tokens", "Tokens run through prefill", "worker")
        self._prefill_runs = families.counter("prefill_runs", "Prefill programs run", "worker")
        self._decode_runs = families.counter("decode_runs", "Decode steps run", "worker")
        self._decode_batch = families.histogram("decode_batch_sequences", "Sequences in a step", SEQUENCES, "worker")
        self._preemptions = families.counter(
            "preemptions", "Sequences sent back to prefill for want of pages", "worker"
        )
        self._nan_logits = families.counter(
            "nan_logits",
            "Sequences ended because nothing could be drawn: logits that were no numbers, or a grammar's limits",
            "worker",
        )
        self._failures = families.counter("engine_failures", "Programs or transfers that raised", "worker")

    def folds(self) -> Mapping[Kind, Fold]:
        return {
            RunStep: self._step,
            EngineFailed: lambda actor, item, now_s: self._failures.of(actor).inc(),
            (Send, Preempted): lambda actor, item, now_s: self._preemptions.of(actor).inc(),
            (Send, Ended): self._ended,
        }

    def _step(self, actor: str, item: RunStep, now_s: float) -> None:
        """A mixed step counts for both phases."""
        if item.plan.prefill is not None:
            self._prefill_runs.of(actor).inc()
            self._prefill_tokens.of(actor).inc(item.plan.prefill.num_tokens)
        if item.plan.decode is not None:
            self._decode_runs.of(actor).inc()
            self._decode_batch.of(actor).observe(len(item.plan.decode.active))

    def _ended(self, actor: str, item: Send, now_s: float) -> None:
        assert isinstance(item.message, Ended)
        if item.message.reason is FinishReason.ERROR:
            self._nan_logits.of(actor).inc()


class DraftMetrics:
    """Tokens that were guessed, and those of them that were drawn, by what guesses: counted when they are read."""

    def __init__(self, families: Families) -> None:
        labels = "worker", "kind"
        self._drafts = families.counter("spec_decode_drafts", "Rows of steps that had a draft", *labels)
        self._draft_tokens = families.counter("spec_decode_draft_tokens", "Tokens of drafts", *labels)
        self._accepted = families.counter("spec_decode_accepted_tokens", "Tokens of drafts that were drawn", *labels)

    def folds(self) -> Mapping[Kind, Fold]:
        return {StepDone: self._done}

    def _done(self, actor: str, item: StepDone, now_s: float) -> None:
        drawn = {slot: tokens for slot, tokens in item.decode if tokens} if item.guessed else {}
        for slot, kind, tokens in item.guessed:
            self._drafts.of(actor, kind).inc()
            self._draft_tokens.of(actor, kind).inc(tokens)
            self._accepted.of(actor, kind).inc(len(drawn[slot]) - 1 if slot in drawn else 0)


class PrefixCacheMetrics:
    """Prompt tokens that were looked up in kept KV, and found; of both pools, each by its own messages."""

    def __init__(self, families: Families, workers: Workers) -> None:
        self._workers = workers
        self._queries = families.counter("prefix_cache_queries", "Prompt tokens looked up in kept KV", "worker")
        self._hits = families.counter("prefix_cache_hits", "Prompt tokens whose KV was there", "worker")

    def folds(self) -> Mapping[Kind, Fold]:
        return {
            (Received, StartPrefill): self._looked_up,
            (Received, Reserve): self._looked_up_to_decode,
            (Send, Progress): self._found,
            (Send, Reserved): self._found_to_decode,
        }

    def _looked_up(self, actor: str, item: Received, now_s: float) -> None:
        assert isinstance(item.message, StartPrefill)
        if not self._only_decodes(actor):  # what it computes itself was counted with its reservation
            self._queries.of(actor).inc(item.message.request.prompt_tokens)

    def _looked_up_to_decode(self, actor: str, item: Received, now_s: float) -> None:
        assert isinstance(item.message, Reserve)
        if self._only_decodes(actor):
            self._queries.of(actor).inc(item.message.prompt_tokens)

    def _found(self, actor: str, item: Send, now_s: float) -> None:
        assert isinstance(item.message, Progress)
        if item.message.mark is Mark.PREFILL_STARTED and not self._only_decodes(actor):
            self._hits.of(actor).inc(item.message.cached_tokens)

    def _found_to_decode(self, actor: str, item: Send, now_s: float) -> None:
        assert isinstance(item.message, Reserved)
        if self._only_decodes(actor):
            self._hits.of(actor).inc(item.message.cached_pages * item.message.page_size)

    def _only_decodes(self, actor: str) -> bool:
        config = self._workers.get(actor)
        return config is not None and not config.role.prefills


class TransferMetrics:
    """KV on its way from worker to worker. `page_bytes`: of a page over all layers."""

    def __init__(self, families: Families, workers: Collection[WorkerConfig], page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._num_layers = max((config.layer_groups[-1][1] for config in workers if config.layer_groups), default=1)
        ends = "source", "destination"
        self._bytes = families.counter("shipped_bytes", "KV shipped between workers", *ends)
        self._seconds = families.histogram("ship_seconds", "Of a part, from packed to arrived", SECONDS, *ends)
        self._resends = families.counter("parts_resent", "Parts of KV asked for again, broken or missing", "worker")

    def folds(self) -> Mapping[Kind, Fold]:
        return {
            RunStep: self._step,
            ShipKV: lambda actor, item, now_s: self._shipped(item.transfer),
            KVArrived: self._arrived,
            (Send, Resend): lambda actor, item, now_s: self._resends.of(actor).inc(),
        }

    def _step(self, actor: str, item: RunStep, now_s: float) -> None:
        for transfer in item.ships:
            self._shipped(transfer)

    def _shipped(self, transfer: KVTransfer) -> None:
        first, stop = transfer.layers or (0, self._num_layers)
        page_bytes = self._page_bytes * (stop - first) / self._num_layers
        self._bytes.of(transfer.source, transfer.destination).inc(len(transfer.source_pages) * page_bytes)

    def _arrived(self, actor: str, item: KVArrived, now_s: float) -> None:
        self._seconds.of(item.transfer.source, item.transfer.destination).observe(item.wire_s)


class PoolMetrics:
    """Room on each worker, as its views told the router; of a worker that is gone there is none."""

    def __init__(self, families: Families, workers: Workers) -> None:
        self._workers = workers
        self._pages = families.gauge(
            "kv_pages", "KV pages that a reservation may take (free), and the others (used)", "worker", "state"
        )
        self._by_use = families.gauge(
            "kv_pages_by_use",
            "KV pages: free, in_flight, live (in use), cached (kept, unused)",
            "worker",
            "use",
        )
        self._usage = families.gauge("kv_usage_ratio", "Share of KV pages that no reservation may take", "worker")
        self._sequences = families.gauge("decode_sequences", "Sequences decoding, and room for more", "worker", "state")
        self._backlog = families.gauge("prefill_backlog_tokens", "Prompt tokens not yet prefilled", "worker")
        self._stream_tokens = families.gauge(
            "stream_prompt_tokens", "--transfer=auto: prompt tokens from which KV leaves as it is computed", "worker"
        )

    def folds(self) -> Mapping[Kind, Fold]:
        return {
            (Received, View): self._received,
            (Received, Joined): self._changed,
            WorkerJoined: self._joined,
            WorkerLost: self._lost,
        }

    def watch(self, name: str, worker: Worker) -> None:
        """A worker of this process: what its pages are for is read when somebody asks."""
        for use in USES:
            self._by_use.of(name, use).set_function(lambda use=use: worker.shared.by_use()[use])

    def _changed(self, actor: str, item: Received, now_s: float) -> None:
        """Its role is another: what was shown of the other phase is no more."""
        assert isinstance(item.message, Joined)
        config = item.message.config
        if config.worker in self._workers:
            self._forget(config.worker, self._of_a_phase)
            self._workers[config.worker] = config
            self._set(config, empty_view(config))

    def _received(self, actor: str, item: Received, now_s: float) -> None:
        assert isinstance(item.message, View)
        if item.sender in self._workers:
            self._set(self._workers[item.sender], item.message)

    def _joined(self, actor: str, item: WorkerJoined, now_s: float) -> None:
        config = self._workers[item.config.worker] = item.config
        self._set(config, empty_view(config))

    def _lost(self, actor: str, item: WorkerLost, now_s: float) -> None:
        if self._workers.pop(item.worker, None) is None:
            return
        states = [(self._pages, "free"), (self._pages, "used"), (self._usage,)]
        self._forget(item.worker, [*states, *self._of_a_phase, *((self._by_use, use) for use in USES)])

    @property
    def _of_a_phase(self) -> list[tuple[Any, ...]]:
        """Gauges, and what they are of, that only workers of one phase have."""
        return [(self._sequences, "room"), (self._sequences, "running"), (self._backlog,), (self._stream_tokens,)]

    @staticmethod
    def _forget(worker: str, gauges: Iterable[tuple[Any, ...]]) -> None:
        for gauge, *state in gauges:
            with contextlib.suppress(KeyError):  # of the other phase
                gauge.remove(worker, *state)

    def _set(self, config: WorkerConfig, view: View) -> None:
        worker, total = config.worker, config.num_pages
        self._pages.of(worker, "free").set(view.free_pages)
        self._pages.of(worker, "used").set(total - view.free_pages)
        self._usage.of(worker).set(1 - view.free_pages / max(1, total))
        if config.role.decodes:
            self._sequences.of(worker, "room").set(view.free_slots)
            self._sequences.of(worker, "running").set(view.running)
        if config.computes_prompts:
            self._backlog.of(worker).set(view.waiting_tokens)
        if view.stream_tokens:
            self._stream_tokens.of(worker).set(view.stream_tokens)
