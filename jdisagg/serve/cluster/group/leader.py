"""The leader of a worker that spans processes: it sends every call of its driver to all members as a command.

`GroupExecutor` is a `MeshExecutor` over devices of all processes. Every call that dispatches programs is sent as a
command before it runs here. The members execute the same commands in the same order, so they lag by the network delay
only. A program that fails in one process may have run in another, so any failure ends the group.
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

from jdisagg.cluster.membership import GroupRank
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

# The leader's view of its members: it sends commands to all in one order, receives replies, and compares digests.
#
# The group ends if a member is lost, dispatches other programs than the leader, or fails at a command. `over` is then
# called once, with the reason in one line.

END_MESSAGE_S = 0.5  # the longest wait to send the reason for the group's end

Reply = dict[str, Any]


class Outstanding:
    """Commands that members have not replied to or not executed yet. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, dict[int, Future[Reply]]] = {}  # by command, by rank
        self._sent_s: dict[int, float] = {}  # commands that some member has not executed yet

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
        """Returns the first command after number `done` and the seconds since it was sent; (0, 0.0) without one."""
        with self._lock:
            for number in [number for number in self._sent_s if number <= done]:
                del self._sent_s[number]
            first = next(iter(self._sent_s), 0)
            return first, time.monotonic() - self._sent_s[first] if first else 0.0


class DispatchDigestMonitor:
    """Compares the leader's running digest of dispatches with those of members. Safe from any thread."""

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
    """The members of a group. Methods are safe from any thread, but one thread alone dispatches programs."""

    def __init__(
        self, group: str, streams: Mapping[int, GroupStream], over: Callable[[str], None], silence_s: float
    ) -> None:
        self.group, self.streams = group, dict(streams)
        self._over, self._stall_s = over, math.inf
        self._order = threading.Lock()  # held while a command is sent to all members
        self._number = 0  # of the last command
        self._outstanding, self._digest_check = Outstanding(), DispatchDigestMonitor()
        self._ended = False
        self._pulse = Pulse([*streams.values()], silence_s, self.end, lambda: self._number, self._stuck)
        self.on_leave: Callable[[], None] = lambda: None  # a member was asked to stop

    def start(self) -> None:
        self._pulse.start()
        for rank, stream in self.streams.items():
            threading.Thread(target=self._listen, args=(rank, stream), name=f"group-{rank}", daemon=True).start()

    def expect_within(self, stall_s: float) -> None:
        """Ends the group from now on if a member takes longer than `stall_s` for a command; 0 turns this off."""
        self._stall_s = stall_s or math.inf

    # ------------------------------------------------------------ commands

    def command(self, body: dict[str, Any]) -> int:
        """Sends a command to all members and returns its number. A stream that breaks ends the group."""
        return self._send(body, None)

    def ask(self, body: dict[str, Any]) -> dict[int, Future[Reply]]:
        """Sends a command to all members and returns their replies by rank, which are never set if the group ends."""
        return self.ask_numbered(body)[0]

    def ask_numbered(self, body: dict[str, Any]) -> tuple[dict[int, Future[Reply]], int]:
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
        """Adds a dispatch that every process makes at this point to the digest."""
        self._digest_check.note(text)

    def compare(self, step: int) -> None:
        """Compares digests after every EVERY steps; members send theirs by themselves."""
        if step % EVERY == 0:
            why = self._digest_check.ours(step)
            if why is not None:
                self.end(why)

    # ------------------------------------------------------------ replies

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
            why = self._digest_check.theirs(rank, int(body["step"]), str(body["digest"]))
            if why is not None:
                self.end(why)
        elif "leave" in body:
            self.on_leave()
        else:
            self._outstanding.replied(rank, int(body["to"]), body)

    def _stuck(self) -> str | None:
        """Returns the reason if a command takes too long; None otherwise. Heartbeats report the members' progress."""
        done = {rank: stream.done for rank, stream in self.streams.items()}
        slowest = min(done.values())
        first, waited_s = self._outstanding.oldest(slowest)
        if waited_s <= self._stall_s:
            return None
        late = next(rank for rank, number in done.items() if number == slowest)
        return f"{self._name(late)} stands still: command {first} has not been carried out for {waited_s:.0f} s"

    # ------------------------------------------------------------ the end

    def end(self, why: str) -> None:
        """Sends the reason to the members and calls `over` with it, once."""
        if self.send_end(why):
            self._over(f"group {self.group!r} ends: {why}")

    def send_end(self, why: str) -> bool:
        """Tells the members that the group ends; blank after a requested stop. Returns False if it was sent before."""
        if self._ended:
            return False
        self._ended = True
        senders = [threading.Thread(target=_send_end, args=(each, why), daemon=True) for each in self.streams.values()]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(END_MESSAGE_S)  # a send to a stopped process may block for ever
        return True

    def stop(self, wait_s: float = 5.0) -> None:
        self.send_end("")
        self._pulse.stop()
        deadline_s = time.monotonic() + wait_s
        for stream in self.streams.values():
            while time.monotonic() < deadline_s and not stream.frames.has_ended():
                time.sleep(0.01)
            stream.frames.close()

    def _name(self, rank: int) -> str:
        return self.streams[rank].who


def _send_end(stream: GroupStream, why: str) -> None:
    with contextlib.suppress(JdisaggError):
        stream.send({"end": why}, time.monotonic() + END_MESSAGE_S)


@dataclass(frozen=True)
class GroupShipment(RemoteShipment):
    """A part whose shards have arrived in every process of the group."""

    number: int = 0  # the pull command's number, by which the members find their shipment


@dataclass(frozen=True)
class GroupStep:
    """A dispatched step; an error while reading it ends the group."""

    pending: PendingStep
    members: Members

    def read(self) -> StepDone:
        with ending(self.members, "reading a step"):
            return self.pending.read()


@contextmanager
def ending(members: Members, doing: str) -> Iterator[None]:
    """Ends the group if the body raises; the error goes on."""
    try:
        yield
    except Exception as error:
        members.end(f"its leader failed at {doing}: {type(error).__name__}: {str(error)[:400]}")
        raise


def shape_json(shapes: Sequence[StageShape]) -> list[Any]:
    return [stage_json(each) for each in shapes]


class GroupExecutor(MeshExecutor):
    """An executor that sends every call to the group's members; `members` is set before the first plan."""

    members: Members
    steps = 0

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        encoded = msgspec.to_builtins(plan)
        self.members.command({"run": encoded, "ships": group_done is not None})

        def done(layers: int) -> None:
            assert group_done is not None
            group_done(layers)
            self.members.command({"go": layers})  # members wait for it between the same layer groups

        with ending(self.members, f"step {plan.step_id}"):
            pending = super().run(plan, None if group_done is None else done)
        self.steps += 1
        self.members.note(json.dumps(encoded))
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
    return [future.result(timeout_s) for future in replies.values()]


class GroupKV(RemoteKV):
    """The leader's KV transport to other workers: each process of the group offers and pulls its own shards."""

    members: Members

    def ship(
        self,
        machine: MeshExecutor,
        transfer: KVTransfer,
        peer: PeerRecord,
        tell: Callable[[dict[str, Any]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Offers a part. `tell` is called when all processes have offered, on the thread of the last reply."""
        replies = self.members.ask({"offer": transfer, "raw": machine.error_monitor.lead()})
        moves, pieces = self.offers(machine, transfer, peer)

        def all_offered(found: list[Reply]) -> None:
            why = next((reply["why"] for reply in found if "why" in reply), None)
            if why is not None:
                failed(RuntimeError(f"a member offers nothing: {why}"))
                return
            tell(notice_of(transfer, moves, [*pieces, *[piece for reply in found for piece in reply["pieces"]]]))

        when_all([*replies.values()], all_offered)

    def fetch(
        self, machine: MeshExecutor, notice: dict[str, Any], peer: PeerRecord
    ) -> tuple[RemoteShipment, KVArrived]:
        """Pulls a part in every process; the part has arrived only if all shards have."""
        replies, number = self.members.ask_numbered({"pull": notice, "from": peer.worker})
        own, arrived = super().fetch(machine, notice, peer)
        try:
            has_come = all(reply["came"] for reply in awaited(replies, self.timeout_s + 1))
        except TimeoutError:
            has_come = False
        shipment = GroupShipment(own.transfer, own.landed, own.came and has_come, number)
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
    """Calls `then` with all results, on the thread that sets the last one."""
    missing, lock = set(futures), threading.Lock()

    def on_done(future: Future[Reply]) -> None:
        with lock:
            missing.discard(future)
            is_complete = not missing
        if is_complete:
            then([each.result() for each in futures])

    for each in futures:
        each.add_done_callback(on_done)


# The start of a leader and of a member; both build the same executor over the same devices.

log = logging.getLogger("jdisagg.group")

AFTER_S = 10.0  # a member's wait after the deadline, for the leader's message that the group did not fill
WARM_S = 600.0  # the longest wait for members that warm longer than the leader


class LeaderStart:
    """The start of a leader, once all its members have joined."""

    def __init__(self, settings: Settings, place: GroupRank, over: Callable[[str], None]) -> None:
        """Waits for the members. `over` gets the reason for the group's end. Raises ConfigError, GroupUnfilled."""
        self.place, self._settings = place, settings
        self._assembly = Assembly(meeting_of(settings, place), card_of(settings, place))
        streams = self._assembly.gather()
        self.members = Members(place.group, streams, over, settings.peer_silence_s)
        self.members.start()

    def form_world(self) -> None:
        """Forms JAX's world with all members. Raises GroupUnfilled."""
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
        """Returns the worker, warm in all processes; `ended` is as in `worker_process.build_workers`."""
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
            holders = (*holders, holders[-1])  # the last stage's processes hold a draft's pages
        return PeerRecord(machine.config, shapes, capabilities, holders)

    def failed(self, error: BaseException) -> None:
        self.members.send_end(f"its leader cannot start: {type(error).__name__}: {str(error)[:600]}")

    def stop(self) -> None:
        self._assembly.close()
        self.members.stop()


class MemberStart:
    """The start of a member that the leader has admitted; its methods follow the leader's start step by step."""

    def __init__(self, settings: Settings, place: GroupRank, over: Callable[[str], None]) -> None:
        """Connects to the leader. Raises GroupUnfilled, and PeerMismatch for a refusal."""
        self.place, self._settings = place, settings
        self.stream: GroupStream = join_leader(meeting_of(settings, place), card_of(settings, place))
        self._commands = Commands(self.stream, over)
        self._member: Member | None = None
        self._pulse = Pulse([self.stream], settings.peer_silence_s, over, self._done)

    def _done(self) -> int:
        return self._member.done if self._member is not None else 0

    def form_world(self) -> None:
        """Forms JAX's world, when the leader has found all members. Raises GroupUnfilled."""
        command = self._next("world", self._settings.group_wait_s + AFTER_S)
        self._pulse.start()
        World(command["world"], self.place, self._settings.peer_silence_s, self._settings.group_wait_s).form()

    def sizes(self) -> dict[str, Any]:
        """Waits for the leader's build command, which has its configuration and sizes."""
        return self._next("build")

    def build(
        self, deployment: Deployment, devices: Sequence[Any], command: dict[str, Any], progress: Progress
    ) -> Member:
        """Builds the leader's worker from its build command. Raises PeerMismatch if our flags give another worker."""
        settings, config = self._settings, decode_as(WorkerConfig, command["build"])
        name = worker_of(settings).worker
        ours = next(each for each in deployment.workers if each.worker == name)
        check_same(config, ours)
        digest = RunningDigest()
        LAUNCHES.observers.append(digest.note)
        remote_kv = remote_kv_of(deployment, settings, rank=self.place.rank)
        machines = load_executors(deployment, settings, devices, {name: config})
        warm(machines, progress, partial(remote_programs, deployment))
        self._member = Member(self.stream, self._commands, machines[config.worker], remote_kv, digest)
        self._member.done = command["n"]
        self.stream.send({"to": command["n"], "capability": remote_kv.mine.to_json()})
        return self._member

    def _next(self, wanted: str, timeout_s: float | None = None) -> dict[str, Any]:
        try:
            command = self._commands.next(timeout_s)
        except TransferTimeout as error:
            raise GroupUnfilled(str(error)) from error
        if "refused" in command:
            raise GroupUnfilled(str(command["refused"]))
        if "end" in command:
            raise GroupEnded(str(command["end"]))
        assert wanted in command, f"the leader sends {list(command)} instead of {wanted}"
        return command

    def failed(self, error: BaseException) -> None:
        try:
            self.stream.send({"failed": f"{type(error).__name__}: {str(error)[:400]}"})
        except JdisaggError:
            log.info("the leader is gone, so the failure is not reported")


def check_same(theirs: WorkerConfig, ours: WorkerConfig) -> None:
    """Raises PeerMismatch with both values of each difference but `worker` and `labels`, which are the leader's."""
    one, other = encode(theirs), encode(ours)
    differing = [key for key in sorted({*one, *other} - {"worker", "labels"}) if one.get(key) != other.get(key)]
    if differing:
        listed = "; ".join(f"{key} is {one.get(key)} at the leader and {other.get(key)} here" for key in differing)
        raise PeerMismatch(f"this process would build another worker: {listed[:600]}; start all with the same flags")
