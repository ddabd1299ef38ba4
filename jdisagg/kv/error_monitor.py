"""Which layers may travel quantised: those that have not been seen to lose more than the bound.

What a pack lost is computed beside it and read when it is there: nobody waits. What left meanwhile is refused where it
lands (`packing.are_intact`) and shipped again raw, so that nothing over the bound is ever taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

KEPT = 64  # packs whose errors are not read yet; what older ones lost is seen at the destination alone


class ErrorMonitor:
    """Of one source. Called from the one thread that packs.

    Where a source is a mesh over processes, all must pack alike: its leader decides by what its own shards lost, part
    by part (`lead`), and the others do as it says (`follow`). What their shards lose is refused where it lands.
    """

    def __init__(self, error_bound: float) -> None:
        self.error_bound = error_bound
        self.over: dict[range, float] = {}  # runs of layers that go raw from now on, and the error that was seen
        self._led = False  # whether what is raw was settled for this part
        self._follows = False
        self._watched: deque[tuple[range, Sequence[Array]]] = deque(maxlen=KEPT)

    def allows(self, layers: range) -> bool:
        if not self._led:
            self._read_errors()
        return not any(set(run) & set(layers) for run in self.over)

    def lead(self) -> list[list[int]]:
        """Decides by what is known now until it is called again: the runs of layers that go raw."""
        self._read_errors()
        self._led = True
        return sorted([run.start, run.stop] for run in self.over)

    def follow(self, raw: Sequence[Sequence[int]]) -> None:
        """Decides as the leader did for this part."""
        self._led = self._follows = True
        self.over = {range(first, stop): math.inf for first, stop in raw}

    def watch(self, layers: range, errors: Sequence[Array]) -> None:
        """errors: f32 [L, 1, heads] each, perhaps not computed yet."""
        if not self._follows:
            self._watched.append((layers, errors))

    def _read_errors(self) -> None:
        while self._watched and _are_there(self._watched[0][1]):
            layers, errors = self._watched.popleft()
            worst = max(float(np.asarray(shard.data).max()) for array in errors for shard in array.addressable_shards)
            if not worst <= self.error_bound:
                self.over[layers] = max(worst, self.over.get(layers, 0.0))


def _are_there(arrays: Sequence[Any]) -> bool:
    return all(array.is_ready() for array in arrays)
