"""What is drawn of a step's rows where a slot has several, its token's and a draft's: each row draws, and a draft is
taken as far as it is what was drawn.

Penalties look at what stood before: of a draft's rows, at the guesses in front of each one too, which are what was
drawn wherever the row behind them counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.steps import DecodeRows
from jdisagg.engine.decode import ENABLED, MASKED, POSITION, TOKEN, DrawnRows, advanced
from jdisagg.engine.layer_group import running
from jdisagg.engine.sampling import (
    FREQUENCY,
    REPETITION,
    Counts,
    SamplingMetadata,
    counted,
    penalised,
    pick,
    pick_greedy,
    token_logprobs,
)
from jdisagg.engine.sampling_metadata import sampled_rows


def noted(history: Array, state: Array) -> Array:
    """The history with each running slot's token at its position."""
    slots = jnp.arange(history.shape[0])
    places = jnp.where(running(state), state[POSITION], history.shape[1])
    return history.at[slots, places].set(state[TOKEN], mode="drop")


def taken(history: Array, state: Array, wide: Array, tokens: Array, metadata: SamplingMetadata) -> Any:
    """(history, state, what is told i32[B, 2 + drafts]) after these were drawn, i32[B * (1 + drafts)], by rows as
    `wide`: tokens as far as each row was fed what the one before it drew, MASKED behind that, and in the last column
    how many were guessed."""
    fed, drawn = wide[TOKEN].reshape(state.shape[1], -1), tokens.reshape(state.shape[1], -1)
    enabled, going, reported = wide[ENABLED].reshape(fed.shape) == 1, state, []
    for column in range(fed.shape[1]):
        on = enabled[:, column] if column == 0 else enabled[:, column] & (fed[:, column] == reported[-1])
        going, told = advanced(going.at[ENABLED].set(on.astype(jnp.int32)), drawn[:, column], metadata)
        reported.append(told)
        history = noted(history, going)
    guesses = jnp.where(running(state), jnp.sum(enabled[:, 1:], axis=1, dtype=jnp.int32), 0)
    return history, going.at[ENABLED].set(state[ENABLED]), jnp.stack([*reported, guesses], axis=1)


def repeated(metadata: SamplingMetadata, rows: int) -> SamplingMetadata:
    """That of each slot for each of its rows."""
    times = rows // metadata.ints.shape[0]
    return SamplingMetadata(*(jnp.repeat(each, times, axis=0) for each in metadata))


def verified_greedy(history: Array, state: Array, wide: Array, logits: Array, metadata: SamplingMetadata) -> Any:
    return taken(history, state, wide, pick_greedy(logits), metadata)


def verified(
    history: Array, state: Array, wide: Array, logits: Array, metadata: SamplingMetadata, counts: Counts
) -> Any:
    """As `taken`, of logits f32[B * (1 + drafts), V]."""
    asked, neutral = metadata.floats[:, REPETITION : FREQUENCY + 1], jnp.array([[1.0, 0.0, 0.0]])
    logits = jax.lax.cond(
        jnp.any(asked != neutral), penalised_ahead, lambda logits, *_: logits, logits, wide, metadata, counts
    )
    own = repeated(metadata, logits.shape[0])
    return taken(history, state, wide, pick(logits, own, None, wide[POSITION] + 1), metadata)


def penalised_ahead(logits: Array, wide: Array, metadata: SamplingMetadata, counts: Counts) -> Array:
    """f32[B * (1 + drafts), V]: each row's, as if all that its slot is fed before it had been drawn."""
    slots, vocab_size = counts.output.shape
    by_slot, fed, rows = logits.reshape(slots, -1, vocab_size), wide[TOKEN].reshape(slots, -1), []
    for column in range(fed.shape[1]):
        counts = counted(counts, fed[:, column]) if column else counts
        rows.append(penalised(by_slot[:, column], metadata, counts))
    return jnp.stack(rows, axis=1).reshape(logits.shape)


def counted_drafts(counts: Counts, told: Array) -> Counts:
    """The counts with all that was drawn."""
    for column in range(told.shape[1] - 1):
        counts = counted(counts, told[:, column])
    return counts


def drafts_logprobs(logits: Array, told: Array) -> tuple[Array, Array, Array]:
    """As `token_logprobs`, of every row."""
    return token_logprobs(logits, told[:, :-1].reshape(-1))


@dataclass(frozen=True)
class PendingDrafts:
    """What rows with drafts draw, on its way to the host."""

    plan: DecodeRows
    first_slot: int
    told: Array  # i32[B, 2 + drafts], see `taken`
    wanted: list[int | None]  # SamplingParams.logprobs of the active slots
    logprobs: tuple[Array, Array, Array] | None  # of B * (1 + drafts) rows
    kinds: list[str]  # of the active slots: what their drafts were made by

    def read(self) -> DrawnRows:
        """Blocks until they are there; see `StepDone`."""
        rows = [slot - self.first_slot for slot in self.plan.active]
        drawn, width = np.asarray(self.told)[:, :-1].tolist(), self.told.shape[1] - 1
        parts = None if self.logprobs is None else [np.asarray(each) for each in self.logprobs]
        drawn_rows = []
        for slot, row, number in zip(self.plan.active, rows, self.wanted, strict=True):
            tokens = [token for token in drawn[row] if token != MASKED]
            own = slice(row * width, row * width + len(tokens))
            told = sampled_rows(tokens, [number] * len(tokens), parts and [part[own] for part in parts])
            drawn_rows.append((slot, tuple(told) or None))
        return tuple(drawn_rows)

    def guessed(self) -> tuple[tuple[int, str, int], ...]:
        """As `StepDone.guessed`."""
        numbers = np.asarray(self.told)[:, -1].tolist()
        found = [
            (slot, kind, numbers[slot - self.first_slot])
            for slot, kind in zip(self.plan.active, self.kinds, strict=True)
        ]
        return tuple(each for each in found if each[2])
