"""Bit masks of the tokens that the grammars of a batch's rows allow next, computed on the host while the layers run.

A row without a grammar may sample any token. A row whose grammar cannot be followed on this worker may sample none: its
answer ends with an error, and other rows are not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.request import SamplingParams
from jdisagg.core.steps import History
from jdisagg.core.worker_config import MAX_NGRAM, MIN_NGRAM
from jdisagg.engine.sampling import NEVER, Put
from jdisagg.model.grammars.grammars import CompiledGrammars, GrammarState, mask_words

# N-gram drafts on the host: the tokens that followed the last earlier occurrence of the same suffix.
#
# They serve rows whose tokens the host knows before the step. `drafting.guessed` makes the same drafts on the device
# for rows whose tokens the host does not know yet.


def guess_after(tokens: Sequence[int], count: int) -> list[int]:
    """Returns `count` tokens that followed the last earlier occurrence of the longest suffix of `tokens`; [] if there
    is none. A draft that reaches the end of `tokens` continues with its own tokens."""
    held = np.asarray(tokens, np.int64)
    alike = np.ones(len(held), np.bool_)
    found = -1
    for back in range(min(MAX_NGRAM, len(held))):
        alike[:back] = False
        alike[back:] &= held[: len(held) - back] == held[-1 - back]
        ends = alike[:-1].nonzero()[0]
        if back + 1 >= MIN_NGRAM and len(ends):
            found = int(ends[-1])
    if found < 0:
        return []
    period = len(held) - 1 - found
    return [int(held[found + 1 + each % period]) for each in range(count)]


log = logging.getLogger(__name__)

EVERYTHING, WORD = np.uint32(0xFFFFFFFF), 32


def masked(logits: Array, allowed: Array) -> Array:
    """Logits f32[B, V] without the tokens whose bits are not in `allowed`, u32[B, words]."""
    bits = (allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]) & 1
    return jnp.where(bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1, logits, NEVER)


def before_stop(tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """Returns the tokens before the first stop token: stop tokens are sampled, never drafted."""
    return tuple(takewhile(lambda token: token not in sampling.stop_token_ids, tokens))


@dataclass(slots=True, eq=False)
class GrammarProgress:
    """The progress of one sequence in its grammar."""

    sampling: SamplingParams
    tokens: list[int]  # of the prompt, if drafts are made from them, and of the output
    unread: list[int]  # tokens that the matcher has not taken yet
    matcher: GrammarState | None = None  # None: not started yet, or this worker has no grammars
    draft: tuple[int, ...] = ()  # tokens fed behind the last one in the step being dispatched


class GrammarMasks:
    """The masks of B rows, and each row's progress in its grammar."""

    def __init__(self, grammars: CompiledGrammars | None, rows: int, vocab_size: int, put: Put) -> None:
        """Starts without grammars; put: copies host arrays to the device that samples."""
        self.grammars, self.put, self.rows, self.words = grammars, put, rows, mask_words(vocab_size)
        self.places: dict[int, GrammarProgress] = {}

    def begin(self, row: int, sampling: SamplingParams, history: History) -> None:
        """Starts another sequence in the row, with the tokens of `history`."""
        self.end(row)
        if sampling.grammar:
            self.places[row] = GrammarProgress(sampling, [*history.whole], [*history.output])

    def end(self, row: int) -> None:
        self.places.pop(row, None)

    def take(self, row: int, tokens: Sequence[int]) -> None:
        """Appends the tokens that the row sampled."""
        self.places[row].tokens += tokens
        self.places[row].unread += tokens

    def allowed(self, rows: Iterable[int]) -> Array | None:
        """Returns u32[B, words] on the device that samples, for a step of these rows; None if none of them has a
        grammar."""
        held = [row for row in rows if row in self.places]
        if not held:
            return None
        masks = np.full((self.rows, self.words), EVERYTHING, np.uint32)
        for row in held:
            self._fill(self.places[row], masks[row : row + 1])
        return self.put(masks)

    # ------------------------------------------------------------ drafts

    def make_drafts(self, widths: Mapping[int, int], *, guesses: bool, only_behind: bool = False) -> None:
        """Makes each row's draft within its width: forced tokens first, then with `guesses` n-gram tokens that the
        grammar accepts. only_behind: n-grams only follow forced tokens."""
        for row, place in self.places.items():
            place.draft = self._draft(place, widths.get(row, 1) - 1, guesses, only_behind)

    def _draft(self, place: GrammarProgress, most: int, guesses: bool, only_behind: bool) -> tuple[int, ...]:
        matcher = self._matcher(place) if most > 0 else None
        if matcher is None:
            return ()
        draft = matcher.forced()[:most]
        if guesses and len(draft) < most and (draft or not only_behind):
            draft += guess_after([*place.tokens, *draft], most - len(draft))
            draft = draft[: matcher.follows(draft)]
        return before_stop(draft, place.sampling)

    def take_draft(self, row: int, tokens: Sequence[int]) -> None:
        """Sets the draft that the row is fed; masks cut it off where the grammar does not accept it."""
        self.places[row].draft = before_stop(tokens, self.places[row].sampling)

    def allowed_behind(self, rows: Iterable[int], most: int) -> Array:
        """Returns u32[B * (1 + most), words]: each row's mask as `allowed`, and one behind every token of its draft."""
        masks = np.full((self.rows, 1 + most, self.words), EVERYTHING, np.uint32)
        for row in rows:
            if row in self.places:
                self._fill(self.places[row], masks[row])
        return self.put(masks.reshape(-1, self.words))

    def make_forced(self, widths: Mapping[int, int], most: int) -> dict[int, tuple[int, ...]]:
        """Returns the forced tokens per row, within each row's width and at most `most` in total. Rows without forced
        tokens are left out."""
        found = dict[int, tuple[int, ...]]()
        self.make_drafts(widths, guesses=False)
        for row in sorted(self.places):
            place = self.places[row]
            place.draft = place.draft[: most - sum(map(len, found.values()))]
            if place.draft:
                found[row] = place.draft
        return found

    def allowed_in(self, rows: Iterable[int], runs: Mapping[int, range], number: int) -> Array:
        """Returns u32[number, words]: the masks of `rows`, and of the rows in `runs` that feed their drafts."""
        masks = np.full((number, self.words), EVERYTHING, np.uint32)
        for row in rows:
            if row in self.places:
                own = [row, *runs.get(row, ())]
                behind = np.empty((len(own), self.words), np.uint32)
                self._fill(self.places[row], behind)
                masks[own] = behind
        return self.put(masks)

    # ------------------------------------------------------------ matchers

    def _fill(self, place: GrammarProgress, masks: np.ndarray) -> None:
        """Writes masks u32[1 + n, words]: the next token's, and those behind its draft as far as the grammar accepts
        it."""
        masks[:] = 0
        matcher = self._matcher(place)
        if matcher is None:
            return
        matcher.fill(masks[0])
        taken = 0
        for token, before, mask in zip(place.draft, masks, masks[1:], strict=False):
            if not before[token // WORD] >> (token % WORD) & 1:
                break
            matcher.take((token,))
            matcher.fill(mask)
            taken += 1
        matcher.undo(taken)

    def _matcher(self, place: GrammarProgress) -> GrammarState | None:
        """Returns the matcher after it has taken all sampled tokens; None without grammars on this worker."""
        if place.matcher is None:
            if self.grammars is None:
                log.error("a sequence has a grammar, and this worker has no structured output: its answer ends")
                return None
            place.matcher = self.grammars.start(place.sampling.grammar)
        place.matcher.take(place.unread)
        place.unread.clear()
        return place.matcher
