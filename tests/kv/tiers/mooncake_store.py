"""A real Mooncake master and a node of its pool, which tests start, stop, freeze and start again.

What they open listens on every interface and asks nobody who he is, so they and their clients stand in a network of
their own.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from jdisagg.kv.tiers.stores import PageStore

START_S = 60.0
PORT = 50051
RAW = """
from multiprocessing.connection import Connection
from mooncake.store import MooncakeDistributedStore
pipe, store = Connection({fd}), MooncakeDistributedStore()
assert store.setup(dict(local_hostname="127.0.0.1", metadata_server="P2PHANDSHAKE", global_segment_size=0,
    local_buffer_size=64 << 20, protocol="tcp", rdma_devices="", master_server_addr="127.0.0.1:{port}")) == 0
while True:
    name, arguments = pipe.recv()
    pipe.send(getattr(store, name)(*arguments))
"""


def why_not() -> str:
    """Why none can be started here; empty where one can."""
    if find_spec("mooncake") is None:
        return "no package mooncake-transfer-engine-non-cuda"
    tried = subprocess.run([*_ALONE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return f"no network of its own: {tried.stderr.strip()}" if tried.returncode else ""


_ALONE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--net")


class Mooncake:
    """`enter` starts a command in its network."""

    url = f"mooncake://127.0.0.1:{PORT}"

    def __init__(self, memory: str = "64 MB", lease_ms: int = 500) -> None:
        """lease_ms: for so long a page that was read is not evicted."""
        self._memory, self._lease_ms = memory, lease_ms
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._raw: Connection | None = None
        network = subprocess.Popen([*_ALONE, "sh", "-c", "ip link set lo up && echo up && exec sleep 3600"],
                                   stdout=subprocess.PIPE)  # fmt: skip
        assert network.stdout is not None and network.stdout.readline() == b"up\n"
        network.stdout.close()
        self._network = network
        user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        self.enter: Sequence[str] = ("nsenter", f"--target={network.pid}", "--net", *user)
        self.start()

    def start(self) -> None:
        """Whatever of it does not run."""
        leases = f"--default_kv_lease_ttl={self._lease_ms}", "--client_ttl=2"
        self._run("master", f"--rpc_port={PORT}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", *leases)
        master = f"--master_server_address=127.0.0.1:{PORT}"
        size = f"--global_segment_size={self._memory}"
        self._run("client", "--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", master, size)
        self._wait_until_it_takes()

    def _run(self, name: str, *flags: str) -> None:
        if name not in self._running:
            program = Path(str(importlib.import_module("mooncake").__file__)).parent / f"mooncake_{name}"
            command = [*self.enter, str(program), *flags]
            self._running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _wait_until_it_takes(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            try:
                if self.raw("put", "ready", b"?") == 0 and self.raw("remove", "ready", True) == 0:
                    return
            except (EOFError, OSError):
                self._raw = None
            time.sleep(0.1)
        raise AssertionError(f"no store at {self.url} after {START_S} s")

    def raw(self, name: str, *arguments: Any) -> Any:
        """A call of Mooncake's own client."""
        if self._raw is None:
            ours, theirs = socket.socketpair()
            code = RAW.format(fd=theirs.fileno(), port=PORT)
            command = [*self.enter, sys.executable, "-c", code]
            self._running["raw"] = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL,
                                                    stderr=subprocess.DEVNULL)  # fmt: skip
            theirs.close()
            self._raw = Connection(ours.detach())
        self._raw.send((name, arguments))
        return self._raw.recv()

    def open(self, fingerprint: str, timeout_s: float = 20.0) -> PageStore:
        mooncake: Any = importlib.import_module("jdisagg.kv.tiers.pool.mooncake")
        return mooncake.MooncakePool(f"127.0.0.1:{PORT}", fingerprint, timeout_s=timeout_s, enter=self.enter)

    def kill(self, name: str = "master") -> None:
        stopped = self._running.pop(name)
        stopped.kill()
        stopped.wait(30)

    def freeze(self) -> None:
        """It takes connections, by its kernel, and answers nothing."""
        os.kill(self._running["master"].pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._running["master"].pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.kill(name)
        self._network.kill()
        self._network.wait(30)
