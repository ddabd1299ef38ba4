"""How long steps take that run one after the other, each dispatched while others run."""

from __future__ import annotations


class StepTimes:
    """Of one machine, by what each step holds of something."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, float]] = {}  # in flight: how much, and when it was dispatched
        self._last_done_s = 0.0

    def dispatched(self, step_id: int, size: int, now_s: float) -> None:
        self._running[step_id] = (size, now_s)

    def done(self, step_id: int, now_s: float) -> tuple[int, float]:
        """(its size, seconds): since it was dispatched, or since the one before it ended."""
        size, began_s = self._running.pop(step_id)
        took_s = now_s - max(began_s, self._last_done_s)
        self._last_done_s = now_s
        return size, took_s

    def failed(self, step_id: int) -> None:
        del self._running[step_id]
