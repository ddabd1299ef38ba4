"""Decode rows that verify a draft: what may follow is guessed from the sequence's own tokens, and several guesses are
checked by one step.

Speculative decoding (Leviathan et al., ICML 2023) with n-gram drafts (prompt lookup: Saxena 2023). All of it runs where
tokens are drawn, so that steps follow each other without the host, as those of one token do. Of each slot the device
holds the tokens so far; the longest end of them that stood there before, of MAX_NGRAM tokens down to MIN_NGRAM, says
what came after it then. A step feeds the last token and the draft as so many rows, one position behind the other, and
draws at each. A draw is a function of the request's seed and the position (`sampling.py`), and the draft is certain of
its token, so the draft is taken as far as it is what was drawn: rejection sampling of such a draft takes a token just
as often, and here the tokens are those that steps of one would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.steps import DRAFT, GRAMMAR, NGRAM, Admission, DecodeRows
from jdisagg.core.worker_config import MAX_NGRAM, MIN_NGRAM, WorkerConfig, bucket
from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.decode import (
    ENABLED,
    MASKED,
    POSITION,
    STOPPED,
    TOKEN,
    Decoder,
    Drawing,
    Microbatch,
)
from jdisagg.engine.draft_layers import FREE, DraftLayers
from jdisagg.engine.draft_reading import DraftReading
from jdisagg.engine.draw_declarations import Drawn
from jdisagg.engine.grammar_masks import masked
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.sampling_metadata import Asked, is_plain
from jdisagg.engine.verification import (
    PendingDrafts,
    counted_drafts,
    drafts_logprobs,
    verified,
    verified_greedy,
)
from jdisagg.model.grammars.grammars import Grammars
from jdisagg.parallel.submesh import Program

NO_GUESS = -1
LATE = 16  # steps of one token a row whose tokens are noted at once


def guessed(history: Array, state: Array, drafts: int) -> Array:
    """What may follow each slot's token, i32[B, drafts]; NO_GUESS where its end never stood there before.

    history i32[B, S]: tokens by position, that of `state` included. A guess that runs into the present goes on with
    what it has guessed itself: what repeats is thought to go on repeating.
    """
    position, places = state[POSITION][:, None], jnp.arange(history.shape[1])[None, :]
    alike, ends = jnp.ones(history.shape, jnp.bool_), jnp.full(state.shape[1:], NO_GUESS, jnp.int32)
    for back in range(MAX_NGRAM):
        last = jnp.take_along_axis(history, jnp.maximum(position - back, 0), axis=1)
        alike = alike & (jnp.roll(history, back, axis=1) == last) & (places >= back) & (position >= back)
        if back + 1 >= MIN_NGRAM:
            found = jnp.max(jnp.where(alike & (places < position), places, NO_GUESS), axis=1)
            ends = jnp.where(found >= 0, found, ends).astype(jnp.int32)
    period = jnp.maximum(position - ends[:, None], 1)
    following = ends[:, None] + 1 + jnp.arange(drafts)[None, :] % period
    guess = jnp.take_along_axis(history, jnp.clip(following, 0, history.shape[1] - 1), axis=1)
    return jnp.where(ends[:, None] >= 0, guess, NO_GUESS)


def widened(history: Array, state: Array, widths: Array, given: Array) -> Array:
    """The state i32[4, B * (1 + drafts)] of a step's rows, those of a slot one behind the other: its token and its
    draft. `widths` i32[B] is how many of them may draw; `given` i32[B, drafts] are drafts of the host's, FREE for rows
    that guess for themselves, NO_GUESS behind a draft's end."""
    drafts = given.shape[1]
    guess = jnp.where(given == FREE, guessed(history, state, drafts), given)
    tokens = jnp.concatenate([state[TOKEN][:, None], guess], axis=1)
    ahead = jnp.arange(1 + drafts, dtype=jnp.int32)[None, :]
    enabled = (state[ENABLED][:, None] == 1) & (ahead < widths[:, None]) & (tokens >= 0)
    stopped = jnp.broadcast_to(state[STOPPED][:, None], tokens.shape)
    rows = jnp.maximum(tokens, 0), state[POSITION][:, None] + ahead, stopped, enabled.astype(jnp.int32)
    return jnp.stack([each.reshape(-1) for each in rows])


def with_tokens(history: Array, row: Array, tokens: Array) -> Array:
    """The history, one slot's tokens i32[S] put in its place."""
    return history.at[row].set(tokens)


def noted_late(history: Array, state: Array, *tokens: Array) -> Array:
    """The history with what the last steps of one token a row drew, `tokens` i32[B] each, the last of them where the
    state is; MASKED where a slot drew none."""
    drawn = jnp.stack(tokens, axis=1)
    took = (drawn != MASKED).astype(jnp.int32)
    behind = jnp.cumsum(took[:, ::-1], axis=1)[:, ::-1] - took  # tokens that were drawn after each
    places = jnp.where(drawn >= 0, state[POSITION][:, None] - behind, history.shape[1])
    return history.at[jnp.arange(history.shape[0])[:, None], places].set(drawn, mode="drop")


def noted_turns(history: Array, state: Array, tokens: Array) -> Array:
    """The history with what the last dispatch of several turns drew, `tokens` i32[most, B]; see `noted_late`."""
    return noted_late(history, state, *tokens)


class HeadSteps(Protocol):
    """The programs that a head has beside those of its layer group (`headed_decode.py`)."""

    @property
    def programs(self) -> list[Program]: ...
    def declared(self, slots: Drawn, widths: Sequence[Drawn]) -> Iterator[DeclaredProgram]: ...


class DraftPrograms:
    """Those of steps with drafts, beside those of steps of one token."""

    def __init__(self, layers: DraftLayers | None = None) -> None:
        """layers: of the model that guesses, where there is one."""
        self.layers, self.widen = layers, Program(widened)
        self.head: HeadSteps | None = None  # where a head guesses
        self.verify_greedy, self.verify = Program(verified_greedy, donate=(0,)), Program(verified, donate=(0,))
        self.count = Program(counted_drafts, donate=(0,))
        self.note, self.set_tokens = Program(noted_late, donate=(0,)), Program(with_tokens, donate=(0,))
        self.note_turns = Program(noted_turns, donate=(0,))
        self.logprobs, self.mask = Program(drafts_logprobs), Program(masked)

    @property
    def programs(self) -> list[Program]:
        drawing = [self.widen, self.verify_greedy, self.verify, self.note, self.note_turns, self.set_tokens]
        drawing += [self.count, self.logprobs, self.mask]
        beside = [each for each in (self.layers, self.head) if each is not None]
        return [*drawing, *(program for each in beside for program in each.programs)]

    @property
    def guesser(self) -> str:
        """Of rows without a grammar; see `StepDone.guessed`."""
        return NGRAM if self.layers is None and self.head is None else DRAFT


class Guesses:
    """What drafts of one microbatch are made of, where its tokens are drawn."""

    def __init__(self, batch: Microbatch, length: int, sizes: Sequence[int], layers: DraftLayers | None) -> None:
        """sizes: tokens of the drafts that there are programs for. layers: of the model that guesses, if one does."""
        self.reading = None if layers is None else DraftReading(layers, batch)
        self.history: Array = batch.put(np.zeros((batch.size, length), np.int32))
        self.widths: Array = batch.put(np.zeros(batch.size, np.int32))
        self.sent = np.zeros(batch.size, np.int32)  # the widths as last sent
        self.free: dict[int, Array] = batch.put({size: np.full((batch.size, size), FREE, np.int32) for size in sizes})
        self.unnoted: list[Array] = []  # tokens i32[B] of the last steps of one token a row, which it has not yet
        self.nothing: Array = batch.put(np.full(batch.size, MASKED, np.int32))
        self.wide: Array | None = None  # the rows of the step that is being dispatched; None: one a slot
        self.judged: tuple[int, ...] = ()  # slots of that step with a grammar whose drafts are guessed here

    def tokens_of(self, admission: Admission) -> np.ndarray:
        """i32[S]: the tokens of one that takes a slot, by position."""
        row, held = np.zeros(self.history.shape[1], np.int32), admission.history.whole
        row[: len(held)] = held
        return row

    def send_widths(self, batch: Microbatch, plan: DecodeRows) -> None:
        widths = np.zeros(batch.size, np.int32)
        widths[[slot - batch.first_slot for slot in plan.active]] = plan.widths
        if not np.array_equal(widths, self.sent):
            self.widths, self.sent = batch.put(widths), widths

    def given(self, batch: Microbatch, size: int) -> Array:
        """i32[B, size]: the drafts of rows with a grammar that the host makes; all others guess for themselves."""
        if not batch.masks.places:
            return self.free[size]
        given = np.full((batch.size, size), FREE, np.int32)
        for row, place in batch.masks.places.items():
            if row not in self.judged:
                given[row] = NO_GUESS
                given[row, : len(place.draft)] = place.draft
        return batch.put(given)


class DraftingDecoder(Decoder):
    """A `Decoder` whose rows may draw as many tokens as their widths say."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: Grammars | None = None,
        layers: DraftLayers | None = None,
    ) -> None:
        super().__init__(layer_groups, config, vocab_size, grammars)
        self.drafts = DraftPrograms(layers)
        sizes = history_length(config), config.draft_sizes
        self.guesses = [Guesses(batch, *sizes, layers) for batch in self.microbatches]

    def begin(self, plan: DecodeRows) -> Microbatch:
        guesses = self.guesses[plan.microbatch]
        if plan.admit:  # what was drawn is of those who had the slots before
            self._note(self.microbatches[plan.microbatch], guesses)
        batch = super().begin(plan)
        for admission in plan.admit:
            self._admit(batch, guesses, admission)
        guesses.wide = None
        if guesses.reading is not None:
            self._read(batch, guesses, guesses.reading, plan)
        longest = 0 if plan.turns else self._longest(batch, plan)
        if guesses.reading is not None:
            guesses.reading.stepped(plan, guessed=longest > 0 and not plan.gates)
        if plan.turns:
            self._note(batch, guesses)  # before they go on
        if longest:
            self._note(batch, guesses)
            guesses.send_widths(batch, plan)
            given = guesses.given(batch, bucket(longest, self.config.draft_sizes))
            if not plan.gates:  # else the pages it would be guessed from are on their way
                given = self._guess(batch, guesses, given, plan.table_pages)
            wide = guesses.wide = self.drafts.widen(guesses.history, batch.state, guesses.widths, given)
            if guesses.judged:
                wide.copy_to_host_async()
        return batch

    def _admit(self, batch: Microbatch, guesses: Guesses, admission: Admission) -> None:
        row = admission.slot - batch.first_slot
        tokens = batch.put((np.asarray(row, np.int32), guesses.tokens_of(admission)))
        guesses.history = self.drafts.set_tokens(guesses.history, *tokens)

    def _read(self, batch: Microbatch, guesses: Guesses, reading: DraftReading, plan: DecodeRows) -> None:
        """What the model that guesses has not, as far as this step wants guesses."""
        reading.begin(plan)
        due = reading.due(plan)
        if due:
            self._note(batch, guesses)
            reading.read(due, guesses.history)

    def _guess(self, batch: Microbatch, guesses: Guesses, given: Array, width: int) -> Array:
        """The drafts of the host's, and for other rows those of the model that guesses; FREE is left to n-grams."""
        layers, reading = self.drafts.layers, guesses.reading
        if layers is None or reading is None:
            return given
        held = guesses.history, batch.state, reading.fed, guesses.widths, given, batch.metadata
        if batch.rows.adapters is None:
            table = batch.table_on(layers.submesh, width)
        else:
            table = layers.submesh.put(batch.table[:, :width].copy())  # adapters are the other model's
        given, reading.fed = layers.guess(table, *held)
        return given

    def _longest(self, batch: Microbatch, plan: DecodeRows) -> int:
        """Makes the drafts of rows with grammars as far as the host does, and says how many tokens the longest of all
        may have. Where a model guesses, it does for those too of whom nothing is forced."""
        guesses, held = self._guesses_of(batch), batch.masks.places
        guesses.judged = ()
        if not held:
            return max(plan.widths, default=1) - 1
        widths = {slot - batch.first_slot: width for slot, width in zip(plan.active, plan.widths, strict=False)}
        by_model = self.drafts.guesser == DRAFT
        batch.masks.make_drafts(widths, guesses=self.config.guesses, only_behind=by_model)
        if by_model:
            guesses.judged = tuple(row for row in held if widths.get(row, 1) > 1 and not held[row].draft)
        by_host = held.keys() - set(guesses.judged)
        return max((len(held[row].draft) if row in by_host else width - 1 for row, width in widths.items()), default=0)

    def inputs(self, group: LayerGroup, batch: Microbatch, width: int) -> tuple[Array, ...]:
        """Page table i32[B, width] and state i32[4, B], or i32[4, B * (1 + drafts)], where the group is."""
        table, state = super().inputs(group, batch, width)
        wide = self._guesses_of(batch).wide
        return table, state if wide is None else group.submesh.spread(wide)

    def finish(self, batch: Microbatch, plan: DecodeRows, logits: Array) -> Drawing:
        guesses = self._guesses_of(batch)
        if guesses.wide is None:
            return super().finish(batch, plan, logits)
        asked = batch.asked(plan.active).each
        told = self._verify(batch, guesses, guesses.wide, logits, plan)
        wanted, logprobs = [sampling.logprobs for sampling in asked], None
        if any(number is not None for number in wanted):
            logprobs = self.drafts.logprobs(logits, told)
        for array in (told, *(logprobs or ())):
            array.copy_to_host_async()
        forced = batch.masks.places.keys() - set(guesses.judged)
        kinds = [GRAMMAR if slot - batch.first_slot in forced else self.drafts.guesser for slot in plan.active]
        return PendingDrafts(plan, batch.first_slot, told, wanted, logprobs, kinds)

    def _draw(self, batch: Microbatch, logits: Array, asked: Asked) -> Array:
        """As the decoder without drafts, by the same programs: what they draw is noted later, many steps at once."""
        tokens, guesses = super()._draw(batch, logits, asked), self._guesses_of(batch)
        guesses.unnoted.append(tokens)
        if len(guesses.unnoted) == LATE:
            self._note(batch, guesses)
        return tokens

    def _note(self, batch: Microbatch, guesses: Guesses) -> None:
        if guesses.unnoted:
            tokens = [guesses.nothing] * (LATE - len(guesses.unnoted)) + guesses.unnoted
            guesses.history = self.drafts.note(guesses.history, batch.state, *tokens)
            guesses.unnoted.clear()

    def took_turns(self, batch: Microbatch, tokens: Array) -> None:
        """A dispatch of several turns drew these, i32[most, B]."""
        guesses = self._guesses_of(batch)
        guesses.history = self.drafts.note_turns(guesses.history, batch.state, tokens)

    def _verify(self, batch: Microbatch, guesses: Guesses, wide: Array, logits: Array, plan: DecodeRows) -> Array:
        asked = batch.asked(plan.active).each
        if any(sampling.grammar for sampling in asked):
            rows = [slot - batch.first_slot for slot in plan.active]
            self._judge(batch, guesses.judged, wide)
            logits = self.drafts.mask(logits, batch.masks.allowed_behind(rows, wide.shape[1] // batch.size - 1))
        held = guesses.history, batch.state, wide, logits
        if all(is_plain(sampling) for sampling in asked):
            guesses.history, batch.state, told = self.drafts.verify_greedy(*held, batch.metadata)
            return told
        guesses.history, batch.state, told = self.drafts.verify(*held, batch.metadata, batch.counts)
        if any(sampling.penalised for sampling in asked):
            batch.counts = self.drafts.count(batch.counts, told)
        return told

    def _judge(self, batch: Microbatch, judged: Sequence[int], wide: Array) -> None:
        """What was guessed for these slots decides about their masks: it is there before the layers have run, and masks
        are made while they do."""
        if judged:
            rows = np.asarray(wide).reshape(4, batch.size, -1)[:, :, 1:]
            for row in judged:
                batch.masks.take_draft(row, rows[TOKEN, row][rows[ENABLED, row] == 1].tolist())

    def _guesses_of(self, batch: Microbatch) -> Guesses:
        return self.guesses[batch.first_slot // batch.size]


def history_length(config: WorkerConfig) -> int:
    """Positions that a sequence may have, and a draft behind them."""
    return config.table_buckets[-1] * config.page_size + config.draft_tokens
