"""A group's member: it executes the leader's commands in order, on its own devices of the worker's mesh.

One thread reads commands and dispatches programs; others wait for results and pull KV. A member decides nothing. Any
failure is reported to the leader, which ends the group. The second half forms the group's JAX world.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax

import jdisagg
from jdisagg.cluster.membership import GroupRank
from jdisagg.core.codec import decode_as
from jdisagg.core.dispatch_digest import EVERY, RunningDigest
from jdisagg.core.errors import ConfigError, JdisaggError, MeshError, TransportError
from jdisagg.core.mesh_spec import Schedule, WorkerMesh
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.core.worker_config import Role
from jdisagg.engine.executor import PendingStep
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.kv.transport.listener import split_address
from jdisagg.policy.group_handshake import MemberInfo
from jdisagg.serve.cluster.group.assembly import GroupUnfilled, Meeting, is_address, listener_at
from jdisagg.serve.cluster.group.stream import Commands, GroupStream
from jdisagg.serve.cluster.kv_notices import PeerRecord, RemoteKV, RemoteShipment, read_peer, read_stage
from jdisagg.serve.cluster.link import kv_contexts
from jdisagg.serve.cluster.router_process import plays, read_secret, roles_of
from jdisagg.serve.deploy.deployment import AUTO, mesh_of, model_files, name_of
from jdisagg.serve.driver.readers import Readers

log = logging.getLogger("jdisagg.group")

Command = dict[str, Any]


class GroupEnded(Exception):
    """The leader ended the group; the text is the reason, blank after a requested stop."""


class Pulled:
    """Pulled shipments that are in no page yet, by command number. Those dropped before they arrive are discarded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landed: dict[int, RemoteShipment | None] = {}

    def expect(self, number: int) -> None:
        with self._lock:
            self._landed[number] = None

    def add(self, number: int, shipment: RemoteShipment) -> None:
        with self._lock:
            if number in self._landed:
                self._landed[number] = shipment

    def drop(self, number: int) -> None:
        with self._lock:
            self._landed.pop(number, None)

    def __getitem__(self, number: int) -> RemoteShipment:
        found = self._landed[number]
        assert found is not None, f"the leader asks for part {number}, which has not come"
        return found


class Member:
    """Executes the leader's commands on `machine`, an executor over the whole mesh, until the group ends."""

    def __init__(
        self, stream: GroupStream, commands: Commands, machine: MeshExecutor, remote_kv: RemoteKV, digest: RunningDigest
    ) -> None:
        self._stream, self._commands, self._machine = stream, commands, machine
        self._remote_kv, self._digest = remote_kv, digest
        self._peers: dict[WorkerId, PeerRecord] = {}
        self._pulled = Pulled()
        self._readers = Readers()
        self._steps = 0
        self.done = 0  # number of the last executed command
        self._handlers: dict[str, Callable[[Command], None]] = {
            "run": self._run,
            "gates": lambda command: machine.open_gates(decode_as(Attempt, command["gates"])),
            "offer": self._offer,
            "pull": self._pull,
            "check": self._check,
            "insert": self._insert,
            "drop": self._drop,
            "time": self._time,
            "peer": self._add_peer,
            "gone": self._remove_peer,
            "withdraw": lambda command: remote_kv.withdraw(decode_as(Attempt, command["withdraw"])),
            "withdraw_all": lambda command: remote_kv.withdraw_all(),
        }

    def run(self) -> str:
        """Executes commands until the group ends. Returns the reason, blank after a requested stop."""
        try:
            while True:
                self._execute(self._commands.next())
        except GroupEnded as end:
            return str(end)
        except Exception as error:
            log.exception("a command failed")
            self._report_failure(error)
            return f"{type(error).__name__}: {str(error)[:400]}"

    def leave(self) -> None:
        self._stream.send({"leave": True})

    def close(self) -> None:
        self._remote_kv.close()

    def _execute(self, command: Command) -> None:
        if "end" in command:
            raise GroupEnded(command["end"])
        name = next((each for each in self._handlers if each in command), None)
        assert name is not None, f"{list(command)} is no command"
        self._handlers[name](command)
        self.done = max(self.done, command["n"])

    def _report_failure(self, error: Exception) -> None:
        try:
            self._stream.send({"failed": f"{type(error).__name__}: {str(error)[:400]}"})
        except JdisaggError:
            log.info("the leader is gone, so the failure is not reported")

    # ------------------------------------------------------------ steps

    def _run(self, command: Command) -> None:
        """Runs a step. Between layer groups of a step that ships KV it executes commands until the leader goes on."""
        plan = decode_as(StepPlan, command["run"])
        pending = self._machine.run(plan, self._execute_until if command["ships"] else None)
        self._steps += 1
        self._digest.note(json.dumps(command["run"]))
        if self._steps % EVERY == 0:
            self._stream.send({"digest": self._digest.now, "step": self._steps})
        self._readers.read(plan.lane, lambda: self._read(pending))

    def _execute_until(self, layers: int) -> None:
        while "go" not in (command := self._commands.next()):
            self._execute(command)
        assert command["go"] == layers, f"the leader goes on at layer {command['go']}, this process at {layers}"
        self.done = command["n"]

    def _read(self, pending: PendingStep) -> None:
        try:
            pending.read()
        except Exception as error:
            self._report_failure(error)

    # ------------------------------------------------------------ KV

    def _offer(self, command: Command) -> None:
        transfer = decode_as(KVTransfer, command["offer"])
        self._machine.error_monitor.follow(command["raw"])
        try:
            peer = self._peers[transfer.destination]
            answer: dict[str, Any] = {"pieces": self._remote_kv.offers(self._machine, transfer, peer)[1]}
        except (KeyError, TransportError) as error:
            answer = {"why": f"{type(error).__name__}: {error}"}
        self._stream.send({"to": command["n"], **answer})

    def _pull(self, command: Command) -> None:
        """Queues the pull of a part; parts of one source are pulled in order, as the leader does."""
        self._pulled.expect(command["n"])
        self._readers.read(f"pull-{command['from']}", lambda: self._pull_now(command))

    def _pull_now(self, command: Command) -> None:
        try:
            transfer = decode_as(KVTransfer, command["pull"]["transfer"])
            peer = self._peers[WorkerId(command["from"])]
            shipment = self._remote_kv.pull(self._machine, transfer, command["pull"], peer)
            has_come = shipment.came
            self._pulled.add(command["n"], shipment)
        except Exception:  # the part counts as never sent
            log.exception("a part was lost")
            has_come = False
        try:
            self._stream.send({"to": command["n"], "came": has_come})
        except JdisaggError:
            log.info("the leader is gone")

    def _check(self, command: Command) -> None:
        number = command["n"]
        verdict = self._machine.check(self._pulled[command["check"]])

        def reply() -> None:
            try:
                self._stream.send({"to": number, "intact": verdict is None or verdict()})
            except Exception as error:
                self._report_failure(error)

        self._readers.read("check", reply)

    def _time(self, command: Command) -> None:
        self._machine.time_packs([read_stage(each) for each in command["time"]])

    def _insert(self, command: Command) -> None:
        self._machine.insert(self._pulled[command["insert"]])
        self._pulled.drop(command["insert"])

    def _drop(self, command: Command) -> None:
        self._pulled.drop(command["drop"])

    def _add_peer(self, command: Command) -> None:
        peer = read_peer(command["peer"])
        self._peers[peer.worker] = peer

    def _remove_peer(self, command: Command) -> None:
        worker = WorkerId(command["gone"])
        self._peers.pop(worker, None)
        self._remote_kv.withdraw_for(worker)
        self._readers.end(f"pull-{worker}")


# The start of a group, shared by the leader and its members.
#
# Order of a start: the leader checks all members, JAX's world is formed at a port that the leader chooses, all take the
# leader's sizes, load weights and warm programs together; then the members execute the leader's commands.

SHARED_GROUPS = ("mesh", "sizes", "scheduling", "transfer")
SHARED = ("load_format", "dtype", "weight_dtype", "kv_dtype", "seed", "role", "transport", "peer_silence_s", "platform")
WARM_S = 600.0  # the longest wait for members that warm longer than the leader


def worker_of(settings: Settings) -> WorkerMesh:
    """Returns the one worker of the mesh that the group runs. Raises ConfigError, MeshError."""
    if settings.weight_dtype == AUTO:
        raise ConfigError("--weight_dtype=auto measures, and processes of a group may measure otherwise: name one")
    roles = roles_of(settings)
    own = [place for place in mesh_of(settings).workers() if plays(place.role, roles)]
    if len(own) != 1:
        raise MeshError(
            f"--mesh={settings.mesh} has {len(own)} workers of --role={settings.role}, and a group is one: write one,"
            " and start a group for each copy of it"
        )
    if own[0].pp > 1 and own[0].schedule is not Schedule.RING:
        stages, shards = own[0].pp, f"tp{own[0].tp}" * (own[0].tp > 1)
        one = f"ring{stages}{shards}" if own[0].role is Role.DECODE else f"tp{len(own[0].device_ids)}"
        raise MeshError(
            f"--mesh={settings.mesh}: the {stages} stages of {own[0].worker} are programs of one process, and a group"
            f" spans several: write {own[0].role.value}:{one}"
        )
    return own[0]


def devices_each(settings: Settings, place: GroupRank) -> int:
    """Returns the number of the worker's devices in each process. Raises MeshError."""
    number = len(worker_of(settings).device_ids)
    if number % place.size:
        raise MeshError(
            f"the {number} devices of --mesh={settings.mesh} for --role={settings.role} do not split evenly over"
            f" --group_size={place.size}: change one of them"
        )
    return number // place.size


def card_of(settings: Settings, place: GroupRank) -> MemberInfo:
    """Returns the description of this process for the others of its group."""
    files = model_files(settings)
    names = [each.name for each in fields(settings) if each.metadata["group"] in SHARED_GROUPS or each.name in SHARED]
    flags = {name: str(getattr(settings, name)) for name in names} | {"tls_cert": "given" * bool(settings.tls_cert)}
    model = files.identity.described(settings.served_model_name or name_of(files.place))
    version, now_s = jdisagg.__version__, time.time()
    return MemberInfo(place.group, place.rank, place.size, version, jax.__version__, model, flags, now_s)


def meeting_of(settings: Settings, place: GroupRank) -> Meeting:
    server, client = kv_contexts(settings)
    wait_s = settings.group_wait_s
    return Meeting(place.coordinator, read_secret(settings), time.monotonic() + wait_s, wait_s, server, client)


@dataclass(frozen=True)
class World:
    """The address, ranks and timeouts with which JAX's world is formed."""

    address: str  # of JAX's coordinator, which is rank 0
    place: GroupRank
    silence_s: float
    wait_s: float

    def form(self) -> None:
        """Initialises JAX's distributed runtime. Raises GroupUnfilled if the others do not join."""
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                self.address,
                self.place.size,
                self.place.rank,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, round(self.wait_s)),
                heartbeat_timeout_seconds=2 * math.ceil(self.silence_s + 2),  # JAX waits for half of it or more
                shutdown_timeout_seconds=5,
                coordinator_bind_address=self.address if is_address(split_address(self.address)[0]) else None,
            )
        except RuntimeError as error:
            why = str(error).splitlines()[0][:300]
            raise GroupUnfilled(f"group {self.place.group!r}: JAX at {self.address}: {why}") from error


def free_port(coordinator: str) -> str:
    """Returns HOST:PORT with a free port on the coordinator's host."""
    host = split_address(coordinator)[0]
    with listener_at(host, 0) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def worker_devices(devices: Sequence[Any], place: GroupRank, each: int) -> list[Any]:
    """Returns the devices of the group's worker, process by process. Raises MeshError if a member has too few."""
    found = list[Any]()
    for rank in range(place.size):
        own = [device for device in devices if device.process_index == rank]
        if len(own) < each:
            raise MeshError(
                f"member {rank} of group {place.group!r} has {len(own)} devices, the mesh needs {each} of each of"
                f" {place.size} processes: change --mesh or --group_size"
            )
        found += own[:each]
    return found
