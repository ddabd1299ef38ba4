"""Aborts that the router has sent and that are not acknowledged: sent again a few times, then left to the lease."""

from __future__ import annotations

from jdisagg.core.events import SetTimer
from jdisagg.core.messages import Abort
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.policy.outbox import Outbox


class Aborts:
    def __init__(self, out: Outbox, timeout_s: float, tries: int) -> None:
        self.out, self.timeout_s, self.tries = out, timeout_s, tries
        self._open: dict[str, tuple[WorkerId, Abort, int]] = {}  # by timer key: to whom, what, times sent

    def __len__(self) -> int:
        return len(self._open)

    def send(self, worker: WorkerId, attempt: Attempt, detail: str, now_s: float) -> None:
        self._send(_key(worker, attempt), worker, Abort(attempt, detail), 1, now_s)

    def acknowledged(self, worker: WorkerId, attempt: Attempt) -> None:
        self._open.pop(_key(worker, attempt), None)

    def timer(self, key: str, now_s: float) -> None:
        worker, abort, sent = self._open.pop(key, (None, None, 0))
        if worker is not None and abort is not None and sent < self.tries:
            self._send(key, worker, abort, sent + 1, now_s)

    def forget(self, worker: WorkerId) -> None:
        """A lost worker acknowledges nothing, and holds nothing."""
        for key in [key for key, (to, _, _) in self._open.items() if to == worker]:
            del self._open[key]

    def _send(self, key: str, worker: WorkerId, abort: Abort, sent: int, now_s: float) -> None:
        self._open[key] = (worker, abort, sent)
        self.out.send(worker, abort)
        self.out.put(SetTimer(now_s + self.timeout_s, key))


def _key(worker: WorkerId, attempt: Attempt) -> str:
    return f"abort/{worker}/{attempt.epoch}/{attempt.request_id}"
