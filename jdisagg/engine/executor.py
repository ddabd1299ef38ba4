"""The interface of an executor: a mesh with weights and KV pages that runs plans and takes no scheduling decisions.

All methods are called from one thread, return before the device is done, and take effect in program order: pages that
an earlier call wrote are what a later call reads. `read` and `wait` block, and are called from reader threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jdisagg.core.events import StepDone
from jdisagg.core.request import Attempt
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.tiers import PageMove
from jdisagg.core.worker_config import WorkerConfig


class PendingStep(Protocol):
    def read(self) -> StepDone:
        """Returns the step's results; blocks until the sampled tokens are on the host."""
        ...


GroupDone = Callable[[int], None]  # called with the number of layers whose programs are dispatched


class Shipment(Protocol):
    """Packed pages in transfer to another executor."""

    @property
    def transfer(self) -> KVTransfer: ...

    def wait_packed(self) -> None:
        """Blocks until the source's devices have packed the pages; the transfer starts then."""
        ...

    def wait(self) -> None:
        """Blocks until the bytes are on the destination's devices (not yet in its pages)."""
        ...


class PendingPages(Protocol):
    """Packed pages on the way to tiers below HBM."""

    def read(self) -> tuple[np.ndarray, bool]:
        """Returns (u8[n, bytes of a record], True if they may be kept); blocks until the devices have packed them."""
        ...


class Executor(Protocol):
    config: WorkerConfig

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        """Dispatches one step: its decode rows, its chunks, or both, stage by stage.

        `group_done(n)` is called between layer groups: layers 0 to n - 1 are dispatched, the others are not. KV of
        these layers that it ships leaves while the next layers are computed. It is not called after the last group: the
        rest may be shipped when this returns, behind the sampling of the first tokens. A step with KV waits (gates) has
        no chunks and runs as far as its KV has arrived; `insert` and `open_gates` dispatch the rest.
        """
        ...

    def open_gates(self, attempt: Attempt) -> None:
        """Cancels the KV waits of this attempt: its steps run now, whatever is in those pages."""
        ...

    def ship(self, transfer: KVTransfer, destination: Any) -> Shipment:
        """Packs the source pages in program order and starts their transfer to `destination`, another executor."""
        ...

    def check(self, shipment: Any) -> Callable[[], bool] | None:
        """Starts to compare the digests of a landed shipment, at the destination. The returned function waits and
        returns True if the landed data is what was packed; None if the shipment has no digest."""
        ...

    def drop(self, shipment: Any) -> None:
        """Drops a landed shipment at the destination: it is no longer wanted and was not inserted in any page."""
        ...

    def insert(self, shipment: Any) -> None:
        """Scatters a landed shipment into the transfer's destination pages, at the destination. If this raises, the
        caller cancels the handoff's KV waits: no other call would let a step proceed that waits for it."""
        ...


class TieredExecutor(Executor, Protocol):
    """An executor whose pages may also be in tiers below HBM."""

    def pack_pages(self, pages: Sequence[int]) -> PendingPages:
        """Packs pages of HBM in program order, as records: see `kv/tiers/records.py`."""
        ...

    def land_pages(self, move: PageMove, records: Any, good: Sequence[bool]) -> Shipment:
        """Starts the copy of records to the devices, from any thread; `check` and `insert` follow. Pages whose record
        is not good are not written."""
        ...
