"""A group's leader and its members, from the meeting to running: both build the same machine over the same devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from jdisagg.cluster.membership import GroupPlace
from jdisagg.core.codec import decode_as, encode
from jdisagg.core.dispatch_digest import RunningDigest
from jdisagg.core.errors import JdisaggError, PeerMismatch, TransferTimeout
from jdisagg.core.layout.reshard import holders_of
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.shipping import shapes_of
from jdisagg.kv.transport.choose import read_capability
from jdisagg.parallel.pace import LAUNCHES
from jdisagg.serve.cluster.processes import (
    own_workers,
    remote_kv_of,
    remote_programs,
    roles_of,
)
from jdisagg.serve.cluster.remote_kv import PeerRecord
from jdisagg.serve.cluster.role_options import options_of
from jdisagg.serve.cluster.worker_process import WorkerProcess, join_router
from jdisagg.serve.deploy.assemble import Progress, load_executors, warm
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.group.assembly import Assembly, GroupUnfilled, join_leader
from jdisagg.serve.group.leader import GroupExecutor, GroupKV, awaited
from jdisagg.serve.group.member import GroupEnded, Member
from jdisagg.serve.group.members import Members, Reply
from jdisagg.serve.group.stream import Commands, GroupStream, Pulse
from jdisagg.serve.group.world import World, card_of, free_port, meeting_of, worker_of

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
        built = self.members.ask({"build": encode(config), "name": name, "device_bytes": device_bytes})
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
