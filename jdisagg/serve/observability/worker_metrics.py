"""Metrics of workers: steps, drafts, prefix cache hits, shipped KV, free pages, tiers, expert load and adapters.

`MergedRegistry` joins the samples of all processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jdisagg.core.codec import convert
from jdisagg.core.errors import BadTicket, DecodeError
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
from jdisagg.core.tiers import PagesMoved
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.policy.router.worker_view import empty_view
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.observability.metric_families import SECONDS, SEQUENCES, Families, Fold, Kind

Workers = dict[str, WorkerConfig]  # the workers that are present now, by name
USES = ("free", "in_flight", "live", "cached")  # uses of a page


class StepMetrics:
    """Programs that ran, and their failures."""

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
        """Counts a step; a mixed step counts for both phases."""
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
    """Draft tokens and accepted draft tokens by the kind of draft, counted when a step is read."""

    def __init__(self, families: Families) -> None:
        labels = "worker", "kind"
        self._drafts = families.counter("spec_decode_drafts", "Rows of steps that had a draft", *labels)
        self._draft_tokens = families.counter("spec_decode_draft_tokens", "Tokens of drafts", *labels)
        self._accepted = families.counter("spec_decode_accepted_tokens", "Tokens of drafts that were drawn", *labels)

    def folds(self) -> Mapping[Kind, Fold]:
        return {StepDone: self._done}

    def _done(self, actor: str, item: StepDone, now_s: float) -> None:
        sampled = {slot: tokens for slot, tokens in item.decode if tokens} if item.guessed else {}
        for slot, kind, tokens in item.guessed:
            self._drafts.of(actor, kind).inc()
            self._draft_tokens.of(actor, kind).inc(tokens)
            self._accepted.of(actor, kind).inc(len(sampled[slot]) - 1 if slot in sampled else 0)


class PrefixCacheMetrics:
    """Prompt tokens looked up and found in the prefix cache; prefill and decode workers use different messages."""

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
        if not self._only_decodes(actor):  # a decode worker's lookup was counted with its reservation
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
    """KV shipped between workers. `page_bytes` are bytes of a page over all layers."""

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
    """Free pages and slots of each worker, from its reports to the router; a lost worker's gauges are removed."""

    def __init__(self, families: Families, workers: Workers) -> None:
        self._workers = workers
        self._pages = families.gauge(
            "kv_pages", "KV pages that a reservation may take (free), and the others (used)", "worker", "state"
        )
        self._by_use = families.gauge(
            "kv_pages_by_use", "KV pages: free, in_flight, live (in use), cached (kept, unused)", "worker", "use"
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
        """Adds gauges of a local worker's pages by use, read at each scrape."""
        for use in USES:
            self._by_use.of(name, use).set_function(lambda use=use: worker.shared.by_use()[use])

    def _changed(self, actor: str, item: Received, now_s: float) -> None:
        """Resets a worker's gauges after a role change; those of the former phase are removed."""
        assert isinstance(item.message, Joined)
        config = item.message.config
        if config.worker in self._workers:
            self._forget(config.worker, self._phase_gauges)
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
        self._forget(item.worker, [*states, *self._phase_gauges, *((self._by_use, use) for use in USES)])

    @property
    def _phase_gauges(self) -> list[tuple[Any, ...]]:
        """The gauges, with their labels, that only workers of one phase have."""
        return [(self._sequences, "room"), (self._sequences, "running"), (self._backlog,), (self._stream_tokens,)]

    @staticmethod
    def _forget(worker: str, gauges: Iterable[tuple[Any, ...]]) -> None:
        for gauge, *state in gauges:
            with contextlib.suppress(KeyError):  # a gauge of the other phase
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


# Metrics of worker processes, sent to the router's process each second, so that its /metrics cover all workers.
#
# A process sends the samples that have a worker label: programs, shipments and failures. Free pages come with the
# workers' reports. The router's process shows the samples beside its own, until the process's link ends.

PUSH_INTERVAL_S = 1.0
WORKER_LABELS = frozenset({"worker", "source", "destination"})
Samples = dict[str, list[Sample]]  # by family name


def samples_of(registry: CollectorRegistry) -> list[list[Any]]:
    """Returns [family, sample, labels, value] of every sample with a worker label, as JSON values."""
    return [
        [family.name, each.name, each.labels, each.value]
        for family in registry.collect()
        for each in family.samples
        if WORKER_LABELS & each.labels.keys()
    ]


def read_samples(rows: Any) -> Samples:
    """Returns the samples, by family, of the rows that `samples_of` made. Raises BadTicket."""
    found: Samples = {}
    try:
        for family, name, labels, value in convert(list[tuple[str, str, dict[str, str], float]], rows):
            if not name.startswith(family):
                raise BadTicket(f"a peer counts what cannot be read: {name[:80]!r} is no sample of {family[:80]!r}")
            found.setdefault(family, []).append(Sample(name, labels, value))
    except DecodeError as error:
        raise BadTicket(f"a peer counts what cannot be read: {error}") from error
    return found


def family_of(name: str) -> str:
    for suffix in ("_total", "_sum", "_count"):
        name = name.removesuffix(suffix)
    return name


class MergedRegistry(CollectorRegistry):
    """The samples of this process with, in the same families, those of other processes. Safe from any thread."""

    def __init__(self, local: CollectorRegistry) -> None:
        super().__init__()
        self.local = local
        self._lock = threading.Lock()
        self._remote: dict[Any, Samples] = {}

    def update(self, link: Any, samples: Samples) -> None:
        """Replaces the samples of one process."""
        with self._lock:
            self._remote[link] = samples

    def forget(self, link: Any) -> None:
        with self._lock:
            self._remote.pop(link, None)

    def values(self, names: Collection[str]) -> Iterator[Sample]:
        """Yields the samples of these names, of all processes; other families are not collected."""
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


# Metrics of KV below HBM.


class TierMetrics:
    """Moves of pages between tiers. A page that was read is a hit of its source; an absent or broken one is a miss."""

    def __init__(self, families: Families) -> None:
        ends = "worker", "source", "destination"
        self._pages = families.counter(
            "tier_pages_moved", "KV pages that came from one tier (hbm, dram, disk, pool, peer) to another", *ends
        )
        self._missed = families.counter(
            "tier_pages_missed", "KV pages asked of a tier that were not there, were broken, or were not taken", *ends
        )
        self._bytes = families.counter("tier_bytes", "KV moved between tiers", *ends)
        self._seconds = families.histogram("tier_move_seconds", "Of a move, from its wish to its end", SECONDS, *ends)
        self._failures = families.counter("tier_failures", "Moves of which a tier's store did not answer", *ends)
        self._kept = families.gauge(
            "tier_pages", "KV pages below HBM: free, in_flight, live (being read), cached", "worker", "tier", "use"
        )

    def folds(self) -> Mapping[Kind, Fold]:
        return {PagesMoved: self._moved}

    def _moved(self, actor: str, item: PagesMoved, now_s: float) -> None:
        ends = actor, item.move.source.value, item.move.destination.value
        if item.failed:
            self._failures.of(*ends).inc()
            return
        num_good = sum(item.good)
        self._pages.of(*ends).inc(num_good)
        self._missed.of(*ends).inc(len(item.good) - num_good)
        self._bytes.of(*ends).inc(item.num_bytes)
        self._seconds.of(*ends).observe(item.seconds)

    def watch(self, name: str, worker: Worker) -> None:
        """Adds gauges of a local worker's tiers, read at each scrape."""
        for tier, pool in worker.tiers.pools.items():
            for use in pool.by_use():
                gauge = self._kept.of(name, tier.value, use)
                gauge.set_function(lambda pool=pool, use=use: pool.by_use()[use])


# Expert load, read from the executors' counters at each scrape.

LABELS = ("model_name", "worker", "layer")
Loads = Callable[[], Mapping[str, Sequence[ExpertLoad]]]  # of each worker, by layer group


class ExpertLoadCollector(Collector):
    """The families of expert load; without samples if no local worker has counted tokens."""

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


# Adapters of running and waiting requests, in the family of vLLM that routers read.

NAME = "jdisagg_lora_requests_info"
HELP = "Adapters of requests that run and that wait, by name; the value is the time"

AdapterNames = Callable[[], tuple[Iterable[str], Iterable[str]]]  # of running and of waiting requests


class AdapterCollector(Collector):
    """The family of adapters; without samples if no worker has adapter slots."""

    _labelnames = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")

    def __init__(self, model: str, slots: Callable[[], int], names: AdapterNames) -> None:
        self._model, self._slots, self._names = model, slots, names

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(NAME, HELP, labels=self._labelnames)

    def collect(self) -> Iterator[Metric]:
        slots = self._slots()
        if not slots:
            return
        (family,) = self.describe()
        assert isinstance(family, GaugeMetricFamily)
        running, waiting = (",".join(sorted({*names})) for names in self._names())
        family.add_metric((self._model, str(slots), running, waiting), time.time())
        yield family
