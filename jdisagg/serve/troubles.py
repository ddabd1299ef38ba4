"""What an operator should know while requests are served: workers that went without a word, a journal that ended."""

from __future__ import annotations

from collections.abc import Mapping

from jdisagg.core.events import WorkerJoined, WorkerLeaving, WorkerLost
from jdisagg.core.request import WorkerId
from jdisagg.serve.metric_families import Families, Fold, Kind

FORGOTTEN_S = 3600.0  # a worker that has not come back by then is not expected any more


class Troubles:
    """A fold of what the router was told; written on the driver's thread, read from anywhere."""

    def __init__(self, families: Families) -> None:
        self._leaving: set[WorkerId] = set()
        self._missing: dict[WorkerId, float] = {}  # since when, by the driver's clock
        self._journal = ""
        gauge = families.gauge("workers_missing", "Workers that went without leaving, and are not back").of()
        gauge.set_function(lambda: len(self._missing))

    def folds(self) -> Mapping[Kind, Fold]:
        return {WorkerJoined: self._joined, WorkerLeaving: self._left, WorkerLost: self._lost}

    def journal_ended(self) -> None:
        self._journal = "the journal of --record_dir takes no more"

    def told(self, now_s: float) -> list[str]:
        """One line for each, none where all is well."""
        since = [(worker, now_s - at_s) for worker, at_s in [*self._missing.items()]]
        gone = [f"{worker} is gone for {gone_s:.0f} s" for worker, gone_s in since if gone_s < FORGOTTEN_S]
        return gone + ([self._journal] if self._journal else [])

    def _joined(self, actor: str, item: WorkerJoined, now_s: float) -> None:
        self._missing.pop(item.config.worker, None)
        self._leaving.discard(item.config.worker)

    def _left(self, actor: str, item: WorkerLeaving, now_s: float) -> None:
        self._leaving.add(item.worker)

    def _lost(self, actor: str, item: WorkerLost, now_s: float) -> None:
        if item.worker in self._leaving:
            self._leaving.discard(item.worker)
            return
        self._missing = {worker: at_s for worker, at_s in self._missing.items() if now_s - at_s < FORGOTTEN_S}
        self._missing[item.worker] = now_s
