"""Which tokens the grammars of a batch's rows allow next, as bits: made by the host while the layers run.

A row without a grammar may draw anything. One whose grammar cannot be followed here may draw nothing, so that its
answer ends as an error and nobody else's does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.request import SamplingParams
from jdisagg.engine.sampling import NEVER
from jdisagg.engine.sampling_metadata import Put
from jdisagg.model.grammars.grammars import Grammars, Matcher, mask_words

log = logging.getLogger(__name__)

EVERYTHING, WORD = np.uint32(0xFFFFFFFF), 32


def masked(logits: Array, allowed: Array) -> Array:
    """Logits f32[B, V] without the tokens whose bits are not in `allowed`, u32[B, words]."""
    bits = (allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]) & 1
    return jnp.where(bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] == 1, logits, NEVER)


class GrammarMasks:
    """The masks of B rows, and each row's place in its grammar."""

    def __init__(self, grammars: Grammars | None, rows: int, vocab_size: int, put: Put) -> None:
        """put: brings host arrays to where tokens are drawn."""
        self.grammars, self.put, self.rows, self.words = grammars, put, rows, mask_words(vocab_size)
        self._matchers: dict[int, Matcher | None] = {}
        self._unread: dict[int, tuple[str, list[int]]] = {}  # a row's grammar, and tokens that its matcher has to take

    def begin(self, row: int, sampling: SamplingParams, output: Sequence[int]) -> None:
        """The row is another sequence's, which has these output tokens already."""
        self.end(row)
        if sampling.grammar:
            self._unread[row] = sampling.grammar, [*output]

    def end(self, row: int) -> None:
        self._matchers.pop(row, None)
        self._unread.pop(row, None)

    def take(self, row: int, token: int) -> None:
        """The row drew this token."""
        self._unread[row][1].append(token)

    def allowed(self, rows: Iterable[int]) -> Array | None:
        """u32[B, words] where tokens are drawn, for a step of these rows; None where none of them has a grammar."""
        held = [row for row in rows if row in self._unread]
        if not held:
            return None
        masks = np.full((self.rows, self.words), EVERYTHING, np.uint32)
        for row in held:
            self._fill(row, masks[row])
        return self.put(masks)

    def _fill(self, row: int, mask: np.ndarray) -> None:
        grammar, unread = self._unread[row]
        if row not in self._matchers:
            if self.grammars is None:
                log.error("a sequence has a grammar, and this worker has no structured output: its answer ends")
            self._matchers[row] = None if self.grammars is None else self.grammars.start(grammar)
        matcher = self._matchers[row]
        if matcher is None:
            mask[:] = 0
            return
        matcher.take(unread)
        unread.clear()
        matcher.fill(mask)
