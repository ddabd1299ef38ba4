"""A member: it carries out the leader's commands in their order, on its own devices of the worker's mesh.

One thread follows the stream and dispatches; others wait for what was dispatched, and pull KV. It decides nothing. Any
failure is told to the leader, which ends the group.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from jdisagg.core.codec import decode_as
from jdisagg.core.dispatch_digest import EVERY, RunningDigest
from jdisagg.core.errors import JdisaggError, TransportError
from jdisagg.core.request import Attempt, WorkerId
from jdisagg.core.steps import KVTransfer, StepPlan
from jdisagg.engine.executor import PendingStep
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.serve.cluster.remote_kv import PeerRecord, RemoteKV, RemoteShipment, read_peer, read_stage
from jdisagg.serve.driver.readers import Readers
from jdisagg.serve.group.stream import Commands, GroupStream

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
