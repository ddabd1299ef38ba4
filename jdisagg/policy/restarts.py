"""When a process that ended by a failure is started again: later each time, and in the end no more."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, LONGEST_S = 1.0, 30.0  # pauses
STEADY_S = 120.0  # who lived so long has started well: its next failure counts as the first
MOST = 20  # failures in a row, the last of them for good


@dataclass(slots=True)
class Restarts:
    """Of one process."""

    failures: int = 0  # in a row

    def pause_s(self, lived_s: float) -> float | None:
        """How long to wait after a failure of one that lived so long; None: it is given up."""
        self.failures = 1 if lived_s >= STEADY_S else self.failures + 1
        if self.failures >= MOST:
            return None
        return min(LONGEST_S, FIRST_S * 2.0 ** (self.failures - 1))
