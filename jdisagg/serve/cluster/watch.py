"""A watch: something that is looked at again and again, whatever those who work on it are waiting for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger("jdisagg.cluster")


class Watch:
    """Calls `look` every `every_s` seconds, from `start` to `stop`, on a thread of its own."""

    def __init__(self, every_s: float, look: Callable[[], object]) -> None:
        self._every_s, self._look = every_s, look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._look()
            except Exception:  # the next look may find what this one could not
                log.exception("a look at the links failed")
