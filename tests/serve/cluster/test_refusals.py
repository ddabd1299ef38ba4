"""Who does not fit is told of in one line where its leader, or its router, runs: which one, both values, and a remedy.

Each case is a real door with a real stranger before it, or the check that a process makes before it waits for anybody.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jdisagg.cluster.membership import GroupRank
from jdisagg.core.errors import JdisaggError, PeerMismatch
from jdisagg.core.settings import Settings
from jdisagg.policy.group_handshake import MemberInfo
from jdisagg.serve.cluster.control_client import ControlClient
from jdisagg.serve.cluster.control_server import ControlServer
from jdisagg.serve.cluster.group.assembly import join_leader
from jdisagg.serve.cluster.group.member import devices_each, worker_devices
from jdisagg.serve.cluster.group.stream import GroupStream
from jdisagg.serve.cluster.router_process import roles_of
from jdisagg.serve.deploy.servers import check_cluster_ports
from tests.serve.cluster.test_control_link import CALM, KIND, SECRET, RouterNotes, WorkerNotes
from tests.serve.group.meetings import SECRET as GROUP_SECRET
from tests.serve.group.meetings import WAIT_S, Door, card, meeting

DEADLINE_S = 10.0  # for any of them to be told of; they take hundredths
PLACE = GroupRank("p0", 0, 2, "127.0.0.1:1")


def at_the_door(*members: MemberInfo, size: int = 2, secret: bytes = GROUP_SECRET, wait_s: float = WAIT_S) -> str:
    """The line that a group's leader says of the last of these."""
    at = meeting(wait_s)
    door = Door(at, card(size=size))
    with ThreadPoolExecutor() as pool:
        gathered = pool.submit(door.assembly.gather)
        joined = list[GroupStream]()
        with suppress(PeerMismatch):
            for member in members:
                joined.append(join_leader(replace(at, secret=secret), member))
        if not door.said:
            return str(gathered.exception(DEADLINE_S))  # nobody was refused: too few came
        (line,) = door.said
        joined.append(join_leader(at, card(size - 1, size=size)))  # it waits on, and who fits fills it
        gathered.result(DEADLINE_S)
        door.assembly.close()
    for stream in joined:
        stream.frames.close()
    return line


def at_the_router(caplog: pytest.LogCaptureFixture, **other: Any) -> str:
    """The line that a router says of a worker's process of another kind; of another secret, the worker's own."""
    named = type("Named", (WorkerNotes,), {"hello": lambda self: {"named": ["decode-0-1a2b3c"]}})()
    refused: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = ControlServer("127.0.0.1:0", SECRET, KIND, RouterNotes(), CALM)
    server.start()
    secret = other.pop("secret", SECRET)
    client = ControlClient(f"127.0.0.1:{server.port}", secret, replace(KIND, **other), named, CALM, refused=refused.put)
    try:
        client.start()
        why = refused.get(timeout=DEADLINE_S)
    finally:
        client.stop()
        server.stop()
    if secret != SECRET:
        return why  # the router is told nothing that it could check
    (line,) = [each.getMessage() for each in caplog.records if "sent away" in each.getMessage()]
    return line


def said_by(act: Callable[[], object]) -> str:
    with pytest.raises(JdisaggError) as raised:
        act()
    return str(raised.value)


def port_in_use(flag: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if flag == "coordinator":
            return said_by(lambda: Door(replace(meeting(), address=f"127.0.0.1:{port}")))
        given: dict[str, Any] = {"control_port": port} if flag == "control_port" else {"kv_listen": f"127.0.0.1:{port}"}
        settings = Settings(host="127.0.0.1", **given)
        return said_by(lambda: check_cluster_ports(settings, flag == "control_port", flag == "kv_listen"))


@dataclass
class Chip:
    process_index: int


CASES: dict[str, tuple[Callable[[Any], str], tuple[str, ...]]] = {
    "a rank twice": (
        lambda log: at_the_door(card(1, size=3), card(1, size=3), size=3),
        ("member 1 at 127.0.0.1:", "the process at 127.0.0.1:", "give each process its own --group_rank"),
    ),
    "a size that never fills": (
        lambda log: at_the_door(card(1, size=3), size=3, wait_s=1.0),
        ("group 'p0'", "2 of 3 processes", "rank 2", "start them, or raise --group_wait_s"),
    ),
    "another size": (
        lambda log: at_the_door(card(1, size=4)),
        ("member 1 at ", "--group_size=4", "the leader says 2", "start all with the same"),
    ),
    "another version": (
        lambda log: at_the_door(card(1, version="2")),
        ("member 1 at ", "jdisagg 2", "the leader 1", "install the same version"),
    ),
    "another jax": (
        lambda log: at_the_door(card(1, jax="0.11")),
        ("member 1 at ", "jax 0.11", "the leader 0.10", "install the same version"),
    ),
    "another flag": (
        lambda log: at_the_door(card(1, flags={"mesh": "prefill:tp4"})),
        ("member 1 at ", "--mesh=prefill:tp4", "the leader prefill:tp2", "with the same flags"),
    ),
    "another model": (
        lambda log: at_the_door(card(1, model="bbbb")),
        ("member 1 at ", "the model bbbb", "the leader aaaa", "give all the same --model"),
    ),
    "a worker of another version": (
        lambda log: at_the_router(log, version="9.9"),
        ("decode-0-1a2b3c", "'9.9' there", f"{KIND.version!r} here", "start both with the same version"),
    ),
    "a worker of another model": (
        lambda log: at_the_router(log, model="other:beef"),
        ("decode-0-1a2b3c", "'other:beef' there", f"{KIND.model!r} here", "the same version, --model"),
    ),
    "the leader's port in use": (
        lambda log: port_in_use("coordinator"),
        ("--coordinator=127.0.0.1:", "Address already in use", "give each group a port of its own"),
    ),
    "the router's port in use": (
        lambda log: port_in_use("control_port"),
        ("--control_port=", "Address already in use", "give this process another --control_port"),
    ),
    "a worker's port in use": (
        lambda log: port_in_use("kv_listen"),
        ("--kv_listen=", "Address already in use", "give this process another --kv_listen"),
    ),
    "a clock that is off": (
        lambda log: at_the_door(card(1, clock_s=0.0)),
        ("member 1 at ", "its clock says 0 s", "the leader's 1", "set it (NTP)"),
    ),
    "a member of another secret": (
        lambda log: at_the_door(card(1), secret=b"another secret of sixteen bytes"),
        ("the process at 127.0.0.1:", "does not share our secret", "give all the same --secret_file"),
    ),
    "a worker of another secret": (
        lambda log: at_the_router(log, secret=b"another secret of sixteen bytes"),
        ("127.0.0.1:", "does not share our secret", "give all the same --secret_file"),
    ),
    "a mesh that does not split": (
        lambda log: said_by(lambda: devices_each(Settings(mesh="prefill:tp3,decode:tp1", role="prefill",
                                                          router="a:1", weight_dtype="dtype"), PLACE)),
        ("the 3 devices", "--mesh=prefill:tp3", "--group_size=2", "change one of them"),
    ),
    "a member with too few devices": (
        lambda log: said_by(lambda: worker_devices([Chip(0), Chip(0), Chip(1)], PLACE, 2)),
        ("member 1 of group 'p0'", "has 1 devices", "needs 2 of each", "change --mesh or --group_size"),
    ),
    "an unknown role": (
        lambda log: said_by(lambda: roles_of(Settings(role="prefil", router="a:1"))),
        ("--role=prefil", "router, prefill, decode, colocated"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_one_line_with_who_it_is_both_values_and_what_to_change(case: str, caplog):
    line_of, says = CASES[case]
    began_s = time.monotonic()
    line = line_of(caplog)
    assert time.monotonic() < began_s + DEADLINE_S
    assert [each for each in says if each not in line] == [], line
    assert "\n" not in line and len(line) < 400
