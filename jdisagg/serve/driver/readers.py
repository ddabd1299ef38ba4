"""Threads that wait for devices, so that the thread that decides never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Readers:
    """Threads that wait for devices, one a lane; results of a lane come in the order they were asked for."""

    def __init__(self) -> None:
        self._lanes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []

    def read(self, lane: str, wait: Callable[[], None]) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._lanes[lane],), name=f"read-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._lanes[lane].put(wait)

    def end(self, lane: str) -> None:
        """Nobody reads there any more: its thread ends behind what it was asked for."""
        ending = self._lanes.pop(lane, None)
        if ending is not None:
            ending.put(None)
            self._threads = [thread for thread in self._threads if thread.is_alive()]

    @staticmethod
    def _run(lane: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (wait := lane.get()) is not None:
            wait()
            del wait  # it may hold KV that has been inserted

    def stop(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
