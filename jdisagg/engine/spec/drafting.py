"""Speculative decoding: decode rows that verify several drafted tokens in one step.

Drafts come from n-grams of the sequence's own tokens (Leviathan et al., ICML 2023; prompt lookup: Saxena 2023). All of
it runs on the device that samples, so steps follow each other without the host, as steps of one token do. The device
holds each slot's tokens. The longest suffix of MAX_NGRAM down to MIN_NGRAM tokens that occurred before gives the draft:
the tokens that followed that occurrence. A step feeds the last token and the draft as consecutive rows and samples at
each. The sample is a function of the request's seed and the position (`sampling.py`), and the draft has probability 1
on its token. A drafted token is accepted if it equals the sampled one. Rejection sampling of such a draft accepts a
token just as often, and here the tokens are those that steps of one token would have sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
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
    DrawnRows,
    MicrobatchState,
    PendingSamples,
    advanced,
)
from jdisagg.engine.draw_declarations import SamplingShapes
from jdisagg.engine.layer_group import Chunks, LayerGroup, running
from jdisagg.engine.prefill import UnreadChunks, picks
from jdisagg.engine.sampling import (
    FREQUENCY,
    REPETITION,
    BatchSampling,
    SamplingTensors,
    TokenCounters,
    counted,
    is_plain,
    penalised,
    pick,
    pick_greedy,
    sampled_rows,
    token_logprobs,
)
from jdisagg.engine.spec.draft_layers import FREE, LATELY, DraftLayers
from jdisagg.engine.spec.grammar_masks import masked
from jdisagg.model.grammars.grammars import CompiledGrammars
from jdisagg.parallel.submesh import Program

# Verification: each row of a slot samples, and the draft is accepted up to the first row that sampled another token.
#
# Penalties count the tokens before a row. For the rows of a draft these include the drafted tokens before it, which
# equal the sampled ones wherever the row counts.


def noted(history: Array, state: Array) -> Array:
    """Returns the history with each running slot's token written at its position."""
    slots = jnp.arange(history.shape[0])
    places = jnp.where(running(state), state[POSITION], history.shape[1])
    return history.at[slots, places].set(state[TOKEN], mode="drop")


def taken(history: Array, state: Array, wide: Array, tokens: Array, metadata: SamplingTensors) -> Any:
    """Returns (history, state, reported i32[B, 2 + drafts]) after sampling `tokens` i32[B * (1 + drafts)]. wide: the
    state of the rows. A slot's tokens are reported as long as each row was fed what the row before sampled, and MASKED
    after that. The last column is the number of drafted tokens."""
    fed, drawn = wide[TOKEN].reshape(state.shape[1], -1), tokens.reshape(state.shape[1], -1)
    enabled, going, reported = wide[ENABLED].reshape(fed.shape) == 1, state, []
    for column in range(fed.shape[1]):
        on = enabled[:, column] if column == 0 else enabled[:, column] & (fed[:, column] == reported[-1])
        going, column_tokens = advanced(going.at[ENABLED].set(on.astype(jnp.int32)), drawn[:, column], metadata)
        reported.append(column_tokens)
        history = noted(history, going)
    guesses = jnp.where(running(state), jnp.sum(enabled[:, 1:], axis=1, dtype=jnp.int32), 0)
    return history, going.at[ENABLED].set(state[ENABLED]), jnp.stack([*reported, guesses], axis=1)


def repeated(metadata: SamplingTensors, rows: int) -> SamplingTensors:
    """Returns the metadata with each slot's entry repeated for each of its rows."""
    times = rows // metadata.ints.shape[0]
    return SamplingTensors(*(jnp.repeat(each, times, axis=0) for each in metadata))


def verified_greedy(history: Array, state: Array, wide: Array, logits: Array, metadata: SamplingTensors) -> Any:
    return taken(history, state, wide, pick_greedy(logits), metadata)


def verified(
    history: Array, state: Array, wide: Array, logits: Array, metadata: SamplingTensors, counts: TokenCounters
) -> Any:
    """Samples and verifies with all sampling parameters: `taken` for logits f32[B * (1 + drafts), V]."""
    penalties, neutral = metadata.floats[:, REPETITION : FREQUENCY + 1], jnp.array([[1.0, 0.0, 0.0]])
    logits = jax.lax.cond(
        jnp.any(penalties != neutral), penalised_ahead, lambda logits, *_: logits, logits, wide, metadata, counts
    )
    own = repeated(metadata, logits.shape[0])
    return taken(history, state, wide, pick(logits, own, None, wide[POSITION] + 1), metadata)


def penalised_ahead(logits: Array, wide: Array, metadata: SamplingTensors, counts: TokenCounters) -> Array:
    """Returns logits f32[B * (1 + drafts), V], penalised as if all tokens fed to the slot before a row had been
    sampled."""
    slots, vocab_size = counts.output.shape
    by_slot, fed, rows = logits.reshape(slots, -1, vocab_size), wide[TOKEN].reshape(slots, -1), []
    for column in range(fed.shape[1]):
        counts = counted(counts, fed[:, column]) if column else counts
        rows.append(penalised(by_slot[:, column], metadata, counts))
    return jnp.stack(rows, axis=1).reshape(logits.shape)


def counted_drafts(counts: TokenCounters, reported: Array) -> TokenCounters:
    """Returns the counts with all sampled tokens of the drafts' rows added."""
    for column in range(reported.shape[1] - 1):
        counts = counted(counts, reported[:, column])
    return counts


def drafts_logprobs(logits: Array, reported: Array) -> tuple[Array, Array, Array]:
    """Returns `token_logprobs` of every row of the drafts."""
    return token_logprobs(logits, reported[:, :-1].reshape(-1))


@dataclass(frozen=True)
class PendingDraftSamples:
    """The samples of rows with drafts, being copied to the host."""

    plan: DecodeRows
    first_slot: int
    reported: Array  # i32[B, 2 + drafts], reported by `taken`
    wanted: list[int | None]  # SamplingParams.logprobs of the active slots
    logprobs: tuple[Array, Array, Array] | None  # of B * (1 + drafts) rows
    kinds: list[str]  # of the active slots: the source of their drafts

    def read(self) -> DrawnRows:
        """Returns the sampled rows, see `StepDone`; blocks until they are on the host."""
        rows = [slot - self.first_slot for slot in self.plan.active]
        drawn, width = np.asarray(self.reported)[:, :-1].tolist(), self.reported.shape[1] - 1
        parts = None if self.logprobs is None else [np.asarray(each) for each in self.logprobs]
        drawn_rows = []
        for slot, row, number in zip(self.plan.active, rows, self.wanted, strict=True):
            tokens = [token for token in drawn[row] if token != MASKED]
            own = slice(row * width, row * width + len(tokens))
            accepted = sampled_rows(tokens, [number] * len(tokens), parts and [part[own] for part in parts])
            drawn_rows.append((slot, tuple(accepted) or None))
        return tuple(drawn_rows)

    def guessed(self) -> tuple[tuple[int, str, int], ...]:
        """Returns (slot, draft source, drafted tokens) of the slots with drafts, see `StepDone.guessed`."""
        numbers = np.asarray(self.reported)[:, -1].tolist()
        found = [
            (slot, kind, numbers[slot - self.first_slot])
            for slot, kind in zip(self.plan.active, self.kinds, strict=True)
        ]
        return tuple(each for each in found if each[2])


# The KV that a draft model has for each slot, and the tokens that it has not processed yet.
#
# The draft model's KV is in its own pages, which are shipped with the served model's. Pages show how many of their
# tokens are valid (`DraftLayers.found`). Missing KV is computed from the tokens, sampled ones included, at most PRIMED
# a step, so that other rows are not delayed; n-grams make the drafts meanwhile. Nothing is computed for a slot for
# which no draft is wanted.

KNOWN_AFTER = 2  # steps after which the result of a program is on the host, so that reading it does not wait


@dataclass(frozen=True)
class PendingDraftLookup:
    """The number of a slot's tokens that the draft's pages hold, being copied to the host."""

    step: int
    position: int  # tokens that complete pages would hold
    found: Array  # i32[]


class DraftProgress:
    """Tracks how much draft KV the slots of one microbatch have, by row."""

    def __init__(self, layers: DraftLayers, batch: MicrobatchState) -> None:
        self.layers, self.batch, self.steps = layers, batch, 0
        self.fed: Array = batch.put(np.zeros(batch.size, np.int32))  # tokens whose KV is in the pages
        self.arriving: dict[int, Admission] = {}  # admitted slots whose pages may still be in transfer
        self.lookups: dict[int, PendingDraftLookup] = {}
        self.unread: dict[int, int] = {}  # upper bound of the tokens before the next one without KV
        worker = layers.worker
        self.places = batch.put((np.arange(layers.primed_tokens, dtype=np.int32), np.int32(worker.page_size)))

    # ------------------------------------------------------------ draft KV in the pages

    def begin(self, plan: DecodeRows) -> None:
        """Takes a step's admissions and retirements, and looks up the draft KV of slots whose pages are complete."""
        self.steps += 1
        for slot in plan.retire:
            self._forget(slot - self.batch.first_slot)
        for admission in plan.admit:
            row = admission.slot - self.batch.first_slot
            self._forget(row)
            if admission.history.whole:
                self.arriving[row] = admission
        if self.layers.kept:
            self.layers.wipe([(grant.page, 0) for grant in plan.grants])
        if not plan.gates:
            self._look()

    def _forget(self, row: int) -> None:
        for each in (self.arriving, self.lookups, self.unread):
            each.pop(row, None)

    def _look(self) -> None:
        for row, admission in self.arriving.items():
            if not self.layers.kept:
                self._restart(row, np.asarray(0, np.int32))
                self.unread[row] = admission.position
                continue
            size = self.layers.worker.page_size
            written, page = admission.position % size, admission.position // size
            self.layers.wipe([(each, 0 if at else written) for at, each in enumerate(admission.pages[page:])])
            found = self.layers.found(admission)
            self._restart(row, found)
            found.copy_to_host_async()
            self.lookups[row], self.unread[row] = PendingDraftLookup(self.steps, admission.position, found), 0
        self.arriving.clear()
        for row, lookup in list(self.lookups.items()):
            if self.steps >= lookup.step + KNOWN_AFTER:
                del self.lookups[row]
                self.unread[row] += lookup.position - int(np.asarray(lookup.found))

    def _restart(self, row: int, found: np.ndarray | Array) -> None:
        self.fed = self.layers.set_fed(self.fed, *self.batch.put((np.asarray(row, np.int32), found)))

    # ------------------------------------------------------------ draft KV to compute

    def due(self, plan: DecodeRows) -> dict[int, int]:
        """Returns the tokens to process per row before this step's drafts are made; only rows that want a draft."""
        if plan.gates:
            return {}  # the slot's pages may still be in transfer
        wide = [slot for slot, width in zip(plan.active, plan.widths, strict=False) if width > 1 and not plan.turns]
        room, found = self.layers.primed_tokens, dict[int, int]()
        for row in (slot - self.batch.first_slot for slot in wide):
            unread = self.unread.get(row, 0)
            if unread >= LATELY and room and len(found) < self.layers.worker.max_chunk_seqs:
                found[row] = min(unread, room)
                room -= found[row]
        return found

    def read(self, due: dict[int, int], history: Array) -> None:
        """Runs the draft model over the due tokens; history i32[B, S]: the tokens of all slots, by position."""
        layers, batch = self.layers, self.batch
        picked = picks(due, layers.worker.max_chunk_seqs, batch.size)
        held = history, batch.state, self.fed, *batch.put((batch.table.copy(), picked)), *self.places
        made: UnreadChunks = layers.unread(*held)
        layers.prefill(Chunks(*map(layers.submesh.spread, (made.rows, made.spans, made.table))), None)
        self.fed = made.fed
        for row, number in due.items():
            self.unread[row] -= number

    def stepped(self, plan: DecodeRows, *, guessed: bool) -> None:
        """Adds the tokens that this step's rows will sample to the unread ones. guessed: the draft model has read the
        tokens sampled before."""
        for slot, width in zip(plan.active, plan.widths or (1,) * len(plan.active), strict=True):
            row = slot - self.batch.first_slot
            if row not in self.unread:
                continue
            if not guessed or width == 1:
                self.unread[row] += width
            else:
                left = self.unread[row] - LATELY
                self.unread[row] = 1 if left < 0 else left + width


NO_GUESS = -1
LATE = 16  # single-token steps whose tokens are written to the history in one call


def guessed(history: Array, state: Array, drafts: int) -> Array:
    """Returns n-gram drafts i32[B, drafts]; NO_GUESS if no suffix of the slot's tokens occurred before. history i32[B,
    S]: tokens by position, that of `state` included. A draft that reaches the end of the known tokens continues with
    its own tokens, so a repetition is assumed to go on."""
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
    """Returns the state i32[4, B * (1 + drafts)] of a step's rows, those of a slot consecutive: its token and its
    draft. `widths` i32[B] is how many of them may sample. `given` i32[B, drafts] are the host's drafts: FREE for rows
    whose drafts are made on the device, NO_GUESS behind a draft's end."""
    drafts = given.shape[1]
    guess = jnp.where(given == FREE, guessed(history, state, drafts), given)
    tokens = jnp.concatenate([state[TOKEN][:, None], guess], axis=1)
    ahead = jnp.arange(1 + drafts, dtype=jnp.int32)[None, :]
    enabled = (state[ENABLED][:, None] == 1) & (ahead < widths[:, None]) & (tokens >= 0)
    stopped = jnp.broadcast_to(state[STOPPED][:, None], tokens.shape)
    rows = jnp.maximum(tokens, 0), state[POSITION][:, None] + ahead, stopped, enabled.astype(jnp.int32)
    return jnp.stack([each.reshape(-1) for each in rows])


def with_tokens(history: Array, row: Array, tokens: Array) -> Array:
    return history.at[row].set(tokens)


def noted_late(history: Array, state: Array, *tokens: Array) -> Array:
    """Returns the history with the samples of the last single-token steps written. tokens: i32[B] per step, MASKED for
    slots that sampled none. The state is the one after the last of them."""
    drawn = jnp.stack(tokens, axis=1)
    took = (drawn != MASKED).astype(jnp.int32)
    behind = jnp.cumsum(took[:, ::-1], axis=1)[:, ::-1] - took  # tokens that were drawn after each
    places = jnp.where(drawn >= 0, state[POSITION][:, None] - behind, history.shape[1])
    return history.at[jnp.arange(history.shape[0])[:, None], places].set(drawn, mode="drop")


def noted_turns(history: Array, state: Array, tokens: Array) -> Array:
    """Returns the history with the samples of a multi-step dispatch, `tokens` i32[most, B]; see `noted_late`."""
    return noted_late(history, state, *tokens)


class HeadSteps(Protocol):
    """The programs of a draft head besides those of its layer group (`spec/eagle.py`)."""

    @property
    def programs(self) -> list[Program]: ...
    def declared(self, slots: SamplingShapes, widths: Sequence[SamplingShapes]) -> Iterator[DeclaredProgram]: ...


class DraftPrograms:
    def __init__(self, layers: DraftLayers | None = None) -> None:
        """Makes the programs; layers: of the draft model, if there is one."""
        self.layers, self.widen = layers, Program(widened)
        self.head: HeadSteps | None = None  # set if a draft head makes the drafts
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
        """Returns the source of drafts for rows without a grammar; see `StepDone.guessed`."""
        return NGRAM if self.layers is None and self.head is None else DRAFT


class DraftBuffers:
    """The device state from which the drafts of one microbatch are made."""

    def __init__(self, batch: MicrobatchState, length: int, sizes: Sequence[int], layers: DraftLayers | None) -> None:
        """Allocates the state; sizes: draft lengths that have programs; layers: of the draft model, if there is one."""
        self.reading = None if layers is None else DraftProgress(layers, batch)
        self.history: Array = batch.put(np.zeros((batch.size, length), np.int32))
        self.widths: Array = batch.put(np.zeros(batch.size, np.int32))
        self.sent = np.zeros(batch.size, np.int32)  # the widths as last sent
        self.free: dict[int, Array] = batch.put({size: np.full((batch.size, size), FREE, np.int32) for size in sizes})
        self.unnoted: list[Array] = []  # tokens i32[B] of single-token steps, not written to the history yet
        self.nothing: Array = batch.put(np.full(batch.size, MASKED, np.int32))
        self.wide: Array | None = None  # the rows of the step being dispatched; None: one per slot
        self.judged: tuple[int, ...] = ()  # slots of that step with a grammar whose drafts are made on the device

    def tokens_of(self, admission: Admission) -> np.ndarray:
        """Returns the tokens i32[S] of an admitted sequence, by position."""
        row, held = np.zeros(self.history.shape[1], np.int32), admission.history.whole
        row[: len(held)] = held
        return row

    def send_widths(self, batch: MicrobatchState, plan: DecodeRows) -> None:
        widths = np.zeros(batch.size, np.int32)
        widths[[slot - batch.first_slot for slot in plan.active]] = plan.widths
        if not np.array_equal(widths, self.sent):
            self.widths, self.sent = batch.put(widths), widths

    def given(self, batch: MicrobatchState, size: int) -> Array:
        """Returns the host's drafts i32[B, size] for rows with a grammar; FREE for all other rows."""
        if not batch.masks.places:
            return self.free[size]
        given = np.full((batch.size, size), FREE, np.int32)
        for row, place in batch.masks.places.items():
            if row not in self.judged:
                given[row] = NO_GUESS
                given[row, : len(place.draft)] = place.draft
        return batch.put(given)


class DraftingDecoder(Decoder):
    """A `Decoder` whose rows may sample several tokens per step, as many as their widths allow."""

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        config: WorkerConfig,
        vocab_size: int,
        grammars: CompiledGrammars | None = None,
        layers: DraftLayers | None = None,
    ) -> None:
        super().__init__(layer_groups, config, vocab_size, grammars)
        self.drafts = DraftPrograms(layers)
        sizes = history_length(config), config.draft_sizes
        self.guesses = [DraftBuffers(batch, *sizes, layers) for batch in self.microbatches]

    def begin(self, plan: DecodeRows) -> MicrobatchState:
        guesses = self.guesses[plan.microbatch]
        if plan.admit:  # pending tokens belong to the slots' previous sequences
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
            self._note(batch, guesses)  # pending tokens are written before the steps run
        if longest:
            self._note(batch, guesses)
            guesses.send_widths(batch, plan)
            given = guesses.given(batch, bucket(longest, self.config.draft_sizes))
            if not plan.gates:  # else the pages that the draft needs may still be in transfer
                given = self._guess(batch, guesses, given, plan.table_pages)
            wide = guesses.wide = self.drafts.widen(guesses.history, batch.state, guesses.widths, given)
            if guesses.judged:
                wide.copy_to_host_async()
        return batch

    def _admit(self, batch: MicrobatchState, guesses: DraftBuffers, admission: Admission) -> None:
        row = admission.slot - batch.first_slot
        tokens = batch.put((np.asarray(row, np.int32), guesses.tokens_of(admission)))
        guesses.history = self.drafts.set_tokens(guesses.history, *tokens)

    def _read(self, batch: MicrobatchState, guesses: DraftBuffers, reading: DraftProgress, plan: DecodeRows) -> None:
        """Lets the draft model process unread tokens of the rows for which this step wants drafts."""
        reading.begin(plan)
        due = reading.due(plan)
        if due:
            self._note(batch, guesses)
            reading.read(due, guesses.history)

    def _guess(self, batch: MicrobatchState, guesses: DraftBuffers, given: Array, width: int) -> Array:
        """Returns the host's drafts, with those of the draft model for other rows; FREE remains for n-grams."""
        layers, reading = self.drafts.layers, guesses.reading
        if layers is None or reading is None:
            return given
        held = guesses.history, batch.state, reading.fed, guesses.widths, given, batch.metadata
        if batch.rows.adapters is None:
            table = batch.table_on(layers.submesh, width)
        else:
            table = layers.submesh.put(batch.table[:, :width].copy())  # adapters belong to the served model
        given, reading.fed = layers.guess(table, *held)
        return given

    def _longest(self, batch: MicrobatchState, plan: DecodeRows) -> int:
        """Makes the host's drafts for rows with grammars and returns the greatest draft length of any row. If a draft
        model is used, it also drafts for rows with a grammar that forces no token."""
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

    def inputs(self, group: LayerGroup, batch: MicrobatchState, width: int) -> tuple[Array, ...]:
        """Returns the page table i32[B, width] and the state i32[4, B], or i32[4, B * (1 + drafts)], on the group's
        devices."""
        table, state = super().inputs(group, batch, width)
        wide = self._guesses_of(batch).wide
        return table, state if wide is None else group.submesh.spread(wide)

    def finish(self, batch: MicrobatchState, plan: DecodeRows, logits: Array) -> PendingSamples:
        guesses = self._guesses_of(batch)
        if guesses.wide is None:
            return super().finish(batch, plan, logits)
        all_sampling = batch.batch_sampling(plan.active).each
        reported = self._verify(batch, guesses, guesses.wide, logits, plan)
        wanted, logprobs = [sampling.logprobs for sampling in all_sampling], None
        if any(number is not None for number in wanted):
            logprobs = self.drafts.logprobs(logits, reported)
        for array in (reported, *(logprobs or ())):
            array.copy_to_host_async()
        forced = batch.masks.places.keys() - set(guesses.judged)
        kinds = [GRAMMAR if slot - batch.first_slot in forced else self.drafts.guesser for slot in plan.active]
        return PendingDraftSamples(plan, batch.first_slot, reported, wanted, logprobs, kinds)

    def _draw(self, batch: MicrobatchState, logits: Array, sampling: BatchSampling) -> Array:
        """Samples with the programs of the decoder without drafts; the history gets the tokens later, many steps at
        once."""
        tokens, guesses = super()._draw(batch, logits, sampling), self._guesses_of(batch)
        guesses.unnoted.append(tokens)
        if len(guesses.unnoted) == LATE:
            self._note(batch, guesses)
        return tokens

    def _note(self, batch: MicrobatchState, guesses: DraftBuffers) -> None:
        if guesses.unnoted:
            tokens = [guesses.nothing] * (LATE - len(guesses.unnoted)) + guesses.unnoted
            guesses.history = self.drafts.note(guesses.history, batch.state, *tokens)
            guesses.unnoted.clear()

    def took_turns(self, batch: MicrobatchState, tokens: Array) -> None:
        """Writes the tokens i32[most, B] of a multi-step dispatch to the history."""
        guesses = self._guesses_of(batch)
        guesses.history = self.drafts.note_turns(guesses.history, batch.state, tokens)

    def _verify(
        self, batch: MicrobatchState, guesses: DraftBuffers, wide: Array, logits: Array, plan: DecodeRows
    ) -> Array:
        all_sampling = batch.batch_sampling(plan.active).each
        if any(sampling.grammar for sampling in all_sampling):
            rows = [slot - batch.first_slot for slot in plan.active]
            self._judge(batch, guesses.judged, wide)
            logits = self.drafts.mask(logits, batch.masks.allowed_behind(rows, wide.shape[1] // batch.size - 1))
        held = guesses.history, batch.state, wide, logits
        if all(is_plain(sampling) for sampling in all_sampling):
            guesses.history, batch.state, reported = self.drafts.verify_greedy(*held, batch.metadata)
            return reported
        guesses.history, batch.state, reported = self.drafts.verify(*held, batch.metadata, batch.counts)
        if any(sampling.penalised for sampling in all_sampling):
            batch.counts = self.drafts.count(batch.counts, reported)
        return reported

    def _judge(self, batch: MicrobatchState, judged: Sequence[int], wide: Array) -> None:
        """Hands drafts that were made on the device to the grammar masks. The drafts are ready before the layers have
        run, so masks are made while the layers run."""
        if judged:
            rows = np.asarray(wide).reshape(4, batch.size, -1)[:, :, 1:]
            for row in judged:
                batch.masks.take_draft(row, rows[TOKEN, row][rows[ENABLED, row] == 1].tolist())

    def _guesses_of(self, batch: MicrobatchState) -> DraftBuffers:
        return self.guesses[batch.first_slot // batch.size]


def history_length(config: WorkerConfig) -> int:
    """Returns the positions that a sequence and a draft behind it may have."""
    return config.table_buckets[-1] * config.page_size + config.draft_tokens
