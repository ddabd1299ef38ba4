"""Tokens sent to each expert: counted by the programs that send them, read with a step's samples.

A program of layers with experts has one more small result, i32[layers with experts, experts]; padding rows and idle
slots are not counted. Its copy to the host starts when the program is dispatched and is read after the tokens of a
step, so it causes no wait of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.model_config import Experts

MOST = 256  # counts that may wait for a step that samples


def tokens_sent(experts: Experts, chosen: Array, live: Array) -> Array:
    """Returns i32[experts]: the `live` rows, bool[T], that one layer sends to each expert; chosen: i32[T,
    per_token]."""
    hits = (chosen[:, :, None] == jnp.arange(experts.number)[None, None, :]) & live[:, None, None]
    return jnp.sum(hits, axis=(0, 1), dtype=jnp.int32)


class ExpertLoad:
    """The cumulative expert load of the layers `layers` of one layer group. Counts are added on one thread and read by
    any."""

    def __init__(self, layers: Sequence[int], experts: Experts | None, rows: Sequence[int] | None = None) -> None:
        """Starts at zero; rows: the rows of these layers in a ring's counts [1, positions with experts, experts]."""
        self.layers, self._rows = tuple(layers), rows
        shape = len(self.layers), experts.number if experts else 0
        self._tokens, self._busiest = np.zeros(shape, np.int64), np.zeros(shape[0], np.int64)
        self._leaving: deque[Array] = deque()
        self._lock = Lock()

    def leaves(self, counts: Sequence[Array]) -> None:
        """Takes the counts of a dispatched program: one array or none."""
        for each in counts:
            shard = each.addressable_data(0)
            shard.copy_to_host_async()
            self._leaving.append(shard)
        if len(self._leaving) > MOST:  # aborted prompts sample nothing, and the oldest program has ended
            self.read([self._leaving.popleft()])

    def taken(self) -> list[Array]:
        """Returns the counts of programs dispatched since the last call."""
        return [self._leaving.popleft() for _ in range(len(self._leaving))]

    def read(self, taken: Sequence[Array]) -> None:
        """Adds up the counts; blocks until they are on the host."""
        for each in taken:
            counts = np.asarray(each) if self._rows is None else np.asarray(each)[0, list(self._rows)]
            with self._lock:
                self._tokens += counts
                self._busiest += counts.max(axis=1)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns i64[layers, experts], the tokens of each expert, and i64[layers], the summed tokens of each program's
        busiest expert."""
        with self._lock:
            return self._tokens.copy(), self._busiest.copy()
