"""Several decode steps per dispatch, for a worker of one stage: a loop around its layers and sampling.

The host reads the tokens after the last step, so no step may depend on the host: rows with a grammar, penalties or
logprobs take single steps (`policy/worker/scheduler.py`). Layers and sampling are those of single steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.events import StepDone
from jdisagg.core.request import Sampled
from jdisagg.core.steps import DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, logit_bytes, whole
from jdisagg.engine.decode import ENABLED, MASKED, DrawnRows, MicrobatchState, PendingSamples, advanced, draw_greedy
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.layer_group import LayerGroup, LayerGroupPrograms
from jdisagg.engine.sampling import FLOAT_COLUMNS, INT_COLUMNS, Put, SamplingTensors, TokenCounters, pick, sampled_rows
from jdisagg.engine.spec.grammar_masks import masked
from jdisagg.kv.pools import POOL_SPEC
from jdisagg.parallel.submesh import WHOLE, Program
from pallas_kernels.wire_format import Pool

# Inputs and results of a program that runs several decode steps of every slot, and the host's part.
#
# Tokens are sampled and fed back on the devices. A slot takes at most its allowed number of steps, and none after its
# stop token. The steps of a ring pass through its stages (`ring.py`). Those of a worker of one stage run in a loop
# around its layers.

PLAIN, DRAWN, SCORED = (
    "plain",
    "drawn",
    "scored",
)  # sampling of a dispatch: argmax, all parameters, all parameters and logprobs


class DispatchSlots(NamedTuple):
    """The inputs of a dispatch for all slots, [.., S]; inside a ring's program [.., pp, B]."""

    table: Array  # i32[S, W]; i32[S, W + 1] with adapters, whose slots are the last column
    state: Array  # i32[4, S], see `decode.py`
    left: Array  # i32[S]: tokens that each slot may sample in this dispatch
    turns: Array  # i32[]: the largest of `left`
    metadata: SamplingTensors
    counts: TokenCounters | None = None  # None if no row has penalties
    allowed: Array | None = None  # u32[S, words], see `grammar_masks.py`; None if no row has a grammar


class DispatchResult(NamedTuple):
    """The results of a dispatch besides the pages: tokens by step and slot, and the slots' next state."""

    tokens: Array  # i32[most, S], -1 if no token was sampled
    logprobs: tuple[Array, Array, Array] | None  # f32[most, S], i32[most, S, 20], f32[most, S, 20]
    output: Array | None  # i32[S, V], the output counts
    state: Array  # i32[4, S]


def with_left(state: Array, left: Array) -> Array:
    """Returns the state with the slots disabled that may sample no further token."""
    return state.at[ENABLED].set(state[ENABLED] * (left > 0).astype(jnp.int32))


def draw_left(
    kind: str,
    logits: Array,
    state: Array,
    left: Array,
    metadata: SamplingTensors,
    counts: TokenCounters | None = None,
    allowed: Array | None = None,
) -> tuple[Array, Array]:
    """Returns a step's tokens i32[B], -1 for slots that sample none, and the next state; see `Slots`."""
    stepped = with_left(state, left)
    if kind == PLAIN:
        after, tokens = draw_greedy(logits, stepped, metadata)
    else:
        logits = logits if allowed is None else masked(logits, allowed)
        after, tokens = advanced(stepped, pick(logits, metadata, counts, stepped[1] + 1), metadata)
    return after.at[ENABLED].set(state[ENABLED]), tokens


class WidthBuffer:
    """The tokens that each slot may sample in a dispatch, and the largest of them; sent only if they changed."""

    def __init__(self, slots: int, put: Put) -> None:
        self._slots, self._put = slots, put
        self._sent: tuple[list[int], Array, Array] | None = None
        self._rows: DecodeRows | None = None  # the rows that were sent last

    def of(self, rows: DecodeRows) -> tuple[Array, Array]:
        """Returns the widths i32[S] and their maximum i32[] on the device."""
        if self._sent is not None and rows is self._rows:
            return self._sent[1:]
        self._rows = rows
        widths = [0] * self._slots
        for slot, width in zip(rows.active, rows.widths or [1] * len(rows.active), strict=True):
            widths[slot] = width
        if self._sent is None or self._sent[0] != widths:
            host = np.array(widths, np.int32), np.array(max(widths), np.int32)
            self._sent = widths, *self._put(host)
        return self._sent[1:]


@dataclass(frozen=True)
class PendingMultiStep:
    """A multi-step dispatch whose tokens are not read yet; see `executor.PendingStep`."""

    step_id: int
    plan: DecodeRows
    drawn: DispatchResult
    wanted: list[int | None]
    counts: tuple[tuple[ExpertLoad, list[Array]], ...]

    def read(self) -> StepDone:
        tokens = np.asarray(self.drawn.tokens)
        logprobs = None if self.drawn.logprobs is None else [np.asarray(part) for part in self.drawn.logprobs]
        for load, taken in self.counts:
            load.read(taken)
        return StepDone(self.step_id, self._rows(tokens, logprobs), (), ())

    def _rows(self, tokens: np.ndarray, logprobs: list[np.ndarray] | None) -> DrawnRows:
        found = list[tuple[int, tuple[Sampled, ...] | None]]()
        by_slot = tokens.T.tolist()
        for slot, wanted in zip(self.plan.active, self.wanted, strict=True):
            drawn = [token for token in by_slot[slot] if token != MASKED]
            scores = None if logprobs is None else [part[: len(drawn), slot] for part in logprobs]
            found.append((slot, tuple(sampled_rows(drawn, [wanted] * len(drawn), scores)) or None))
        return tuple(found)


class StepLoopState(NamedTuple):
    """The loop's state between two steps, on one shard."""

    pools: list[Pool]
    state: Array  # i32[4, S]
    left: Array  # i32[S]
    tokens: Array  # i32[most, S]
    load: list[Array]  # i32[layers with experts, experts], if the model has any


class MultiStepPrograms:
    """The programs for each kind of sampling; weights and pages may be shapes."""

    def __init__(self, group: LayerGroupPrograms, most: int) -> None:
        assert group.is_first and group.is_last, (
            "several steps of several stages per dispatch are a ring, see `ring.py`"
        )
        self.group, self.most = group, most
        self.kinds = {kind: self._program(kind) for kind in (PLAIN, DRAWN)}

    @property
    def programs(self) -> list[Program]:
        return [*self.kinds.values()]

    def _program(self, kind: str) -> Program:
        submesh = self.group.submesh
        specs = (self.group.params.specs, POOL_SPEC, WHOLE)
        results = [WHOLE] * (2 if self.group.sparse else 1)
        formats = (self.group.form.format, *[None] * len(results))
        turns = partial(self._turns, kind)
        return submesh.program(turns, specs, (POOL_SPEC, *results), (1,), formats, **self.group.compiled)

    # ------------------------------------------------------------ code of one shard

    def _turns(self, kind: str, leaves: list[Array], pools: list[Pool], slots: DispatchSlots) -> tuple[Any, ...]:
        experts = self.group.config.experts
        load = [jnp.zeros((len(self.group.sparse), experts.number), jnp.int32)] if self.group.sparse and experts else []
        tokens = jnp.full((self.most, len(slots.left)), MASKED, jnp.int32)
        carry = StepLoopState(list(pools), slots.state, slots.left, tokens, load)
        end = jax.lax.fori_loop(0, slots.turns, partial(self._turn, kind, leaves, slots), carry)
        return end.pools, *end.load, DispatchResult(end.tokens, None, None, end.state)

    def _turn(
        self, kind: str, leaves: list[Array], slots: DispatchSlots, turn: Array, carry: StepLoopState
    ) -> StepLoopState:
        stepped = with_left(carry.state, carry.left)
        made: Any = self.group.decode_step(leaves, carry.pools, slots.table, stepped, None)
        pools, logits, *load = made
        state, tokens = draw_left(kind, logits, carry.state, carry.left, slots.metadata)
        return StepLoopState(
            pools,
            state,
            carry.left - (tokens != MASKED).astype(jnp.int32),
            jax.lax.dynamic_update_index_in_dim(carry.tokens, tokens, turn, 0),
            [before + more for before, more in zip(carry.load, load, strict=True)],
        )


class MultiStep(MultiStepPrograms):
    """The multi-step programs of a worker with loaded weights and allocated pages."""

    def __init__(self, group: LayerGroup, config: WorkerConfig) -> None:
        super().__init__(group, config.decode.steps_per_dispatch)
        self._held = group
        self._widths = WidthBuffer(config.num_slots, group.submesh.put)
        self._metadata: tuple[SamplingTensors, SamplingTensors] | None = (
            None  # on the device that samples, and on all shards
        )

    def run(self, step_id: int, plan: DecodeRows, batch: MicrobatchState) -> PendingMultiStep:
        """Dispatches several steps of a microbatch to which the plan's changes were sent."""
        sampling = batch.batch_sampling(plan.active)
        kind = PLAIN if sampling.plain else DRAWN
        drawn = self._dispatch(kind, self._slots(plan, batch))
        batch.state = self._held.submesh.first_copy(drawn.state)
        drawn.tokens.copy_to_host_async()
        load = self._held.load
        counts: tuple[tuple[ExpertLoad, list[Array]], ...] = ((load, load.taken()),) if self._held.sparse else ()
        return PendingMultiStep(step_id, plan, drawn, sampling.wanted, counts)

    def _dispatch(self, kind: str, slots: DispatchSlots) -> DispatchResult:
        kv = self._held.kv
        kv.pools, *loads, drawn = self.kinds[kind](self._held.params.leaves, kv.pools, slots)
        self._held.load.leaves(loads)
        return drawn

    def _slots(self, plan: DecodeRows, batch: MicrobatchState) -> DispatchSlots:
        submesh = self._held.submesh
        table = batch.table_on(submesh, plan.table_pages)
        state = batch.state if submesh.tp == 1 else submesh.spread(batch.state)  # this device samples
        if self._metadata is None or self._metadata[0] is not batch.metadata:
            self._metadata = batch.metadata, SamplingTensors(*map(submesh.spread, batch.metadata))
        return DispatchSlots(table, state, *self._widths.of(plan), self._metadata[1])


# Several decode steps of several stages in one dispatch: a step of all slots, run as single steps of one microbatch
# after the other, all dispatched before any is read.
#
# Sampled tokens enter the first stage again on the devices. While one microbatch is at a stage, the others are at the
# other stages, so no stage waits for the host. Programs are those of single steps, so every kind of sampling is
# allowed. A row that has all its tokens is masked from the next step on, and a row that sampled its stop token masks
# itself.


def single_steps(rows: DecodeRows, batches: int, size: int) -> tuple[DecodeRows, ...]:
    """Returns the single steps of `batches` microbatches of `size` slots that make up a step of all slots, in the order
    of their dispatch. Changes go with a microbatch's first step, even if it has no active slot. Equal steps are one
    object, so that nothing is computed again for them."""
    firsts = [_of_batch(rows, batch, range(batch * size, (batch + 1) * size)) for batch in range(batches)]
    rounds = [[first for first in firsts if first.active or _changes(first)]]
    widths = rows.widths if rows.turns else ()
    latest = dict(enumerate(firsts))
    for turn in range(1, max(widths, default=1)):
        drawing = {slot for slot, width in zip(rows.active, widths, strict=True) if width > turn}
        latest = {batch: _next_turn(before, drawing) for batch, before in latest.items()}
        rounds.append([each for each in latest.values() if each.active])
    return tuple(chain.from_iterable(rounds))


def _of_batch(rows: DecodeRows, batch: int, slots: range) -> DecodeRows:
    width_of = dict(zip(rows.active, rows.widths, strict=True)) if rows.widths and not rows.turns else {}
    active = tuple(slot for slot in rows.active if slot in slots)
    return DecodeRows(
        batch,
        active,
        rows.table_pages,
        admit=tuple(each for each in rows.admit if each.slot in slots),
        grants=tuple(each for each in rows.grants if each.slot in slots),
        retire=tuple(slot for slot in rows.retire if slot in slots),
        widths=tuple(width_of[slot] for slot in active if width_of),
        read=tuple(each for each in rows.read if each.slot in slots),
    )


def _next_turn(before: DecodeRows, drawing: set[int]) -> DecodeRows:
    """Returns a microbatch's next step, in which only rows that have all their tokens drop out."""
    active = tuple(slot for slot in before.active if slot in drawing)
    if active == before.active and not _changes(before):
        return before
    return replace(
        before, active=before.active if active == before.active else active, admit=(), grants=(), retire=(), read=()
    )


def _changes(rows: DecodeRows) -> bool:
    return bool(rows.admit or rows.grants or rows.retire or rows.read)


class PipelinedMultiStep:
    """Splits steps of all slots into single steps of microbatches; caches the last split, as equal rows repeat."""

    def __init__(self, batches: int, size: int) -> None:
        self._sizes = batches, size
        self._last: tuple[DecodeRows, tuple[DecodeRows, ...]] | None = None

    def of(self, rows: DecodeRows) -> tuple[DecodeRows, ...]:
        if self._last is None or self._last[0] is not rows:
            self._last = rows, single_steps(rows, *self._sizes)
        return self._last[1]


@dataclass(frozen=True)
class PendingPipelinedMultiStep:
    """A dispatched step of all slots over several stages; see `executor.PendingStep`."""

    step_id: int
    plan: DecodeRows
    steps: Sequence[PendingSamples]
    counts: tuple[tuple[ExpertLoad, list[Array]], ...]

    def read(self) -> StepDone:
        rows = self._rows(chain.from_iterable([step.read() for step in self.steps]))
        for load, taken in self.counts:
            load.read(taken)
        guessed = tuple(chain.from_iterable(step.guessed() for step in self.steps))
        return StepDone(self.step_id, rows, (), (), guessed=guessed)

    def _rows(self, drawn: chain[tuple[int, tuple[Sampled, ...] | None]]) -> DrawnRows:
        by_slot: dict[int, list[Sampled]] = {slot: [] for slot in self.plan.active}
        for slot, tokens in drawn:
            by_slot[slot] += tokens or ()
        return tuple((slot, tuple(tokens) or None) for slot, tokens in by_slot.items())


# Declared programs of several decode steps, like the single step of the same slots whose layers they run.


def declared_multi_step(turns: MultiStepPrograms, step: DeclaredProgram) -> list[DeclaredProgram]:
    """Returns a program for each kind of sampling; step: the declared program of one decode step."""
    table, state, _ = step.batch
    slots, submesh = state.shape[1], turns.group.submesh
    metadata = (slots, INT_COLUMNS), (slots, FLOAT_COLUMNS)
    drawn = SamplingTensors(whole(submesh, metadata[0]), whole(submesh, metadata[1], jnp.float32))  # pyright: ignore[reportArgumentType]
    inputs = DispatchSlots(table, state, whole(submesh, (slots,)), whole(submesh, ()), drawn)  # pyright: ignore[reportArgumentType]
    room = step.batch_bytes + logit_bytes(turns.group.config, slots)
    return [
        replace(
            step,
            kind=f"turns {kind}",
            program=program,
            batch=(inputs,),
            batch_bytes=room,
            loops=(turns.most, *step.loops),
        )
        for kind, program in turns.kinds.items()
    ]
