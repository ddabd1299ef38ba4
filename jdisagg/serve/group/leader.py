"""The leader's part of a worker that spans processes: what its driver asks of it, every member is told as well.

`GroupExecutor` is a `MeshExecutor` over devices of all processes. Whatever dispatches programs goes out as a command
before it is dispatched here, so that the members, who follow the same commands in the same order, are never behind by
more than the wire. What fails at one process may have run at another: any failure ends the group.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jdisagg.core.codec import encode
from jdisagg.core.events import KVArrived, StepDone, WireCost
from jdisagg.core.layout.reshard import StageShape
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.serve.cluster.remote_kv import PeerRecord, RemoteKV, RemoteShipment, notice_of, stage_json
from jdisagg.serve.group.members import Members, Reply


@dataclass(frozen=True)
class GroupShipment(RemoteShipment):
    """A part of which every process of the group has what its shards need."""

    number: int = 0  # by which the members know theirs


@dataclass(frozen=True)
class GroupStep:
    """A step on its way; what it fails of, the group ends by."""

    pending: PendingStep
    members: Members

    def read(self) -> StepDone:
        with ending(self.members, "reading a step"):
            return self.pending.read()


@contextmanager
def ending(members: Members, doing: str) -> Iterator[None]:
    """The group ends by whatever is raised inside."""
    try:
        yield
    except Exception as error:
        members.end(f"its leader failed at {doing}: {type(error).__name__}: {str(error)[:400]}")
        raise


def shape_json(shapes: Sequence[StageShape]) -> list[Any]:
    return [stage_json(each) for each in shapes]


class GroupExecutor(MeshExecutor):
    """Implements `executor.Executor` for the group; `members` is set before the first plan."""

    members: Members
    steps = 0

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        said = encode(plan)
        self.members.command({"run": said, "ships": group_done is not None})

        def done(layers: int) -> None:
            assert group_done is not None
            group_done(layers)
            self.members.command({"go": layers})  # members wait for it between the same layer groups

        with ending(self.members, f"step {plan.step_id}"):
            pending = super().run(plan, None if group_done is None else done)
        self.steps += 1
        self.members.note(json.dumps(said))
        self.members.compare(self.steps)
        return GroupStep(pending, self.members)

    def open_gates(self, attempt: Attempt) -> None:
        self.members.command({"gates": encode(attempt)})
        with ending(self.members, "opening gates"):
            super().open_gates(attempt)

    def check(self, shipment: Any) -> Callable[[], bool] | None:
        replies = self.members.ask({"check": shipment.number})
        with ending(self.members, "a check"):
            own = super().check(shipment)

        def verdict() -> bool:
            return all([own is None or own(), *[reply["intact"] for reply in awaited(replies)]])

        return verdict

    def insert(self, shipment: Any) -> None:
        self.members.command({"insert": shipment.number})
        with ending(self.members, "an insert"):
            super().insert(shipment)

    def drop(self, shipment: Any) -> None:
        self.members.command({"drop": shipment.number})

    def time_packs(self, shapes: Sequence[StageShape]) -> tuple[WireCost, ...]:
        self.members.command({"time": shape_json(shapes)})
        with ending(self.members, "timing packs"):
            return super().time_packs(shapes)


def awaited(replies: Mapping[int, Future[Reply]], timeout_s: float | None = None) -> list[Reply]:
    """Blocks until all members have replied. Raises TimeoutError."""
    return [future.result(timeout_s) for future in replies.values()]


class GroupKV(RemoteKV):
    """The leader's KV between workers: each process offers and pulls what is of its own shards."""

    members: Members

    def ship(
        self,
        machine: MeshExecutor,
        transfer: KVTransfer,
        peer: PeerRecord,
        tell: Callable[[dict[str, Any]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`tell` is called once all have offered, on the thread of the last."""
        replies = self.members.ask({"offer": encode(transfer), "raw": machine.error_monitor.lead()})
        moves, pieces = self.offers(machine, transfer, peer)

        def all_offered(found: list[Reply]) -> None:
            lacking = next((reply["why"] for reply in found if "why" in reply), None)
            if lacking is not None:
                failed(RuntimeError(f"a member offers nothing: {lacking}"))
                return
            tell(notice_of(transfer, moves, [*pieces, *[piece for reply in found for piece in reply["pieces"]]]))

        when_all([*replies.values()], all_offered)

    def fetch(
        self, machine: MeshExecutor, notice: dict[str, Any], peer: PeerRecord
    ) -> tuple[RemoteShipment, KVArrived]:
        """Every process pulls its own; the part came where all of it did."""
        replies, number = self.members.ask_numbered({"pull": notice, "from": peer.worker})
        own, arrived = super().fetch(machine, notice, peer)
        try:
            came = all(reply["came"] for reply in awaited(replies, self.timeout_s + 1))
        except TimeoutError:
            came = False
        shipment = GroupShipment(own.transfer, own.landed, own.came and came, number)
        return shipment, KVArrived(arrived.transfer, shipment.came, arrived.wire_s)

    def withdraw(self, attempt: Attempt) -> None:
        self.members.command({"withdraw": encode(attempt)})
        super().withdraw(attempt)

    def withdraw_for(self, destination: WorkerId) -> None:
        self.members.command({"gone": destination})
        super().withdraw_for(destination)

    def withdraw_all(self) -> None:
        self.members.command({"withdraw_all": True})
        super().withdraw_all()

    def met(self, peer: PeerRecord) -> None:
        self.members.command({"peer": peer.to_json()})


def when_all(futures: Sequence[Future[Reply]], then: Callable[[list[Reply]], None]) -> None:
    """Calls `then` with all results, on the thread of the last one."""
    left, lock = set(futures), threading.Lock()

    def one_more(future: Future[Reply]) -> None:
        with lock:
            left.discard(future)
            complete = not left
        if complete:
            then([each.result() for each in futures])

    for each in futures:
        each.add_done_callback(one_more)
