"""A member: it carries out the leader's commands in their order, on its own devices of the worker's mesh.

One thread follows the stream and dispatches; others wait for what was dispatched, and pull KV. It decides nothing. Any
failure is told to the leader, which ends the group.
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
from jdisagg.cluster.membership import GroupPlace
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
    """The leader said so; the text is why, blank where the group was asked to."""


class Pulled:
    """What was pulled and is in no page yet, by the number of the command; dropped meanwhile, it is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landed: dict[int, RemoteShipment | None] = {}

    def expect(self, number: int) -> None:
        with self._lock:
            self._landed[number] = None

    def came(self, number: int, shipment: RemoteShipment) -> None:
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
    """`run` returns when the group ends, with why; blank where it ends as it was asked to."""

    def __init__(
        self, stream: GroupStream, commands: Commands, machine: MeshExecutor, remote_kv: RemoteKV, digest: RunningDigest
    ) -> None:
        self._stream, self._commands, self._machine = stream, commands, machine
        self._remote_kv, self._digest = remote_kv, digest
        self._peers: dict[WorkerId, PeerRecord] = {}
        self._pulled = Pulled()
        self._readers = Readers()
        self._steps = 0
        self.done = 0  # number of the last command that was carried out
        self._orders: dict[str, Callable[[Command], None]] = {
            "run": self._run,
            "gates": lambda said: machine.open_gates(decode_as(Attempt, said["gates"])),
            "offer": self._offer,
            "pull": self._pull,
            "check": self._check,
            "insert": self._insert,
            "drop": self._drop,
            "time": self._time,
            "peer": self._meet,
            "gone": self._forget,
            "withdraw": lambda said: remote_kv.withdraw(decode_as(Attempt, said["withdraw"])),
            "withdraw_all": lambda said: remote_kv.withdraw_all(),
        }

    def run(self) -> str:
        """Follows the leader to the end."""
        try:
            while True:
                self._carry_out(self._commands.next())
        except GroupEnded as end:
            return str(end)
        except Exception as error:
            log.exception("a command failed")
            self._tell_failure(error)
            return f"{type(error).__name__}: {str(error)[:400]}"

    def leave(self) -> None:
        """This process was asked to stop: the leader drains the group."""
        self._stream.send({"leave": True})

    def close(self) -> None:
        self._remote_kv.close()

    def _carry_out(self, said: Command) -> None:
        if "end" in said:
            raise GroupEnded(said["end"])
        order = next((each for each in self._orders if each in said), None)
        assert order is not None, f"{list(said)} is no command"
        self._orders[order](said)
        self.done = max(self.done, said["n"])

    def _tell_failure(self, error: Exception) -> None:
        try:
            self._stream.send({"failed": f"{type(error).__name__}: {str(error)[:400]}"})
        except JdisaggError:
            log.info("the leader is gone before it heard")

    # ------------------------------------------------------------ steps

    def _run(self, said: Command) -> None:
        """Between two layer groups of a step that ships, the leader's commands are followed until it goes on."""
        plan = decode_as(StepPlan, said["run"])
        pending = self._machine.run(plan, self._follow_until if said["ships"] else None)
        self._steps += 1
        self._digest.note(json.dumps(said["run"]))
        if self._steps % EVERY == 0:
            self._stream.send({"digest": self._digest.now, "step": self._steps})
        self._readers.read(plan.lane, lambda: self._read(pending))

    def _follow_until(self, layers: int) -> None:
        while "go" not in (said := self._commands.next()):
            self._carry_out(said)
        assert said["go"] == layers, f"the leader goes on at layer {said['go']}, this process at {layers}"
        self.done = said["n"]

    def _read(self, pending: PendingStep) -> None:
        try:
            pending.read()
        except Exception as error:
            self._tell_failure(error)

    # ------------------------------------------------------------ KV

    def _offer(self, said: Command) -> None:
        transfer = decode_as(KVTransfer, said["offer"])
        self._machine.error_monitor.follow(said["raw"])
        try:
            peer = self._peers[transfer.destination]
            answer: dict[str, Any] = {"pieces": self._remote_kv.offers(self._machine, transfer, peer)[1]}
        except (KeyError, TransportError) as error:
            answer = {"why": f"{type(error).__name__}: {error}"}
        self._stream.send({"to": said["n"], **answer})

    def _pull(self, said: Command) -> None:
        """Parts of one source are pulled one after the other, as the leader does."""
        self._pulled.expect(said["n"])
        self._readers.read(f"pull-{said['from']}", lambda: self._pull_now(said))

    def _pull_now(self, said: Command) -> None:
        try:
            transfer = decode_as(KVTransfer, said["pull"]["transfer"])
            peer = self._peers[WorkerId(said["from"])]
            shipment = self._remote_kv.pull(self._machine, transfer, said["pull"], peer)
            came = shipment.came
            self._pulled.came(said["n"], shipment)
        except Exception:  # the part counts as never sent
            log.exception("a part was lost")
            came = False
        try:
            self._stream.send({"to": said["n"], "came": came})
        except JdisaggError:
            log.info("the leader is gone")

    def _check(self, said: Command) -> None:
        number = said["n"]
        verdict = self._machine.check(self._pulled[said["check"]])

        def tell() -> None:
            try:
                self._stream.send({"to": number, "intact": verdict is None or verdict()})
            except Exception as error:
                self._tell_failure(error)

        self._readers.read("check", tell)

    def _time(self, said: Command) -> None:
        self._machine.time_packs([read_stage(each) for each in said["time"]])

    def _insert(self, said: Command) -> None:
        self._machine.insert(self._pulled[said["insert"]])
        self._pulled.drop(said["insert"])

    def _drop(self, said: Command) -> None:
        self._pulled.drop(said["drop"])

    def _meet(self, said: Command) -> None:
        peer = read_peer(said["peer"])
        self._peers[peer.worker] = peer

    def _forget(self, said: Command) -> None:
        worker = WorkerId(said["gone"])
        self._peers.pop(worker, None)
        self._remote_kv.withdraw_for(worker)
        self._readers.end(f"pull-{worker}")


# From a place in a group to a running leader or member: the meeting, the JAX world, the worker's build.
#
# Order of a start: the roll is called, JAX's world formed at a port of the leader's choice, the leader's sizes
# taken over by all, weights loaded, programs warmed together; then the members follow the leader's commands.

SHARED_GROUPS = ("mesh", "sizes", "scheduling", "transfer")
SHARED = ("load_format", "dtype", "weight_dtype", "kv_dtype", "seed", "role", "transport", "peer_silence_s", "platform")
WARM_S = 600.0  # behind the leader, until every member is warm


def worker_of(settings: Settings) -> WorkerMesh:
    """The one worker of the mesh that the group is. Raises ConfigError."""
    if settings.weight_dtype == AUTO:
        raise ConfigError("--weight_dtype=auto measures, and processes of a group may measure otherwise: name one")
    roles = roles_of(settings)
    mine = [place for place in mesh_of(settings).workers() if plays(place.role, roles)]
    if len(mine) != 1:
        raise MeshError(
            f"--mesh={settings.mesh} has {len(mine)} workers of --role={settings.role}, and a group is one: write one,"
            " and start a group for each copy of it"
        )
    if mine[0].pp > 1 and mine[0].schedule is not Schedule.RING:
        stages, shards = mine[0].pp, f"tp{mine[0].tp}" * (mine[0].tp > 1)
        one = f"ring{stages}{shards}" if mine[0].role is Role.DECODE else f"tp{len(mine[0].device_ids)}"
        raise MeshError(
            f"--mesh={settings.mesh}: the {stages} stages of {mine[0].worker} are programs of one process, and a group"
            f" spans several: write {mine[0].role.value}:{one}"
        )
    return mine[0]


def devices_each(settings: Settings, place: GroupPlace) -> int:
    """How many of the worker's devices each process holds. Raises MeshError."""
    number = len(worker_of(settings).device_ids)
    if number % place.size:
        raise MeshError(
            f"the {number} devices of --mesh={settings.mesh} for --role={settings.role} do not split evenly over"
            f" --group_size={place.size}: change one of them"
        )
    return number // place.size


def card_of(settings: Settings, place: GroupPlace) -> MemberInfo:
    """What this process says of itself to the others of its group."""
    files = model_files(settings)
    names = [each.name for each in fields(settings) if each.metadata["group"] in SHARED_GROUPS or each.name in SHARED]
    flags = {name: str(getattr(settings, name)) for name in names} | {"tls_cert": "given" * bool(settings.tls_cert)}
    model = files.identity.described(settings.served_model_name or name_of(files.place))
    version, now_s = jdisagg.__version__, time.time()
    return MemberInfo(place.group, place.rank, place.size, version, jax.__version__, model, flags, now_s)


def meeting_of(settings: Settings, place: GroupPlace) -> Meeting:
    server, client = kv_contexts(settings)
    wait_s = settings.group_wait_s
    return Meeting(place.coordinator, read_secret(settings), time.monotonic() + wait_s, wait_s, server, client)


@dataclass(frozen=True)
class World:
    """How JAX's world is formed."""

    address: str  # of its coordinator, rank 0
    place: GroupPlace
    silence_s: float
    wait_s: float

    def form(self) -> None:
        """Raises GroupUnfilled where the others do not come."""
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
    """HOST:PORT beside the coordinator's that nobody has just now."""
    host = split_address(coordinator)[0]
    with listener_at(host, 0) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def worker_devices(devices: Sequence[Any], place: GroupPlace, each: int) -> list[Any]:
    """Those of the group's worker, process by process. Raises MeshError naming the member that has too few."""
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
