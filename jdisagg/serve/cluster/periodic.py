"""A task that runs at intervals on a thread of its own, whatever other threads are waiting for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger("jdisagg.cluster")


class PeriodicTask:
    """Calls `task` every `interval_s` seconds, from `start` to `stop`. One that raises is logged and called again."""

    def __init__(self, interval_s: float, task: Callable[[], object]) -> None:
        self._interval_s, self._task = interval_s, task
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control-periodic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def __enter__(self) -> PeriodicTask:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                self._task()
            except Exception:  # the next call may find what this one could not
                log.exception("a periodic task failed")
