"""Several decode steps of every slot in one dispatch: the inputs and results of such a program, and the host's part.

Tokens are sampled and fed back on the devices. A slot takes at most the steps it may, and none after its stop token.
The steps of a ring go round its stages (`ring.py`); those of a worker of one stage follow each other in a loop around
its layers (`multi_step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.events import StepDone
from jdisagg.core.request import Sampled
from jdisagg.core.steps import DecodeRows
from jdisagg.engine.decode import ENABLED, MASKED, DrawnRows, advanced, draw_greedy
from jdisagg.engine.expert_load import ExpertLoad
from jdisagg.engine.grammar_masks import masked
from jdisagg.engine.sampling import Counts, SamplingMetadata, pick
from jdisagg.engine.sampling_metadata import Put, sampled_rows

PLAIN, DRAWN, SCORED = "plain", "drawn", "scored"  # what a dispatch draws: argmax, anything, and its logprobs too


class Slots(NamedTuple):
    """What a dispatch knows of all slots, [.., S]; inside a ring's program [.., pp, B]."""

    table: Array  # i32[S, W], one wider with adapters, whose slots come last
    state: Array  # i32[4, S], see `decode.py`
    left: Array  # i32[S]: tokens that each slot may draw in this dispatch
    turns: Array  # i32[]: the most of them
    metadata: SamplingMetadata
    counts: Counts | None = None  # None where nobody is penalised
    allowed: Array | None = None  # u32[S, words], see `grammar_masks.py`; None where nobody has a grammar


class Drawn(NamedTuple):
    """What a dispatch makes beside the pages: by turn and slot, and the slots' next state."""

    tokens: Array  # i32[most, S], -1 where nothing was drawn
    logprobs: tuple[Array, Array, Array] | None  # f32[most, S], i32[most, S, 20], f32[most, S, 20]
    output: Array | None  # i32[S, V] of the counts
    state: Array  # i32[4, S]


def with_left(state: Array, left: Array) -> Array:
    """The state, in which no slot is stepped that may draw nothing more."""
    return state.at[ENABLED].set(state[ENABLED] * (left > 0).astype(jnp.int32))


def draw_left(
    kind: str,
    logits: Array,
    state: Array,
    left: Array,
    metadata: SamplingMetadata,
    counts: Counts | None = None,
    allowed: Array | None = None,
) -> tuple[Array, Array]:
    """A turn's tokens i32[B], -1 of slots that draw none, and the next state; see `Slots`."""
    stepped = with_left(state, left)
    if kind == PLAIN:
        after, tokens = draw_greedy(logits, stepped, metadata)
    else:
        logits = logits if allowed is None else masked(logits, allowed)
        after, tokens = advanced(stepped, pick(logits, metadata, counts, stepped[1] + 1), metadata)
    return after.at[ENABLED].set(state[ENABLED]), tokens


class SentWidths:
    """Tokens that each slot may draw in a dispatch, and the most of them; sent where they are not as before."""

    def __init__(self, slots: int, put: Put) -> None:
        self._slots, self._put = slots, put
        self._sent: tuple[list[int], Array, Array] | None = None
        self._rows: DecodeRows | None = None  # that it was for

    def of(self, rows: DecodeRows) -> tuple[Array, Array]:
        """i32[S] and i32[]."""
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
    """A dispatch whose tokens are not read yet; see `executor.PendingStep`."""

    step_id: int
    plan: DecodeRows
    drawn: Drawn
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
