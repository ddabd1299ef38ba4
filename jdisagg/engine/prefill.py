"""Prefill: packs a step's chunks of several prompts and samples the first token of those that end with the chunk.

Every chunk runs with the widest page table: attention visits only the pages a chunk holds, so a narrower table would
save nothing and cost one program each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.request import RequestId, Sampled
from jdisagg.core.steps import PrefillChunk, PrefillChunks
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.decode import POSITION
from jdisagg.engine.layer_group import Chunks, LayerGroup
from jdisagg.engine.pooling import pools, summed_rows, whole
from jdisagg.engine.sampling import (
    NUM_TOP,
    SamplingRows,
    TokenCounters,
    history_rows,
    is_plain,
    pick,
    pick_greedy,
    sampled_rows,
    token_logprobs,
)
from jdisagg.engine.spec.grammar_masks import GrammarMasks, masked
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.model.lora import NONE
from jdisagg.parallel.submesh import Program, StageMesh

FirstTokens = tuple[tuple[RequestId, Sampled], ...]
Pooled = tuple[tuple[RequestId, tuple[int, ...]], ...]
PromptScores = tuple[tuple[RequestId, tuple[Sampled, ...]], ...]
MAX_BOUNDARIES = 64  # unfinished prompts whose last row is kept for prompt logprobs; the oldest is dropped first


@dataclass(frozen=True)
class PackedChunks:
    """The packed arrays of a plan on the host, as the programs take them: T rows, S sequences."""

    rows: np.ndarray  # i32[3, T]: token, position, page; i32[4, T] with adapters: adapter slot
    spans: np.ndarray  # i32[2, S + 1]
    table: np.ndarray  # i32[S, W]
    first_rows: np.ndarray  # i32[S + 1]: first row of each chunk

    @property
    def last_rows(self) -> np.ndarray:
        """Returns i32[S]: each chunk's last row (0 for unused sequences)."""
        return np.maximum(self.first_rows[1:] - 1, 0)

    @property
    def targets(self) -> np.ndarray:
        """Returns i32[T]: the token after each row; undefined behind a chunk's last row."""
        return np.append(self.rows[0, 1:], np.int32(0))


def pack(plan: PrefillChunks, config: WorkerConfig, adapters: AdapterSlots | None = None) -> PackedChunks:
    """Packs chunks one after another, with padding rows last on the null page."""
    assert len(plan.chunks) <= config.max_chunk_seqs and plan.num_tokens <= plan.bucket_tokens, plan
    rows = np.zeros((3 if adapters is None else 4, plan.bucket_tokens), np.int32)
    rows[3:] = NONE
    spans = np.zeros((2, config.max_chunk_seqs + 1), np.int32)
    table = np.zeros((config.max_chunk_seqs, config.table_buckets[-1]), np.int32)
    row = 0
    for index, chunk in enumerate(plan.chunks):
        stop, length = row + len(chunk.tokens), chunk.start + len(chunk.tokens)
        positions, pages = np.arange(chunk.start, length), np.array(chunk.pages, np.int32)
        rows[0, row:stop], rows[1, row:stop] = chunk.tokens, positions
        rows[2, row:stop] = pages[positions // config.page_size]
        if adapters is not None:
            rows[3, row:stop] = adapters.slot_of(chunk.sampling)
        table[index, : len(pages)] = pages
        spans[0, index], spans[1, index + 1 :] = length, stop
        row = stop
    return PackedChunks(rows, spans, table, spans[1])


@dataclass(frozen=True)
class BoundaryRow:
    """The logits that predict the first token of a request's next chunk: one row of a head's result."""

    logits: Array  # f32[S, V]
    row: int

    def logprobs(self, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Computes `token_logprobs` of one row, on the host."""
        row = np.asarray(self.logits)[self.row].astype(np.float64)
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[:NUM_TOP]
        return logprobs[[token]], best[None], logprobs[None, best]


@dataclass(frozen=True)
class PendingChunks:
    """The results of a step's chunks, being copied to the host."""

    plan: PrefillChunks
    first_rows: np.ndarray
    tokens: Array | None  # i32[S], row i sampled for chunk i
    logprobs: tuple[Array, Array, Array] | None
    scores: tuple[Array, Array, Array] | None  # of every row
    states: Array | None = None  # i32[3, S, hidden], see `pooling.pooled`
    boundaries: dict[RequestId, BoundaryRow] = field(default_factory=dict)  # from the chunks before

    def read(self) -> tuple[FirstTokens, PromptScores, Pooled]:
        """Returns the first tokens, prompt scores and pooled states, see `StepDone`; blocks until they are on the
        host."""
        drawn: list[tuple[RequestId, Sampled]] = []
        if self.tokens is not None:
            tokens = np.asarray(self.tokens)[: len(self.plan.chunks)].tolist()
            wanted = [chunk.sampling.logprobs for chunk in self.plan.chunks]
            logprobs = None if self.logprobs is None else [np.asarray(part) for part in self.logprobs]
            pairs = zip(self.plan.chunks, sampled_rows(tokens, wanted, logprobs), strict=True)
            drawn = [(chunk.request_id, sampled) for chunk, sampled in pairs if chunk.last]
        return tuple(drawn), self._prompts(), self._pooled()

    def _pooled(self) -> Pooled:
        if self.states is None:
            return ()
        states, chunks = np.asarray(self.states), enumerate(self.plan.chunks)
        return tuple((chunk.request_id, whole(states[:, index])) for index, chunk in chunks if pools(chunk))

    def _prompts(self) -> PromptScores:
        if self.scores is None:
            return ()
        scores = [np.asarray(part) for part in self.scores]
        return tuple(
            (chunk.request_id, self._prompt(chunk, int(self.first_rows[index]), scores))
            for index, chunk in enumerate(self.plan.chunks)
            if chunk.sampling.prompt_logprobs is not None
        )

    def _prompt(self, chunk: PrefillChunk, row: int, scores: list[np.ndarray]) -> tuple[Sampled, ...]:
        """Returns the scores of a chunk's tokens. Row r predicts the token after it; the chunk before predicts the
        chunk's first token."""
        wanted = chunk.sampling.prompt_logprobs
        within = [part[row : row + len(chunk.tokens) - 1] for part in scores]
        known = sampled_rows(chunk.tokens[1:], [wanted] * (len(chunk.tokens) - 1), within)
        if chunk.start > 0:
            first, border = chunk.tokens[0], self.boundaries.get(chunk.request_id)
            known[:0] = [Sampled(first)] if border is None else sampled_rows([first], [wanted], border.logprobs(first))
        return tuple(known)


class FirstDrawPrograms:
    """The programs of a chunk after its head: from logits to first tokens."""

    def __init__(self) -> None:
        self.greedy, self.pick, self.logprobs = Program(pick_greedy), Program(pick), Program(token_logprobs)
        self.mask = Program(masked)

    @property
    def programs(self) -> list[Program]:
        return [self.greedy, self.pick, self.logprobs, self.mask]


class PrefillRunner(FirstDrawPrograms):
    """Packs the chunks of steps and samples their first tokens."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        super().__init__()
        self.layer_groups, self.config, self.vocab_size, self.grammars = layer_groups, config, vocab_size, grammars
        self.device = layer_groups[-1].submesh.reader
        self.no_counts = TokenCounters(*jax.device_put(self._zero_counts(), self.device))
        self._borders: OrderedDict[RequestId, BoundaryRow] = OrderedDict()

    def spread(self, packed: PackedChunks) -> dict[StageMesh, Chunks]:
        """Copies the packed chunks to every submesh of the layer groups."""
        submeshes = dict.fromkeys(group.submesh for group in self.layer_groups)
        return {submesh: Chunks(*submesh.put((packed.rows, packed.spans, packed.table))) for submesh in submeshes}

    def finish(self, plan: PrefillChunks, packed: PackedChunks, x: Array, logits: Array | None = None) -> PendingChunks:
        """Samples and scores from the activations [T, hidden] after all layers; `logits` f32[S, V] are given if they
        were computed with the layers, on the device that samples."""
        scored = [chunk for chunk in plan.chunks if chunk.sampling.prompt_logprobs is not None]
        tokens = logprobs = scores = None
        if scored or any(chunk.last for chunk in plan.chunks):
            logits = self.head(x, packed) if logits is None else logits
            tokens = self.draw(plan, logits)
        if tokens is not None and any(chunk.last and chunk.sampling.logprobs is not None for chunk in plan.chunks):
            logprobs = self.logprobs(logits, tokens)
        if scored:
            scores = self.layer_groups[-1].score(x, packed.targets)
        states = None
        if any(map(pools, plan.chunks)):
            states = self.layer_groups[-1].pool(x, summed_rows(plan.chunks, self.config.max_chunk_seqs))
        boundaries = {
            chunk.request_id: self._borders[chunk.request_id] for chunk in scored if chunk.request_id in self._borders
        }
        self._keep_boundaries(plan, logits)
        for array in (tokens, states, *(logprobs or ()), *(scores or ())):
            if array is not None:
                array.copy_to_host_async()
        return PendingChunks(plan, packed.first_rows, tokens, logprobs, scores, states, boundaries)

    def head(self, x: Array, packed: PackedChunks) -> Array:
        """Returns the logits f32[S, V] after each chunk's last row, on the device that samples."""
        return self.layer_groups[-1].head(x, packed.last_rows).addressable_data(0)

    def draw(self, plan: PrefillChunks, logits: Array) -> Array:
        """Samples tokens i32[S]; only the rows of prompts' last chunks are valid."""
        last = [(row, chunk) for row, chunk in enumerate(plan.chunks) if chunk.last]
        allowed = self._allowed(last)
        logits = logits if allowed is None else self.mask(logits, allowed)
        if all(is_plain(chunk.sampling) for _, chunk in last):
            return self.greedy(logits)
        rows, positions = SamplingRows(self.config.max_chunk_seqs), np.zeros(self.config.max_chunk_seqs, np.int32)
        for row, chunk in last:
            positions[row] = chunk.start + len(chunk.tokens)
            rows.set(row, chunk.sampling, int(positions[row]) - chunk.num_output)
        counts = self._counts(last)
        put = partial(jax.device_put, device=self.device)
        return self.pick(logits, rows.on(put), counts, put(positions))

    def _allowed(self, last: list[tuple[int, PrefillChunk]]) -> Array | None:
        if not any(chunk.sampling.grammar for _, chunk in last):
            return None
        put = partial(jax.device_put, device=self.device)
        masks = GrammarMasks(self.grammars, self.config.max_chunk_seqs, self.vocab_size, put)
        for row, chunk in last:
            masks.begin(row, chunk.sampling, chunk.history)
        return masks.allowed(row for row, _ in last)

    def _zero_counts(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.config.max_chunk_seqs, self.vocab_size)
        return np.zeros(shape, np.bool_), np.zeros(shape, np.int32)

    def _counts(self, last: list[tuple[int, PrefillChunk]]) -> TokenCounters:
        if not any(chunk.sampling.penalised for _, chunk in last):
            return self.no_counts
        prompt, output = self._zero_counts()
        for row, chunk in last:
            prompt[row], output[row] = history_rows(chunk.history, self.vocab_size)
        return TokenCounters(*jax.device_put((prompt, output), self.device))

    def _keep_boundaries(self, plan: PrefillChunks, logits: Array | None) -> None:
        for row, chunk in enumerate(plan.chunks):
            self._borders.pop(chunk.request_id, None)
            if not chunk.last and chunk.sampling.prompt_logprobs is not None:
                assert logits is not None
                self._borders[chunk.request_id] = BoundaryRow(logits, row)
        while len(self._borders) > MAX_BOUNDARIES:
            self._borders.popitem(last=False)


# Chunks of the slots' tokens that a draft model has not processed. They are built on the device that samples, the only
# place that knows the last sampled tokens.


class UnreadChunks(NamedTuple):
    """A packed chunk as `layer_group.Chunks`, and the processed tokens after it."""

    rows: Array  # i32[3, T]
    spans: Array  # i32[2, S + 1]
    table: Array  # i32[S, W]
    fed: Array  # i32[B]


def unread_chunks(
    history: Array, state: Array, fed: Array, table: Array, picked: Array, places: Array, page_tokens: Array
) -> UnreadChunks:
    """Packs the unprocessed tokens of some slots, up to the one that is fed next. history i32[B, S]: tokens by
    position; fed i32[B]: processed tokens of each slot; table i32[B, W]: its pages; picked i32[2, S]: slots (B for
    none) and the most tokens of each, T in all; places i32[T]: 0, 1, 2, ...; page_tokens i32[]: tokens per page."""
    slots, most = jnp.minimum(picked[0], history.shape[0] - 1), jnp.where(picked[0] < history.shape[0], picked[1], 0)
    begun = jnp.minimum(fed[slots], state[POSITION][slots])
    number = jnp.minimum(state[POSITION][slots] - begun, most)
    ends = jnp.cumsum(number)
    of = jnp.minimum(jnp.searchsorted(ends, places, side="right"), slots.shape[0] - 1)
    positions, held = begun[of] + places - (ends - number)[of], places < ends[-1]
    positions = jnp.where(held, positions, 0)
    tokens = jnp.where(held, history[slots[of], positions], 0)
    pages = jnp.where(held, table[slots[of], positions // page_tokens], NULL_PAGE)
    reached = begun + number
    spans = jnp.zeros((2, slots.shape[0] + 1), jnp.int32)
    spans = spans.at[0, :-1].set(jnp.where(number > 0, reached, 0)).at[1, 1:].set(ends)
    pages_of = jnp.where(number[:, None] > 0, table[slots], NULL_PAGE)
    after = fed.at[jnp.where(number > 0, slots, history.shape[0])].set(reached, mode="drop")
    rows = jnp.stack([tokens, positions, pages])
    return UnreadChunks(*(each.astype(jnp.int32) for each in (rows, spans, pages_of, after)))


def picks(counts: dict[int, int], sequences: int, slots: int) -> np.ndarray:
    """Returns i32[2, S]: the rows, and how many tokens of each."""
    found = np.full((2, sequences), slots, np.int32)
    found[1] = 0
    found[:, : len(counts)] = [*counts], [*counts.values()]
    return found
