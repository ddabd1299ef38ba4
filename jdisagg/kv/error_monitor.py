"""Which layers may travel quantised: those that have not been seen to lose more than the bound.

What a pack lost is computed beside it and read when it is there: nobody waits. What left meanwhile is refused where it
lands (`packing.are_intact`) and shipped again raw, so that nothing over the bound is ever taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

KEPT = 64  # packs whose errors are not read yet; what older ones lost is seen at the destination alone


class ErrorMonitor:
    """Of one source. Called from the one thread that packs."""

    def __init__(self, error_bound: float) -> None:
        self.error_bound = error_bound
        self.over: dict[range, float] = {}  # runs of layers that go raw from now on, and the error that was seen
        self._watched: deque[tuple[range, Sequence[Array]]] = deque(maxlen=KEPT)

    def allows(self, layers: range) -> bool:
        self._read_errors()
        return not any(set(run) & set(layers) for run in self.over)

    def watch(self, layers: range, errors: Sequence[Array]) -> None:
        """errors: f32 [L, 1, heads] each, perhaps not computed yet."""
        self._watched.append((layers, errors))

    def _read_errors(self) -> None:
        while self._watched and _are_there(self._watched[0][1]):
            layers, errors = self._watched.popleft()
            worst = max(float(np.asarray(array).max()) for array in errors)
            if not worst <= self.error_bound:
                self.over[layers] = max(worst, self.over.get(layers, 0.0))


def _are_there(arrays: Sequence[Any]) -> bool:
    return all(array.is_ready() for array in arrays)
