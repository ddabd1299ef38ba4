"""How many tokens each expert is sent: counted by the programs that send them, read with what the steps draw.

A program of layers with experts has one small result more, i32[those layers, experts]; rows that are padding or slots
that stand still count nowhere. It starts for the host when the program is dispatched and is read behind the tokens of a
step that waits for them anyway: nothing is waited for on its account.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.model_config import Experts

MOST = 256  # counts that may wait for a step that draws


def tokens_sent(experts: Experts, chosen: Array, live: Array) -> Array:
    """i32[experts]: how many `live` rows, bool[T], one layer sends to each of them; chosen: i32[T, per_token]."""
    hits = (chosen[:, :, None] == jnp.arange(experts.number)[None, None, :]) & live[:, None, None]
    return jnp.sum(hits, axis=(0, 1), dtype=jnp.int32)


class ExpertLoad:
    """Of the layers `layers` of one worker's layer group, since it began. Counts leave on one thread and are read by
    any."""

    def __init__(self, layers: Sequence[int], experts: Experts | None, rows: Sequence[int] | None = None) -> None:
        """rows: of a ring's counts, [1, places with experts, experts], those of its layers."""
        self.layers, self._rows = tuple(layers), rows
        shape = len(self.layers), experts.number if experts else 0
        self._tokens, self._busiest = np.zeros(shape, np.int64), np.zeros(shape[0], np.int64)
        self._leaving: deque[Array] = deque()
        self._lock = Lock()

    def leaves(self, counts: Sequence[Array]) -> None:
        """The counts of a program that was dispatched, of one array or none."""
        for each in counts:
            shard = each.addressable_data(0)
            shard.copy_to_host_async()
            self._leaving.append(shard)
        if len(self._leaving) > MOST:  # prompts that are given up draw nothing, and the oldest has ended long ago
            self.read([self._leaving.popleft()])

    def taken(self) -> list[Array]:
        """All that has left and nobody has taken."""
        return [self._leaving.popleft() for _ in range(len(self._leaving))]

    def read(self, taken: Sequence[Array]) -> None:
        """Adds them up; blocks until they are on the host."""
        for each in taken:
            counts = np.asarray(each) if self._rows is None else np.asarray(each)[0, list(self._rows)]
            with self._lock:
                self._tokens += counts
                self._busiest += counts.max(axis=1)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """i64[layers, experts] tokens of each expert, and i64[layers] those of each program's busiest one."""
        with self._lock:
            return self._tokens.copy(), self._busiest.copy()
