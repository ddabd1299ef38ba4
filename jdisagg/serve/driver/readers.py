"""Threads that wait for devices, so that the driver's thread never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Readers:
    """Threads that wait for devices, one per lane. A lane's calls run in the order in which they were queued."""

    def __init__(self) -> None:
        self._lanes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []

    def read(self, lane: str, wait: Callable[[], None]) -> None:
        """Queues a blocking call on the lane's thread, which is started for the first one."""
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._lanes[lane],), name=f"read-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._lanes[lane].put(wait)

    def end(self, lane: str) -> None:
        """Ends the lane's thread after the calls that are queued on it."""
        ending = self._lanes.pop(lane, None)
        if ending is not None:
            ending.put(None)
            self._threads = [thread for thread in self._threads if thread.is_alive()]

    @staticmethod
    def _run(lane: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (wait := lane.get()) is not None:
            wait()
            del wait  # the closure may hold KV that was inserted

    def stop(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
