"""Work of several machines at once, each on a thread of its own: what they wait for passes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Lock
from typing import TypeVar

from jdisagg.core.request import WorkerId

Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class Stopped(Exception):
    """Another of the calls failed, or the caller was interrupted."""


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each returns, in order. As soon as one fails its error is raised, and the others are not waited for."""
    if len(calls) < 2:
        return [call() for call in calls]
    pool = ThreadPoolExecutor(len(calls), thread_name_prefix="start")
    try:
        futures = [pool.submit(call) for call in calls]
        ended = wait(futures, return_when=FIRST_EXCEPTION).done
        return [each.result() for each in futures if each in ended]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class JointProgress:
    """One progress of several machines, told by any thread; after `stop` whoever tells it anything ends."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, Lock()
        self._counts: dict[WorkerId, tuple[int, int]] = {}
        self._stopped = False

    def tell(self, worker: WorkerId, label: str, done: int, total: int) -> None:
        """So many of the programs of this worker are done; raises Stopped."""
        with self._lock:
            if self._stopped:
                raise Stopped(worker)
            self._counts[worker] = done, total
            self._progress(f"{worker} {label}", *map(sum, zip(*self._counts.values(), strict=True)))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
