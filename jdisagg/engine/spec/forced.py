"""Jump-forward decoding: tokens that a grammar forces are fed behind the slot's last token, all in one step.

A step has one row per slot and a few rows that all slots share. Each shared row feeds one forced token at its position
behind its slot's last token. It reads the slot's page table and samples as a step of its own would: with its own mask,
at its own position, after the tokens fed before it. Tokens and log-probabilities are therefore those of one token per
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.steps import GRAMMAR, DecodeRows
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import DeclaredProgram, local_bytes
from jdisagg.engine.decode import (
    ENABLED,
    MASKED,
    POSITION,
    STOPPED,
    Decoder,
    DrawnRows,
    MicrobatchState,
    PendingSamples,
    advanced,
)
from jdisagg.engine.draw_declarations import SamplingShapes
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.sampling import (
    FREQUENCY,
    REPETITION,
    SamplingTensors,
    TokenCounters,
    penalised,
    pick,
    pick_greedy,
    sampled_rows,
    token_logprobs,
)
from jdisagg.engine.spec.grammar_masks import masked
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.parallel.submesh import Program

SLOT, AHEAD, FED, USED = range(4)  # rows of `behind`, i32[4, K]: slot, distance from its last token, token, 1 if used


def widened(state: Array, behind: Array) -> Array:
    """Returns the state i32[4, B + K] of a step's rows: those of the slots, then those of forced tokens."""
    own = state[:, behind[SLOT]]
    rows = behind[FED], own[POSITION] + behind[AHEAD], own[STOPPED], own[ENABLED] * behind[USED]
    return jnp.concatenate([state, jnp.stack(rows)], axis=1)


def taken(state: Array, behind: Array, tokens: Array, metadata: SamplingTensors) -> tuple[Array, Array]:
    """Returns the state after sampling `tokens` i32[B + K], and the reported token of each row. MASKED is reported from
    where a slot's row was fed another token than the row before sampled, as happens if its logits are not finite."""
    slots, most = state.shape[1], behind.shape[1]
    at = behind[SLOT], jnp.where(behind[USED] == 1, behind[AHEAD], most + 1)
    fed = jnp.full((slots, most + 1), MASKED, jnp.int32).at[at].set(behind[FED], mode="drop")
    drawn = jnp.zeros((slots, most + 1), jnp.int32).at[:, 0].set(tokens[:slots])
    drawn = drawn.at[at].set(tokens[slots:], mode="drop")
    going, first = advanced(state, drawn[:, 0], metadata)
    reported = [first]
    for column in range(1, most + 1):
        on = (fed[:, column] >= 0) & (fed[:, column] == reported[-1])
        going, each = advanced(going.at[ENABLED].set(on.astype(jnp.int32)), drawn[:, column], metadata)
        reported.append(each)
    behind_reported = jnp.where(behind[USED] == 1, jnp.stack(reported, axis=1)[behind[SLOT], behind[AHEAD]], MASKED)
    return going.at[ENABLED].set(state[ENABLED]), jnp.concatenate([first, behind_reported])


def draw_forced_greedy(logits: Array, state: Array, behind: Array, metadata: SamplingTensors) -> tuple[Array, Array]:
    return taken(state, behind, pick_greedy(logits), metadata)


def draw_forced(
    logits: Array, state: Array, behind: Array, metadata: SamplingTensors, counts: TokenCounters
) -> tuple[Array, Array]:
    """Samples with all sampling parameters: `taken` for logits f32[B + K, V]."""
    penalties, neutral = metadata.floats[:, REPETITION : FREQUENCY + 1], jnp.array([[1.0, 0.0, 0.0]])
    logits = jax.lax.cond(
        jnp.any(penalties != neutral), penalised_behind, lambda logits, *_: logits, logits, behind, metadata, counts
    )
    owners = jnp.concatenate([jnp.arange(state.shape[1]), behind[SLOT]])
    drawn = pick(logits, of_slots(metadata, owners), None, widened(state, behind)[POSITION] + 1)
    return taken(state, behind, drawn, metadata)


def of_slots(metadata: SamplingTensors, slots: Array) -> SamplingTensors:
    return SamplingTensors(*(each[slots] for each in metadata))


def penalised_behind(logits: Array, behind: Array, metadata: SamplingTensors, counts: TokenCounters) -> Array:
    """Returns logits f32[B + K, V], penalised as if all tokens fed to the slot before a row had been sampled."""
    slots, owners = metadata.ints.shape[0], behind[SLOT]
    mine, others = behind[:, :, None], behind[:, None, :]
    before = (mine[SLOT] == others[SLOT]) & (others[AHEAD] <= mine[AHEAD]) & (others[USED] == 1)
    rows = jnp.arange(behind.shape[1])[:, None]
    output = counts.output[owners].at[rows, others[FED]].add(before.astype(jnp.int32))
    own = TokenCounters(counts.prompt[owners], output)
    parts = penalised(logits[:slots], metadata, counts), penalised(logits[slots:], of_slots(metadata, owners), own)
    return jnp.concatenate(parts)


def counted_forced(counts: TokenCounters, behind: Array, reported: Array) -> TokenCounters:
    """Returns the counts with all sampled tokens added."""
    slots, vocab_size = counts.output.shape
    owners = jnp.concatenate([jnp.arange(slots), behind[SLOT]])
    tokens = jnp.where(reported < 0, vocab_size, reported)
    return counts._replace(output=counts.output.at[owners, tokens].add(1, mode="drop"))


class ForcedPrograms:
    def __init__(self) -> None:
        self.widen, self.mask, self.logprobs = Program(widened), Program(masked), Program(token_logprobs)
        self.draw_greedy, self.draw = Program(draw_forced_greedy), Program(draw_forced)
        self.count = Program(counted_forced, donate=(0,))

    @property
    def programs(self) -> list[Program]:
        return [self.widen, self.mask, self.logprobs, self.draw_greedy, self.draw, self.count]


def declared_forced(programs: ForcedPrograms, slots: SamplingShapes, rows: SamplingShapes) -> Iterator[DeclaredProgram]:
    """Yields the programs of `JumpForwardDecoder`: `slots` that sample, and all `rows` of a step, forced tokens
    included."""
    state, behind = slots.ints(4, slots.rows), slots.ints(4, rows.rows - slots.rows)
    reported, held = slots.ints(rows.rows), (rows.logits, state, behind, slots.metadata)
    yield rows.program("draw forced rows", programs.widen, (state, behind))
    yield rows.program("draw forced mask", programs.mask, (rows.logits, rows.masks))
    yield rows.program("draw forced greedy", programs.draw_greedy, held)
    yield rows.program("draw forced", programs.draw, (*held, slots.counts))
    yield rows.program("draw forced logprobs", programs.logprobs, (rows.logits, reported))
    counts = slots.counts, behind, reported
    yield rows.program("draw forced count", programs.count, counts, local_bytes(slots.counts.output))


@dataclass(frozen=True)
class ForcedRows:
    """The rows of a step with forced tokens that is being dispatched."""

    runs: dict[int, range]  # by slot of the microbatch: the step's rows that feed its forced tokens
    owners: np.ndarray  # i32[B + K]: the slot whose page table each row reads
    behind: Array
    state: Array  # i32[4, B + K]


@dataclass(frozen=True)
class PendingForcedSamples:
    """The samples of a step with forced tokens, being copied to the host."""

    plan: DecodeRows
    first_slot: int
    runs: dict[int, range]
    reported: Array  # i32[B + K], reported by `taken`
    wanted: list[int | None]  # SamplingParams.logprobs of the active slots
    logprobs: tuple[Array, Array, Array] | None

    def read(self) -> DrawnRows:
        """Returns the sampled rows, see `StepDone`; blocks until they are on the host."""
        reported, found = np.asarray(self.reported).tolist(), list[tuple[int, Any]]()
        parts = None if self.logprobs is None else [np.asarray(part) for part in self.logprobs]
        for slot, number in zip(self.plan.active, self.wanted, strict=True):
            row = slot - self.first_slot
            rows = [each for each in (row, *self.runs.get(row, ())) if reported[each] != MASKED]
            scores = parts and [part[rows] for part in parts]
            found.append((slot, tuple(sampled_rows([reported[each] for each in rows], [number] * len(rows), scores))))
        return tuple((slot, drawn or None) for slot, drawn in found)

    def guessed(self) -> tuple[tuple[int, str, int], ...]:
        """Returns (slot, GRAMMAR, forced tokens) of the slots with forced tokens, see `StepDone.guessed`."""
        return tuple((self.first_slot + row, GRAMMAR, len(run)) for row, run in self.runs.items())


class JumpForwardDecoder(Decoder):
    """A `Decoder` that feeds forced tokens as far as a step has rows for them."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        super().__init__(layer_groups, config, vocab_size, grammars)
        self.forced = ForcedPrograms()
        self._rows: dict[int, ForcedRows | None] = {}  # by first slot; None: one row per slot

    def begin(self, plan: DecodeRows) -> MicrobatchState:
        batch = super().begin(plan)
        wide = max(plan.widths, default=1) > 1 and not plan.turns and bool(batch.masks.places)
        self._rows[batch.first_slot] = self._with_forced(batch, plan) if wide else None
        return batch

    def _with_forced(self, batch: MicrobatchState, plan: DecodeRows) -> ForcedRows | None:
        """Returns the rows with forced tokens, or None if too few are forced: a wide step must not cost more per
        token."""
        widths = {slot - batch.first_slot: width for slot, width in zip(plan.active, plan.widths, strict=True)}
        most = self.config.forced_tokens
        drafts = batch.masks.make_forced(widths, most)
        number = sum(map(len, drafts.values()))
        if not pays(number, len(widths), batch.size, most):
            return None
        behind, runs, at = np.zeros((4, most), np.int32), dict[int, range](), 0
        for row, tokens in drafts.items():
            own = slice(at, at + len(tokens))
            behind[SLOT, own], behind[USED, own], behind[FED, own] = row, 1, tokens
            behind[AHEAD, own] = range(1, len(tokens) + 1)
            runs[row], at = range(batch.size + own.start, batch.size + own.stop), own.stop
        owners, there = np.concatenate([np.arange(batch.size), behind[SLOT]]), batch.put(behind)
        return ForcedRows(runs, owners, there, self.forced.widen(batch.state, there))

    def inputs(self, group: LayerGroup, batch: MicrobatchState, width: int) -> tuple[Array, ...]:
        """Returns the page table i32[B, width] and the state i32[4, B], or those of B + K rows with the widest table,
        on the group's devices."""
        rows = self._rows[batch.first_slot]
        if rows is None:
            return super().inputs(group, batch, width)
        table, adapters = batch.table[rows.owners], batch.rows.adapters
        if adapters is not None:
            table = np.concatenate([table, adapters[rows.owners, None]], axis=1)
        return group.submesh.put(table), group.submesh.spread(rows.state)

    def finish(self, batch: MicrobatchState, plan: DecodeRows, logits: Array) -> PendingSamples:
        rows = self._rows[batch.first_slot]
        if rows is None:
            return super().finish(batch, plan, logits)
        sampling, active = batch.batch_sampling(plan.active), [slot - batch.first_slot for slot in plan.active]
        held = batch.state, rows.behind, batch.metadata
        under = self.forced.mask(logits, batch.masks.allowed_in(active, rows.runs, len(rows.owners)))
        if sampling.plain:
            batch.state, reported = self.forced.draw_greedy(under, *held)
        else:
            batch.state, reported = self.forced.draw(under, *held, batch.counts)
        if sampling.penalised:
            batch.counts = self.forced.count(batch.counts, rows.behind, reported)
        logprobs = self.forced.logprobs(logits, reported) if sampling.scored else None
        for array in (reported, *(logprobs or ())):
            array.copy_to_host_async()
        return PendingForcedSamples(plan, batch.first_slot, rows.runs, reported, sampling.wanted, logprobs)


def pays(forced: int, active: int, slots: int, most: int) -> bool:
    """Returns True if the forced tokens of `active` rows are worth the `most` shared rows that a wide step adds. A step
    is assumed to cost time per row, which is the upper bound: if reading weights takes most of the time, further rows
    are nearly free."""
    return forced > 0 and forced * slots >= active * most
