"""What a driver needs of an executor: a mesh with parameters and KV pages that runs plans and decides nothing.

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
        """Blocks until the drawn tokens are on the host."""
        ...


GroupDone = Callable[[int], None]  # layers of the model whose programs are dispatched so far


class Shipment(Protocol):
    """Packed pages on their way to another executor."""

    @property
    def transfer(self) -> KVTransfer: ...

    def wait_packed(self) -> None:
        """Blocks until the source's devices have packed them: from then on they are on their way."""
        ...

    def wait(self) -> None:
        """Blocks until the bytes are on the destination's devices (not yet in its pages)."""
        ...


class PagesPacked(Protocol):
    """Pages on their way below HBM."""

    def read(self) -> tuple[np.ndarray, bool]:
        """(u8[n, bytes of a record], whether they may be kept); blocks until the devices have packed them."""
        ...


class Executor(Protocol):
    config: WorkerConfig

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        """One step: its decode rows, its chunks, or both, stage by stage.

        `group_done(n)` is called between layer groups: layers 0 to n - 1 are dispatched, the others are not. What it
        ships of these layers leaves while the next are computed. After the last group it is not called: the rest may be
        shipped when this returns, behind the draw of the first tokens. A step with gates, which has no chunks, runs as
        far as its KV is in; `insert` and `open_gates` let the rest of it follow.
        """
        ...

    def open_gates(self, attempt: Attempt) -> None:
        """Steps that wait for parts of this attempt run now, whatever is in those pages."""
        ...

    def ship(self, transfer: KVTransfer, destination: Any) -> Shipment:
        """Packs the source pages in program order and starts them on their way to `destination`, another executor."""
        ...

    def check(self, shipment: Any) -> Callable[[], bool] | None:
        """At the destination, once the shipment has landed: starts to compare its digests. The result says, after a
        wait, whether what landed is what was packed; None where no digest came with it."""
        ...

    def drop(self, shipment: Any) -> None:
        """At the destination, once the shipment has landed: nobody waits for it any more, it is in no page."""
        ...

    def insert(self, shipment: Any) -> None:
        """At the destination, once the shipment has landed: scatters it into the transfer's destination pages. Where
        this raises, the caller opens the handoff's gates: nothing else would let a step go on that waits for it."""
        ...


class TieredExecutor(Executor, Protocol):
    """One whose pages may lie below HBM as well."""

    def pack_pages(self, pages: Sequence[int]) -> PagesPacked:
        """Packs pages of HBM in program order, as records: see `kv/tiers/records.py`."""
        ...

    def land_pages(self, move: PageMove, records: Any, good: Sequence[bool]) -> Shipment:
        """Starts records on their way to the devices, from any thread; `check` and `insert` follow. Pages whose record
        is not good are not written."""
        ...
