"""Which tokens the grammars of a batch's rows allow next, as bits: made by the host while the layers run.

A row without a grammar may draw anything. One whose grammar cannot be followed here may draw nothing, so that its
answer ends as an error and nobody else's does.
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
from jdisagg.model.grammars.grammars import Grammars, Matcher, mask_words

# N-gram drafts on the host: the tokens that followed the last earlier place with the same last tokens.
#
# They are for rows whose tokens the host knows before the step; `drafting.guessed` drafts the same on the device
# for rows whose tokens it does not know yet.


def guess_after(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens that followed the longest such end where it stood last; none where it never stood there before.

    A guess that runs into the present goes on with what it has guessed itself.
    """
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
    """The tokens in front of the first that ends the answer: one that does is drawn, never drafted."""
    return tuple(takewhile(lambda token: token not in sampling.stop_token_ids, tokens))


@dataclass(slots=True, eq=False)
class Place:
    """Where one answer stands in its grammar."""

    sampling: SamplingParams
    tokens: list[int]  # of the prompt, where drafts are made of them, and of the output
    unread: list[int]  # that its matcher has to take
    matcher: Matcher | None = None  # None: it was not asked yet, or nobody knows grammars here
    draft: tuple[int, ...] = ()  # tokens that its row is fed behind its last one, in the step that is dispatched


class GrammarMasks:
    """The masks of B rows, and each row's place in its grammar."""

    def __init__(self, grammars: Grammars | None, rows: int, vocab_size: int, put: Put) -> None:
        """put: brings host arrays to where tokens are drawn."""
        self.grammars, self.put, self.rows, self.words = grammars, put, rows, mask_words(vocab_size)
        self.places: dict[int, Place] = {}

    def begin(self, row: int, sampling: SamplingParams, history: History) -> None:
        """The row is another sequence's, which has these tokens already."""
        self.end(row)
        if sampling.grammar:
            self.places[row] = Place(sampling, [*history.whole], [*history.output])

    def end(self, row: int) -> None:
        self.places.pop(row, None)

    def take(self, row: int, tokens: Sequence[int]) -> None:
        """The row drew these."""
        self.places[row].tokens += tokens
        self.places[row].unread += tokens

    def allowed(self, rows: Iterable[int]) -> Array | None:
        """u32[B, words] where tokens are drawn, for a step of these rows; None where none of them has a grammar."""
        held = [row for row in rows if row in self.places]
        if not held:
            return None
        masks = np.full((self.rows, self.words), EVERYTHING, np.uint32)
        for row in held:
            self._fill(self.places[row], masks[row : row + 1])
        return self.put(masks)

    # ------------------------------------------------------------ drafts

    def make_drafts(self, widths: Mapping[int, int], *, guesses: bool, only_behind: bool = False) -> None:
        """Each row's draft, as long as its width has room: what its grammar leaves no choice about, and behind that,
        where the row `guesses`, what stood there before and the grammar takes; `only_behind` what is forced."""
        for row, place in self.places.items():
            place.draft = self._draft(place, widths.get(row, 1) - 1, guesses, only_behind)

    def _draft(self, place: Place, most: int, guesses: bool, only_behind: bool) -> tuple[int, ...]:
        matcher = self._matcher(place) if most > 0 else None
        if matcher is None:
            return ()
        draft = matcher.forced()[:most]
        if guesses and len(draft) < most and (draft or not only_behind):
            draft += guess_after([*place.tokens, *draft], most - len(draft))
            draft = draft[: matcher.follows(draft)]
        return before_stop(draft, place.sampling)

    def take_draft(self, row: int, tokens: Sequence[int]) -> None:
        """The row is fed these, whoever guessed them: masks cut them off where the grammar does not take them."""
        self.places[row].draft = before_stop(tokens, self.places[row].sampling)

    def allowed_behind(self, rows: Iterable[int], most: int) -> Array:
        """u32[B * (1 + most), words]: of each row, as `allowed`, and behind every token of its draft."""
        masks = np.full((self.rows, 1 + most, self.words), EVERYTHING, np.uint32)
        for row in rows:
            if row in self.places:
                self._fill(self.places[row], masks[row])
        return self.put(masks.reshape(-1, self.words))

    def make_forced(self, widths: Mapping[int, int], most: int) -> dict[int, tuple[int, ...]]:
        """What the grammars of rows leave no choice about, as long as each row's width has room, and of all together
        at most so many tokens; rows of which nothing is forced are not among them."""
        found = dict[int, tuple[int, ...]]()
        self.make_drafts(widths, guesses=False)
        for row in sorted(self.places):
            place = self.places[row]
            place.draft = place.draft[: most - sum(map(len, found.values()))]
            if place.draft:
                found[row] = place.draft
        return found

    def allowed_in(self, rows: Iterable[int], runs: Mapping[int, range], number: int) -> Array:
        """u32[number, words]: of each row, as `allowed`, and of those that feed its draft, which `runs` names."""
        masks = np.full((number, self.words), EVERYTHING, np.uint32)
        for row in rows:
            if row in self.places:
                own = [row, *runs.get(row, ())]
                behind = np.empty((len(own), self.words), np.uint32)
                self._fill(self.places[row], behind)
                masks[own] = behind
        return self.put(masks)

    # ------------------------------------------------------------ matchers

    def _fill(self, place: Place, masks: np.ndarray) -> None:
        """Masks u32[1 + n, words]: the next token's, and those behind its draft as far as they allow it."""
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

    def _matcher(self, place: Place) -> Matcher | None:
        """It has taken all that was drawn."""
        if place.matcher is None:
            if self.grammars is None:
                log.error("a sequence has a grammar, and this worker has no structured output: its answer ends")
                return None
            place.matcher = self.grammars.start(place.sampling.grammar)
        place.matcher.take(place.unread)
        place.unread.clear()
        return place.matcher
