"""Every program an executor will ever run, as jobs that compile it: real calls over null pages and idle slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdisagg.core.steps import DecodeRows, PrefillChunks
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.decode import Decoder
from jdisagg.engine.prefill import Prefiller, pack
from jdisagg.engine.runner import Runner
from jdisagg.engine.sampling_metadata import SamplingRows

Progress = Callable[[str, int, int], None]
Job = tuple[str, Callable[[], Any]]  # what people read, and the call; its result says when it is done


def step_jobs(runner: Runner) -> list[Job]:
    """Every step that the worker may take."""
    prefiller, decoder = runner.prefiller, runner.decoder
    jobs = prefill_jobs(runner, prefiller) if prefiller else []
    jobs += decode_jobs(runner, decoder) if decoder else []
    if runner.config.mixed_steps and prefiller and decoder:
        sizes = runner.config.prefill_buckets
        jobs += [(f"mixed of {tokens} tokens", lambda tokens=tokens: _mixed(runner, tokens)) for tokens in sizes]
    return jobs


def layers_of(runner: Runner, rows: DecodeRows | None, chunks: PrefillChunks | None) -> Any:
    """What the last layer group makes of a step of idle slots and null chunks."""
    slots, prompts, x = runner.slots(rows), runner.prompts(chunks), None
    for group in runner.layer_groups:
        x = runner.through(group, slots, prompts, x)
    return x


def null_chunks(config: WorkerConfig, tokens: int) -> PrefillChunks:
    return PrefillChunks((), tokens, config.table_buckets[-1])


def idle_rows(width: int) -> DecodeRows:
    return DecodeRows(0, (), width)


def _mixed(runner: Runner, tokens: int) -> Any:
    return layers_of(runner, idle_rows(runner.config.table_buckets[-1]), null_chunks(runner.config, tokens))


def prefill_jobs(runner: Runner, prefiller: Prefiller) -> list[Job]:
    """Each bucket through all groups, the head and the scores; then the draws, whose shapes are the same for all."""
    jobs: list[Job] = []
    for tokens in prefiller.config.prefill_buckets:
        jobs.append((f"prefill of {tokens} tokens", lambda tokens=tokens: _prefill(runner, tokens)))
    jobs.append(("first tokens", lambda: _prefill_draws(runner, prefiller)))
    return jobs


def _prefill(runner: Runner, tokens: int) -> Any:
    chunks, last = null_chunks(runner.config, tokens), runner.layer_groups[-1]
    x, packed = layers_of(runner, None, chunks), pack(chunks, runner.config)
    return last.head(x, packed.last_rows), last.score(x, packed.targets)


def _prefill_draws(runner: Runner, prefiller: Prefiller) -> Any:
    size, chunks = runner.config.max_chunk_seqs, null_chunks(runner.config, runner.config.prefill_buckets[0])
    logits = prefiller.head(layers_of(runner, None, chunks), pack(chunks, runner.config))
    metadata, positions = (
        SamplingRows(size).on(prefiller.device),
        jax.device_put(np.zeros(size, np.int32), prefiller.device),
    )
    tokens = prefiller.greedy(logits)
    return prefiller.pick(logits, metadata, prefiller.no_counts, positions), prefiller.logprobs(logits, tokens)


def decode_jobs(runner: Runner, decoder: Decoder) -> list[Job]:
    """Each table width through all stages, then the draws."""
    jobs: list[Job] = []
    for width in decoder.config.table_buckets:
        label = f"decode of {width * decoder.config.page_size} tokens"
        jobs.append((label, lambda width=width: _decode(runner, decoder, width)))
    jobs.append(("draws", lambda: _draws(runner, decoder)))
    return jobs


def _decode(runner: Runner, decoder: Decoder, width: int) -> Any:
    rows = idle_rows(width)
    logits = layers_of(runner, rows, None).addressable_data(0)
    return decoder.finish(decoder.microbatches[0], rows, logits).tokens


def _draws(runner: Runner, decoder: Decoder) -> Any:
    batch = decoder.microbatches[0]
    logits = layers_of(runner, idle_rows(decoder.config.table_buckets[0]), None).addressable_data(0)
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
