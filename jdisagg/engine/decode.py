"""Decode rows of one microbatch: their tokens are sampled and fed back on the device.

The last stage owns each microbatch's decode state, i32[4, B]: the token fed next, its position, whether the slot has
sampled a stop token, and whether the host has enabled it. Sampling produces the next state, so steps follow each other
without the host. Steps of different microbatches share only the KV pools, and pipeline over the stages by program
order. The host owns page tables and metadata and sends them when they change. Admissions, pauses and retirements are
sent as one small delta to the state. In steady state a step is its stage programs and one sampling program, without
host transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.request import BROKEN, Sampled, SamplingParams
from jdisagg.core.steps import Admission, DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.adapter_slots import AdapterSlots
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.sampling import (
    BatchSampling,
    Put,
    SamplingRows,
    SamplingTensors,
    TokenCounters,
    counted,
    history_rows,
    is_stop,
    pick,
    pick_greedy,
    sampled_rows,
    token_logprobs,
    with_row,
)
from jdisagg.engine.spec.grammar_masks import GrammarMasks, masked
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.model.lora import NONE
from jdisagg.parallel.submesh import Program, RingMesh, StageMesh

DrawnRows = tuple[tuple[int, tuple[Sampled, ...] | None], ...]
TOKEN, POSITION, STOPPED, ENABLED = range(4)  # rows of a state
MASKED = -1  # reported for a slot that samples no token
ADMITTED = 2  # row of a delta that is 1 if the slot takes a new sequence; its other rows are those of a state


def steered(state: Array, delta: Array) -> Array:
    """Returns the state after the host's delta i32[4, B]: token, position, admitted, enabled."""
    admitted = delta[ADMITTED] == 1
    token, position = (jnp.where(admitted, delta[row], state[row]) for row in (TOKEN, POSITION))
    return jnp.stack([token, position, jnp.where(admitted, 0, state[STOPPED]), delta[ENABLED]])


def advanced(state: Array, tokens: Array, metadata: SamplingTensors) -> tuple[Array, Array]:
    """Returns the state after sampling the tokens i32[B], and the reported tokens, MASKED for masked slots. A slot
    whose logits were not finite reports BROKEN once and is masked from then on."""
    alive = (state[ENABLED] == 1) & (state[STOPPED] == 0)
    position = state[POSITION] + alive.astype(jnp.int32)
    stopped = (state[STOPPED] == 1) | (alive & (is_stop(tokens, metadata, position) | (tokens == BROKEN)))
    fed = jnp.where(alive & (tokens != BROKEN), tokens, state[TOKEN])
    return jnp.stack([fed, position, stopped.astype(jnp.int32), state[ENABLED]]), jnp.where(alive, tokens, MASKED)


def draw_greedy(logits: Array, state: Array, metadata: SamplingTensors) -> tuple[Array, Array]:
    return advanced(state, pick_greedy(logits), metadata)


def draw(logits: Array, state: Array, metadata: SamplingTensors, counts: TokenCounters) -> tuple[Array, Array]:
    return advanced(state, pick(logits, metadata, counts, state[POSITION] + 1), metadata)


class MicrobatchState:
    """Slots first_slot to first_slot + B: the host's copy and the arrays on the device that samples."""

    def __init__(
        self,
        first_slot: int,
        size: int,
        max_pages: int,
        vocab_size: int,
        put: Put,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        """Allocates the arrays; put: copies host arrays to the device that samples."""
        self.first_slot, self.size, self.put = first_slot, size, put
        self.masks = GrammarMasks(grammars, size, vocab_size, put)
        self.table = np.zeros((size, max_pages), np.int32)
        self.enabled = np.zeros(size, np.int32)
        self.sampling: list[SamplingParams | None] = [None] * size
        self.rows = SamplingRows(size)
        self.metadata = self.rows.on(put)
        self.state = put(np.zeros((4, size), np.int32))
        empty = np.zeros((size, vocab_size), np.bool_), np.zeros((size, vocab_size), np.int32)
        self.counts = TokenCounters(*put(empty))
        self.tables: dict[StageMesh | RingMesh, Array] = {}  # page tables as last sent, all of one width

    def take(self, plan: DecodeRows) -> np.ndarray | None:
        """Applies the plan to the host copy; returns the delta i32[4, B] to send, or None if the state is unchanged."""
        if plan is self.rows.taken and not (plan.admit or plan.grants or plan.retire or plan.read):
            return None
        self.rows.taken, self.rows.batch = plan, None
        delta = np.zeros((4, self.size), np.int32)
        for slot in plan.retire:
            self.sampling[slot - self.first_slot] = None
            self.masks.end(slot - self.first_slot)
        for admission in plan.admit:
            self._admit(admission, delta)
        for read in plan.read:
            self.masks.take(read.slot - self.first_slot, read.tokens)
        for grant in plan.grants:
            self.table[grant.slot - self.first_slot, grant.index] = grant.page
        if plan.grants:
            self.tables.clear()
        delta[ENABLED, [slot - self.first_slot for slot in plan.active]] = 1
        changed = bool(plan.admit) or not np.array_equal(delta[ENABLED], self.enabled)
        self.enabled = delta[ENABLED].copy()
        return delta if changed else None

    def _admit(self, admission: Admission, delta: np.ndarray) -> None:
        row = admission.slot - self.first_slot
        self.table[row] = 0
        self.table[row, : len(admission.pages)] = admission.pages
        self.tables.clear()
        self.sampling[row] = admission.sampling
        self.masks.begin(row, admission.sampling, admission.history)
        self.rows.set(row, admission.sampling, admission.position - admission.num_output + 1)
        delta[:ENABLED, row] = admission.token, admission.position, 1

    def table_on(self, submesh: StageMesh | RingMesh, width: int) -> Array:
        """Returns i32[B, width] on every shard of `submesh`, one wider with adapters; sent only if it changed."""
        held = self.tables.get(submesh)
        if held is None or held.shape[1] != width + (self.rows.adapters is not None):
            table = self.table[:, :width]
            parts = [table] if self.rows.adapters is None else [table, self.rows.adapters[:, None]]
            held = self.tables[submesh] = submesh.put(np.concatenate(parts, axis=1))
        return held

    def find_adapters(self, slots: AdapterSlots, active: Sequence[int]) -> None:
        """Updates the adapter slots of the active rows; they are sent with the page tables, as the last column."""
        running = {slot - self.first_slot for slot in active}
        found = [slots.slot_of(each) for each in self.sampling]
        found = [slot if row in running else max(slot, NONE) for row, slot in enumerate(found)]
        if self.rows.adapters is None or self.rows.adapters.tolist() != found:
            self.rows.adapters = np.array(found, np.int32)
            self.tables.clear()

    def send_changes(self, plan: DecodeRows, steer: Program, set_row: Callable[..., TokenCounters]) -> None:
        """Sends the plan's changes to the device, as one small delta; sends nothing in steady state."""
        delta = self.take(plan)
        if delta is not None:
            self.state = steer(self.state, self.put(delta))
        if plan.admit:
            self.metadata = self.rows.on(self.put)
        for admission in plan.admit:
            if admission.sampling.penalised:
                history = history_rows(admission.history, self.counts.prompt.shape[1])
                row = self.put((np.asarray(admission.slot - self.first_slot, np.int32), *history))
                self.counts = set_row(self.counts, *row)

    def allowed(self, active: Sequence[int]) -> Array | None:
        """Returns the mask of allowed tokens, see `GrammarMasks.allowed`."""
        return self.masks.allowed(slot - self.first_slot for slot in active) if self.masks.places else None

    def batch_sampling(self, active: tuple[int, ...]) -> BatchSampling:
        if self.rows.batch is None or self.rows.batch.active is not active:
            found = [sampling for slot in active if (sampling := self.sampling[slot - self.first_slot]) is not None]
            assert len(found) == len(active), f"an active slot of {active} holds no sequence"
            self.rows.batch = BatchSampling.of(active, found)
        return self.rows.batch


class PendingSamples(Protocol):
    """The samples of a step's decode rows, being copied to the host."""

    def read(self) -> DrawnRows:
        """Returns the sampled rows, see `StepDone`; blocks until they are on the host."""
        ...

    def guessed(self) -> tuple[tuple[int, str, int], ...]:
        """Returns the drafts that were verified, see `StepDone`; valid after `read`."""
        ...


@dataclass(frozen=True)
class PendingRows:
    """The samples of single-token decode rows, being copied to the host."""

    plan: DecodeRows
    first_slot: int
    tokens: Array  # i32[B], -1 for a masked slot
    wanted: list[int | None]  # SamplingParams.logprobs of the active slots
    logprobs: tuple[Array, Array, Array] | None

    def read(self) -> DrawnRows:
        """Returns the sampled rows, see `StepDone`; blocks until they are on the host."""
        logprobs = None if self.logprobs is None else [np.asarray(part) for part in self.logprobs]
        return self._rows(np.asarray(self.tokens), logprobs)

    def _rows(self, tokens: np.ndarray, logprobs: list[np.ndarray] | None) -> DrawnRows:
        rows = np.array(self.plan.active, np.int64) - self.first_slot  # may be empty
        scores = None if logprobs is None else [part[rows] for part in logprobs]
        drawn = sampled_rows(tokens[rows].tolist(), self.wanted, scores)
        reported = [None if each.token == MASKED else (each,) for each in drawn]
        return tuple(zip(self.plan.active, reported, strict=True))

    def guessed(self) -> tuple[()]:
        return ()


class DrawPrograms:
    """The programs after the last stage: from logits to tokens and the next state."""

    def __init__(self) -> None:
        self.steer, self.draw_greedy, self.draw = Program(steered), Program(draw_greedy), Program(draw)
        self.logprobs, self.count, self.set_row = (
            Program(token_logprobs),
            Program(counted, donate=(0,)),
            Program(with_row, donate=(0,)),
        )
        self.mask = Program(masked)

    @property
    def programs(self) -> list[Program]:
        return [self.steer, self.draw_greedy, self.draw, self.logprobs, self.count, self.set_row, self.mask]


class Decoder(DrawPrograms):
    """Owns the slots of every microbatch and samples their tokens."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        super().__init__()
        self.layer_groups, self.config = layer_groups, config
        put = partial(jax.device_put, device=layer_groups[-1].submesh.reader)  # each process samples for itself
        size, max_pages = config.stage_slots, config.table_buckets[-1]
        self.microbatches = [
            MicrobatchState(index * size, size, max_pages, vocab_size, put, grammars)
            for index in range(config.stage_batches)
        ]

    def begin(self, plan: DecodeRows) -> MicrobatchState:
        """Returns the microbatch of the step after sending the plan's changes."""
        most = max(1 + self.config.tokens_ahead, self.config.decode.steps_per_dispatch)
        assert max(plan.widths, default=1) <= most, f"rows of {plan.widths} tokens where no program draws so many"
        batch = self.microbatches[plan.microbatch]
        batch.send_changes(plan, self.steer, self.set_row)
        return batch

    def inputs(self, group: LayerGroup, batch: MicrobatchState, width: int) -> tuple[Array, ...]:
        """Returns the page table i32[B, width] and the state i32[4, B] on the group's devices."""
        drawn_there = group is self.layer_groups[-1] and group.submesh.tp == 1
        state = batch.state if drawn_there else group.submesh.spread(batch.state)
        return batch.table_on(group.submesh, width), state

    def finish(self, batch: MicrobatchState, plan: DecodeRows, logits: Array) -> PendingSamples:
        """Samples tokens and the next state from one step's logits f32[B, V] on the device that samples."""
        sampling, allowed = batch.batch_sampling(plan.active), batch.allowed(plan.active)
        tokens = self._draw(batch, logits if allowed is None else self.mask(logits, allowed), sampling)
        logprobs = self.logprobs(logits, tokens) if sampling.scored else None
        for array in (tokens, *(logprobs or ())):
            array.copy_to_host_async()
        return PendingRows(plan, batch.first_slot, tokens, sampling.wanted, logprobs)

    def _draw(self, batch: MicrobatchState, logits: Array, sampling: BatchSampling) -> Array:
        if sampling.plain:
            batch.state, tokens = self.draw_greedy(logits, batch.state, batch.metadata)
            return tokens
        batch.state, tokens = self.draw(logits, batch.state, batch.metadata, batch.counts)
        if sampling.penalised:
            batch.counts = self.count(batch.counts, tokens)
        return tokens
