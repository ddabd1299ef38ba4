"""Every program an executor will ever run, as jobs that compile it: real calls over null pages and idle slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdisagg.core.plans import DecodePlan, PrefillPlan
from jdisagg.engine.decode import Decoder
from jdisagg.engine.gates import dispatched
from jdisagg.engine.prefill import Prefiller, pack
from jdisagg.engine.sampling_metadata import SamplingRows

Progress = Callable[[str, int, int], None]
Job = tuple[str, Callable[[], Any]]  # what people read, and the call; its result says when it is done


def prefill_jobs(prefiller: Prefiller) -> list[Job]:
    """Each bucket through all groups, the head and the scores; then the draws, whose shapes are the same for all."""
    jobs: list[Job] = []
    for tokens in prefiller.config.prefill_buckets:
        jobs.append((f"prefill of {tokens} tokens", lambda tokens=tokens: _prefill(prefiller, tokens)))
    jobs.append(("first tokens", lambda: _prefill_draws(prefiller)))
    return jobs


def _prefill(prefiller: Prefiller, tokens: int) -> Any:
    packed = pack(PrefillPlan(-1, (), tokens, prefiller.config.table_buckets[-1]), prefiller.config)
    x = prefiller.groups(packed)
    last = prefiller.layer_groups[-1]
    return last.head(x, packed.last_rows), last.score(x, packed.targets)


def _prefill_draws(prefiller: Prefiller) -> Any:
    size, config = prefiller.config.max_chunk_seqs, prefiller.config
    packed = pack(PrefillPlan(-1, (), config.prefill_buckets[0], config.table_buckets[-1]), config)
    logits = prefiller.head(prefiller.groups(packed), packed)
    metadata, positions = (
        SamplingRows(size).on(prefiller.device),
        jax.device_put(np.zeros(size, np.int32), prefiller.device),
    )
    tokens = prefiller.greedy(logits)
    return prefiller.pick(logits, metadata, prefiller.no_counts, positions), prefiller.logprobs(logits, tokens)


def decode_jobs(decoder: Decoder) -> list[Job]:
    """Each table width through all stages, then the draws."""
    jobs: list[Job] = []
    for width in decoder.config.table_buckets:
        label = f"decode of {width * decoder.config.page_size} tokens"
        jobs.append((label, lambda width=width: dispatched(decoder.step(DecodePlan(-1, 0, (), width))).tokens))
    jobs.append(("draws", lambda: _draws(decoder)))
    return jobs


def _draws(decoder: Decoder) -> Any:
    batch = decoder.microbatches[0]
    logits = decoder.stages(batch, decoder.config.table_buckets[0])
    delta = jax.device_put(np.zeros((4, batch.size), np.int32), decoder.device)
    batch.state = decoder.steer(batch.state, delta)
    batch.state, tokens = decoder.draw(logits, batch.state, batch.metadata, batch.counts)
    vocab_size = logits.shape[1]
    row = np.int32(0), np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.int32)
    batch.counts = decoder.count(batch.counts, tokens)
    batch.counts = decoder.set_row(batch.counts, *jax.device_put(row, decoder.device))
    return batch.state, batch.counts, decoder.logprobs(logits, tokens)


def ship_jobs(ship_null: Callable[[int], Any], name: str, buckets: Sequence[int]) -> list[Job]:
    """One shipment of null pages to a peer for every page count declared."""
    return [(f"{pages} pages to {name}", lambda pages=pages: ship_null(pages)) for pages in buckets]
