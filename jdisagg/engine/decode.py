"""Decode rows: those of one microbatch, whose tokens are drawn and fed back on the device.

The last stage owns each microbatch's *decode state*, i32[4, B]: the token fed next, its position, whether the slot has
drawn a stop token, and whether the host has it enabled. Drawing makes the next state, so steps follow each other
without the host; steps of different microbatches share nothing but the KV pools, and pipeline over the stages by
program order. The host owns page tables and metadata and sends them when they change; admissions, pauses and
retirements go as one small delta to it. In steady state a step is its stage programs and one draw, and nothing is
sent.
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
    Counts,
    Put,
    SamplingMetadata,
    SamplingRows,
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
from jdisagg.model.grammars.grammars import Grammars
from jdisagg.model.lora import NONE
from jdisagg.parallel.submesh import Program, RingMesh, Submesh

DrawnRows = tuple[tuple[int, tuple[Sampled, ...] | None], ...]
TOKEN, POSITION, STOPPED, ENABLED = range(4)  # rows of a state
MASKED = -1  # reported for a slot that draws nothing
ADMITTED = 2  # row of a delta, which else is as a state: 1 where the slot takes a new sequence


def steered(state: Array, delta: Array) -> Array:
    """The state after the host's delta i32[4, B]: token, position, admitted, enabled."""
    admitted = delta[ADMITTED] == 1
    token, position = (jnp.where(admitted, delta[row], state[row]) for row in (TOKEN, POSITION))
    return jnp.stack([token, position, jnp.where(admitted, 0, state[STOPPED]), delta[ENABLED]])


def advanced(state: Array, tokens: Array, metadata: SamplingMetadata) -> tuple[Array, Array]:
    """The state after these tokens i32[B] were drawn, and what is reported: the token, -1 for a masked slot.

    A slot whose logits were no numbers reports BROKEN once and is masked from then on.
    """
    alive = (state[ENABLED] == 1) & (state[STOPPED] == 0)
    position = state[POSITION] + alive.astype(jnp.int32)
    stopped = (state[STOPPED] == 1) | (alive & (is_stop(tokens, metadata, position) | (tokens == BROKEN)))
    fed = jnp.where(alive & (tokens != BROKEN), tokens, state[TOKEN])
    return jnp.stack([fed, position, stopped.astype(jnp.int32), state[ENABLED]]), jnp.where(alive, tokens, MASKED)


def draw_greedy(logits: Array, state: Array, metadata: SamplingMetadata) -> tuple[Array, Array]:
    return advanced(state, pick_greedy(logits), metadata)


def draw(logits: Array, state: Array, metadata: SamplingMetadata, counts: Counts) -> tuple[Array, Array]:
    return advanced(state, pick(logits, metadata, counts, state[POSITION] + 1), metadata)


class Microbatch:
    """Slots first_slot to first_slot + B: the host's mirror, and what lies where their tokens are drawn."""

    def __init__(
        self, first_slot: int, size: int, max_pages: int, vocab_size: int, put: Put, grammars: Grammars | None = None
    ) -> None:
        """put: brings host arrays there."""
        self.first_slot, self.size, self.put = first_slot, size, put
        self.masks = GrammarMasks(grammars, size, vocab_size, put)
        self.table = np.zeros((size, max_pages), np.int32)
        self.enabled = np.zeros(size, np.int32)
        self.sampling: list[SamplingParams | None] = [None] * size
        self.rows = SamplingRows(size)
        self.metadata = self.rows.on(put)
        self.state = put(np.zeros((4, size), np.int32))
        empty = np.zeros((size, vocab_size), np.bool_), np.zeros((size, vocab_size), np.int32)
        self.counts = Counts(*put(empty))
        self.tables: dict[Submesh | RingMesh, Array] = {}  # page tables as last sent, all of one width

    def take(self, plan: DecodeRows) -> np.ndarray | None:
        """Writes the plan into the mirror; returns the delta i32[4, B] to send, or None where nothing changed."""
        if plan is self.rows.taken and not (plan.admit or plan.grants or plan.retire or plan.read):
            return None
        self.rows.taken, self.rows.asked = plan, None
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

    def table_on(self, submesh: Submesh | RingMesh, width: int) -> Array:
        """i32[B, width] on every shard of `submesh`, one wider with adapters; sent only if it changed since."""
        held = self.tables.get(submesh)
        if held is None or held.shape[1] != width + (self.rows.adapters is not None):
            table = self.table[:, :width]
            parts = [table] if self.rows.adapters is None else [table, self.rows.adapters[:, None]]
            held = self.tables[submesh] = submesh.put(np.concatenate(parts, axis=1))
        return held

    def find_adapters(self, slots: AdapterSlots, active: Sequence[int]) -> None:
        """Where the adapters of the active rows are now; they go with the page tables, as their last column."""
        running = {slot - self.first_slot for slot in active}
        found = [slots.slot_of(each) for each in self.sampling]
        found = [slot if row in running else max(slot, NONE) for row, slot in enumerate(found)]
        if self.rows.adapters is None or self.rows.adapters.tolist() != found:
            self.rows.adapters = np.array(found, np.int32)
            self.tables.clear()

    def send_changes(self, plan: DecodeRows, steer: Program, set_row: Callable[..., Counts]) -> None:
        """What the plan changes goes there, as one small delta; nothing in steady state."""
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
        """See `GrammarMasks.allowed`."""
        return self.masks.allowed(slot - self.first_slot for slot in active) if self.masks.places else None

    def asked(self, active: tuple[int, ...]) -> BatchSampling:
        if self.rows.asked is None or self.rows.asked.active is not active:
            found = [sampling for slot in active if (sampling := self.sampling[slot - self.first_slot]) is not None]
            assert len(found) == len(active), f"an active slot of {active} holds no sequence"
            self.rows.asked = BatchSampling.of(active, found)
        return self.rows.asked


class Drawing(Protocol):
    """What a step's decode rows draw, on its way to the host."""

    def read(self) -> DrawnRows:
        """Blocks until it is there; see `StepDone`."""
        ...

    def guessed(self) -> tuple[tuple[int, str, int], ...]:
        """What drafts there were, where `read` has been called; see `StepDone`."""
        ...


@dataclass(frozen=True)
class PendingRows:
    """What a step's decode rows draw, on its way to the host."""

    plan: DecodeRows
    first_slot: int
    tokens: Array  # i32[B], -1 for a masked slot
    wanted: list[int | None]  # SamplingParams.logprobs of the active slots
    logprobs: tuple[Array, Array, Array] | None

    def read(self) -> DrawnRows:
        """Blocks until they are there; see `StepDone`."""
        logprobs = None if self.logprobs is None else [np.asarray(part) for part in self.logprobs]
        return self._rows(np.asarray(self.tokens), logprobs)

    def _rows(self, tokens: np.ndarray, logprobs: list[np.ndarray] | None) -> DrawnRows:
        rows = np.array(self.plan.active, np.int64) - self.first_slot  # of nobody too
        scores = None if logprobs is None else [part[rows] for part in logprobs]
        drawn = sampled_rows(tokens[rows].tolist(), self.wanted, scores)
        told = [None if each.token == MASKED else (each,) for each in drawn]
        return tuple(zip(self.plan.active, told, strict=True))

    def guessed(self) -> tuple[()]:
        return ()


class DrawPrograms:
    """The programs of a step after its last stage: from logits to tokens and the next state."""

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
    """Holds the slots of every microbatch, and draws what follows them."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__()
        self.layer_groups, self.config = layer_groups, config
        put = partial(jax.device_put, device=layer_groups[-1].submesh.reader)  # each process draws for itself
        size, max_pages = config.stage_slots, config.table_buckets[-1]
        self.microbatches = [
            Microbatch(index * size, size, max_pages, vocab_size, put, grammars)
            for index in range(config.stage_batches)
        ]

    def begin(self, plan: DecodeRows) -> Microbatch:
        """The microbatch as the step finds it: what changes is sent."""
        most = max(1 + self.config.tokens_ahead, self.config.decode.steps_per_dispatch)
        assert max(plan.widths, default=1) <= most, f"rows of {plan.widths} tokens where no program draws so many"
        batch = self.microbatches[plan.microbatch]
        batch.send_changes(plan, self.steer, self.set_row)
        return batch

    def inputs(self, group: LayerGroup, batch: Microbatch, width: int) -> tuple[Array, ...]:
        """Page table i32[B, width] and state i32[4, B] where the group is."""
        drawn_there = group is self.layer_groups[-1] and group.submesh.tp == 1
        state = batch.state if drawn_there else group.submesh.spread(batch.state)
        return batch.table_on(group.submesh, width), state

    def finish(self, batch: Microbatch, plan: DecodeRows, logits: Array) -> Drawing:
        """Logits f32[B, V] of one step, on the device that draws -> tokens, and the next state."""
        asked, allowed = batch.asked(plan.active), batch.allowed(plan.active)
        tokens = self._draw(batch, logits if allowed is None else self.mask(logits, allowed), asked)
        logprobs = self.logprobs(logits, tokens) if asked.scored else None
        for array in (tokens, *(logprobs or ())):
            array.copy_to_host_async()
        return PendingRows(plan, batch.first_slot, tokens, asked.wanted, logprobs)

    def _draw(self, batch: Microbatch, logits: Array, asked: BatchSampling) -> Array:
        if asked.plain:
            batch.state, tokens = self.draw_greedy(logits, batch.state, batch.metadata)
            return tokens
        batch.state, tokens = self.draw(logits, batch.state, batch.metadata, batch.counts)
        if asked.penalised:
            batch.counts = self.count(batch.counts, tokens)
        return tokens
