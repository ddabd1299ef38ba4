"""The leader's part of a worker that spans processes: what its driver asks of it, every member is told as well.

`GroupExecutor` is a `MeshExecutor` over devices of all processes. Whatever dispatches programs goes out as a command
before it is dispatched here, so that the members, who follow the same commands in the same order, are never behind by
more than the wire. What fails at one process may have run at another: any failure ends the group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from jdisagg.cluster.membership import GroupPlace
from jdisagg.core.codec import decode_as, encode
from jdisagg.core.dispatch_digest import EVERY, DigestComparison, RunningDigest
from jdisagg.core.errors import JdisaggError, PeerMismatch, TransferTimeout
from jdisagg.core.events import KVArrived, StepDone, WireCost
from jdisagg.core.layout.reshard import StageShape, holders_of
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.shipping import shapes_of
from jdisagg.kv.transport.choose import read_capability
from jdisagg.parallel.pace import LAUNCHES
from jdisagg.serve.cluster.group.assembly import Assembly, GroupUnfilled, join_leader
from jdisagg.serve.cluster.group.member import GroupEnded, Member, World, card_of, free_port, meeting_of, worker_of
from jdisagg.serve.cluster.group.stream import Commands, GroupStream, Pulse
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV, RemoteShipment, notice_of, stage_json
from jdisagg.serve.cluster.role_options import options_of
from jdisagg.serve.cluster.router_process import own_workers, remote_kv_of, remote_programs, roles_of
from jdisagg.serve.cluster.worker_process import WorkerProcess, join_router
from jdisagg.serve.deploy.assemble import Progress, load_executors, warm
from jdisagg.serve.deploy.deployment import Deployment

# The leader's view of its members: commands out to all in one order, their replies in, and proof that they are in
# step.
#
# A member that is lost, out of step, or fails at what it was told ends the group: `over` is called once, with one
# line.

LAST_WORD_S = 0.5  # for the others to be told why the group ends

Reply = dict[str, Any]


class Outstanding:
    """Commands that members have yet to reply to or to carry out. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, dict[int, Future[Reply]]] = {}  # by command, by rank
        self._sent_s: dict[int, float] = {}  # commands that some member has not carried out yet

    def sent(self, number: int, replies: dict[int, Future[Reply]] | None) -> None:
        with self._lock:
            if replies is not None:
                self._waiting[number] = replies
            self._sent_s[number] = time.monotonic()

    def replied(self, rank: int, number: int, body: Reply) -> None:
        with self._lock:
            waiting = self._waiting.get(number, {})
            found = waiting.pop(rank, None)
            if not waiting:
                self._waiting.pop(number, None)
        if found is not None:
            found.set_result(body)

    def oldest(self, done: int) -> tuple[int, float]:
        """The first command after number `done`, and how long ago it was sent, in seconds; 0 s where there is none."""
        with self._lock:
            for number in [number for number in self._sent_s if number <= done]:
                del self._sent_s[number]
            first = next(iter(self._sent_s), 0)
            return first, time.monotonic() - self._sent_s[first] if first else 0.0


class InStep:
    """Our digest of what was dispatched, and its comparison with those of members. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digest, self._comparison = RunningDigest(), DigestComparison()

    def note(self, text: str) -> None:
        self._digest.note(text)

    def ours(self, step: int) -> str | None:
        with self._lock:
            return self._comparison.ours(step, self._digest.now)

    def theirs(self, rank: int, step: int, digest: str) -> str | None:
        with self._lock:
            return self._comparison.theirs(rank, step, digest)


class Members:
    """Methods are safe from any thread; commands that dispatch programs all come from one."""

    def __init__(
        self,
        group: str,
        streams: Mapping[int, GroupStream],
        over: Callable[[str], None],
        silence_s: float,
    ) -> None:
        self.group, self.streams = group, dict(streams)
        self._over, self._stall_s = over, math.inf
        self._order = threading.Lock()  # who holds it says the next command
        self._number = 0  # of the last command
        self._outstanding, self._in_step = Outstanding(), InStep()
        self._ended = False
        self._pulse = Pulse([*streams.values()], silence_s, self.end, lambda: self._number, self._stuck)
        self.on_leave: Callable[[], None] = lambda: None  # a member was asked to stop

    def start(self) -> None:
        self._pulse.start()
        for rank, stream in self.streams.items():
            threading.Thread(target=self._listen, args=(rank, stream), name=f"group-{rank}", daemon=True).start()

    def expect_within(self, stall_s: float) -> None:
        """From now on a member that takes longer over one command ends the group; 0: none does."""
        self._stall_s = stall_s or math.inf

    # ------------------------------------------------------------ out

    def command(self, body: dict[str, Any]) -> int:
        """Tells all members; returns the command's number. A stream that breaks ends the group."""
        return self._send(body, None)

    def ask(self, body: dict[str, Any]) -> dict[int, Future[Reply]]:
        """Tells all members; what each replies, by rank. A group that ends leaves futures that never come."""
        return self.ask_numbered(body)[0]

    def ask_numbered(self, body: dict[str, Any]) -> tuple[dict[int, Future[Reply]], int]:
        """As `ask`, and the command's number."""
        replies: dict[int, Future[Reply]] = {rank: Future() for rank in self.streams}
        return replies, self._send(body, dict(replies))

    def _send(self, body: dict[str, Any], replies: dict[int, Future[Reply]] | None) -> int:
        with self._order:
            self._number += 1
            number = self._number
            self._outstanding.sent(number, replies)
            for rank, stream in self.streams.items():
                try:
                    stream.send({"n": number, **body})
                except JdisaggError as error:
                    threading.Thread(target=self.end, args=(f"{self._name(rank)} is lost: {error}",)).start()
        return number

    def note(self, text: str) -> None:
        """Something that every process dispatches at this point of the order."""
        self._in_step.note(text)

    def compare(self, step: int) -> None:
        """Our digest after this step; members send theirs by themselves."""
        if step % EVERY == 0:
            why = self._in_step.ours(step)
            if why is not None:
                self.end(why)

    # ------------------------------------------------------------ in

    def _listen(self, rank: int, stream: GroupStream) -> None:
        try:
            for body in stream.bodies():
                self._take(rank, body)
        except JdisaggError as error:
            self.end(f"{self._name(rank)} is lost: {error}")
        except Exception as error:
            self.end(f"{self._name(rank)} says what cannot be followed: {type(error).__name__}: {error}")

    def _take(self, rank: int, body: Reply) -> None:
        if "failed" in body:
            self.end(f"{self._name(rank)} failed: {str(body['failed'])[:600]}")
        elif "digest" in body:
            why = self._in_step.theirs(rank, int(body["step"]), str(body["digest"]))
            if why is not None:
                self.end(why)
        elif "leave" in body:
            self.on_leave()
        else:
            self._outstanding.replied(rank, int(body["to"]), body)

    def _stuck(self) -> str | None:
        """Why work stands still, where it does: every heartbeat says how far a member is."""
        done = {rank: stream.done for rank, stream in self.streams.items()}
        slowest = min(done.values())
        first, waited_s = self._outstanding.oldest(slowest)
        if waited_s <= self._stall_s:
            return None
        late = next(rank for rank, number in done.items() if number == slowest)
        return f"{self._name(late)} stands still: command {first} has not been carried out for {waited_s:.0f} s"

    # ------------------------------------------------------------ the end

    def end(self, why: str) -> None:
        """Tells the others and `over`, once."""
        if self.tell_end(why):
            self._over(f"group {self.group!r} ends: {why}")

    def tell_end(self, why: str) -> bool:
        """Tells the members that the group ends; blank: as it was asked to. False where they know."""
        if self._ended:
            return False
        self._ended = True
        words = [threading.Thread(target=_say_end, args=(each, why), daemon=True) for each in self.streams.values()]
        for word in words:
            word.start()
        for word in words:
            word.join(LAST_WORD_S)  # a stream to a process that is stopped may be held up for ever
        return True

    def stop(self, wait_s: float = 5.0) -> None:
        """A clean end: the members leave first."""
        self.tell_end("")
        self._pulse.stop()
        deadline_s = time.monotonic() + wait_s
        for stream in self.streams.values():
            while time.monotonic() < deadline_s and not stream.frames.has_ended():
                time.sleep(0.01)
            stream.frames.close()

    @property
    def over(self) -> bool:
        return self._ended

    def _name(self, rank: int) -> str:
        return self.streams[rank].who


def _say_end(stream: GroupStream, why: str) -> None:
    with contextlib.suppress(JdisaggError):
        stream.send({"end": why}, time.monotonic() + LAST_WORD_S)


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
        said = msgspec.to_builtins(plan)
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
        self.members.command({"gates": attempt})
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
        replies = self.members.ask({"offer": transfer, "raw": machine.error_monitor.lead()})
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
        self.members.command({"withdraw": attempt})
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


# A group's leader and its members, from the meeting to running: both build the same machine over the same
# devices.

log = logging.getLogger("jdisagg.group")

AFTER_S = 10.0  # behind its deadline, for a leader to say that the group did not fill
WARM_S = 600.0  # behind the leader, until every member is warm


class LeaderStart:
    """A leader whose members are all there."""

    def __init__(self, settings: Settings, place: GroupPlace, over: Callable[[str], None]) -> None:
        """Waits for the members. `over` is called with why the group ends. Raises ConfigError, GroupUnfilled."""
        self.place, self._settings = place, settings
        self._assembly = Assembly(meeting_of(settings, place), card_of(settings, place))
        streams = self._assembly.gather()
        self.members = Members(place.group, streams, over, settings.peer_silence_s)
        self.members.start()

    def form_world(self) -> None:
        """Raises GroupUnfilled."""
        address = free_port(self.place.coordinator)
        self.members.command({"world": address})
        World(address, self.place, self._settings.peer_silence_s, self._settings.group_wait_s).form()

    def build(
        self,
        deployment: Deployment,
        devices: Sequence[Any],
        device_bytes: int | None,
        progress: Progress,
        ended: Callable[[str], None],
    ) -> WorkerProcess:
        """The worker, warm in all processes; `ended` as `processes.build_workers` has it."""
        settings = self._settings
        own = own_workers(deployment, roles_of(settings))
        ((name, config),) = own.items()
        built = self.members.ask({"build": config, "name": name, "device_bytes": device_bytes})
        LAUNCHES.observers.append(self.members.note)
        remote_kv = remote_kv_of(deployment, settings, GroupKV)
        machines = load_executors(deployment, settings, devices, own, kind=GroupExecutor)
        warm(machines, progress, partial(remote_programs, deployment))
        ((worker, machine),) = machines.items()
        assert isinstance(machine, GroupExecutor) and isinstance(remote_kv, GroupKV)
        machine.members = remote_kv.members = self.members
        peer = self._peer_record(machine, remote_kv.mine, built)
        self.members.expect_within(settings.stall_timeout_s)
        options = options_of(deployment, settings, own, self.place.size)
        return join_router(deployment, settings, {worker: machine}, remote_kv, [peer], ended, options)

    def _peer_record(self, machine: MeshExecutor, mine: Any, built: dict[int, Future[Reply]]) -> PeerRecord:
        capabilities = (mine, *[read_capability(reply["capability"]) for reply in awaited(built, WARM_S)])
        shapes = shapes_of(machine.pages)
        tps, share = [each.tp for each in shapes if not each.draft], not machine.config.role.decodes
        devices = max(tps) if share else sum(tps)
        holders = holders_of(tps, devices, self.place.size, stages_share=share)
        if len(tps) < len(shapes):
            holders = (*holders, holders[-1])  # a draft's pages lie where the last stage does
        return PeerRecord(machine.config, shapes, capabilities, holders)

    def failed(self, error: BaseException) -> None:
        """Tells the members why there will be no worker."""
        self.members.tell_end(f"its leader cannot start: {type(error).__name__}: {str(error)[:600]}")

    def stop(self) -> None:
        """A clean end."""
        self._assembly.close()
        self.members.stop()


class MemberStart:
    """A member that the leader has taken in; the calls follow the leader's start step by step."""

    def __init__(self, settings: Settings, place: GroupPlace, over: Callable[[str], None]) -> None:
        """Looks for the leader. Raises GroupUnfilled, PeerMismatch where it refuses us."""
        self.place, self._settings = place, settings
        self.stream: GroupStream = join_leader(meeting_of(settings, place), card_of(settings, place))
        self._commands = Commands(self.stream, over)
        self._member: Member | None = None
        self._pulse = Pulse([self.stream], settings.peer_silence_s, over, self._done)

    def _done(self) -> int:
        return self._member.done if self._member is not None else 0

    def form_world(self) -> None:
        """Once the group is full."""
        said = self._next("world", self._settings.group_wait_s + AFTER_S)
        self._pulse.start()
        World(said["world"], self.place, self._settings.peer_silence_s, self._settings.group_wait_s).form()

    def sizes(self) -> dict[str, Any]:
        """What the leader builds."""
        return self._next("build")

    def build(self, deployment: Deployment, devices: Sequence[Any], said: dict[str, Any], progress: Progress) -> Member:
        """The leader's worker. Raises PeerMismatch where ours would be another."""
        settings, config = self._settings, decode_as(WorkerConfig, said["build"])
        name = worker_of(settings).worker
        ours = next(each for each in deployment.workers if each.worker == name)
        check_same(config, ours)
        digest = RunningDigest()
        LAUNCHES.observers.append(digest.note)
        remote_kv = remote_kv_of(deployment, settings, rank=self.place.rank)
        machines = load_executors(deployment, settings, devices, {name: config})
        warm(machines, progress, partial(remote_programs, deployment))
        self._member = Member(self.stream, self._commands, machines[config.worker], remote_kv, digest)
        self._member.done = said["n"]
        self.stream.send({"to": said["n"], "capability": remote_kv.mine.to_json()})
        return self._member

    def _next(self, wanted: str, timeout_s: float | None = None) -> dict[str, Any]:
        try:
            said = self._commands.next(timeout_s)
        except TransferTimeout as error:
            raise GroupUnfilled(str(error)) from error
        if "refused" in said:
            raise GroupUnfilled(str(said["refused"]))
        if "end" in said:
            raise GroupEnded(str(said["end"]))
        assert wanted in said, f"the leader says {list(said)} where {wanted} belongs"
        return said

    def failed(self, error: BaseException) -> None:
        """Tells the leader, which ends the group."""
        try:
            self.stream.send({"failed": f"{type(error).__name__}: {str(error)[:400]}"})
        except JdisaggError:
            log.info("the leader is gone before it heard")


def check_same(theirs: WorkerConfig, ours: WorkerConfig) -> None:
    """Raises PeerMismatch with both values of what differs, names and places apart: the group's are its leader's."""
    one, other = encode(theirs), encode(ours)
    differing = [key for key in sorted({*one, *other} - {"worker", "labels"}) if one.get(key) != other.get(key)]
    if differing:
        said = "; ".join(f"{key} is {one.get(key)} at the leader and {other.get(key)} here" for key in differing)
        raise PeerMismatch(f"this process would build another worker: {said[:600]}; start all with the same flags")
