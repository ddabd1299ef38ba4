"""The process of a pool's Mooncake client: runs the requests of the pipe on the frames in shared memory."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

LOCAL_BYTES = 16 << 20  # memory of the client itself
CONNECT_S = 2.0


def serve(pipe_fd: int, memory_fd: int, staging_bytes: int, how: Mapping[str, str]) -> None:
    """Serves requests until the other end of the pipe closes."""
    pipe = Connection(pipe_fd)
    memory = np.frombuffer(mmap.mmap(memory_fd, staging_bytes), np.uint8)
    store: Any = import_module("mooncake.store").MooncakeDistributedStore()
    while True:
        try:
            what, keys, frame_bytes = pipe.recv()
        except EOFError:
            return
        pipe.send(_setup(store, memory, how) if what == "setup" else _run(store, memory, what, keys, frame_bytes))


def _setup(store: Any, memory: np.ndarray, how: Mapping[str, str]) -> list[int] | str:
    """Starts the client. Returns no codes, or a text that says why it cannot start."""
    host, _, port = how["master"].rpartition(":")
    try:
        # otherwise it would try to reach the master for 90 s
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return f"no master at {how['master']}: {error}"
    code = store.setup(
        {
            "local_hostname": how["local_hostname"] or _local_address(how["master"]),
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,  # the memory of the pool is that of its nodes
            "local_buffer_size": LOCAL_BYTES,
            "protocol": how["protocol"],
            "rdma_devices": how["device_name"],
            "master_server_addr": how["master"],
        }
    )
    code = code or store.register_buffer(memory.ctypes.data, memory.nbytes)
    return f"Mooncake's client does not start: {code}" if code else []


def _run(store: Any, memory: np.ndarray, what: str, keys: list[str], frame_bytes: int) -> list[int]:
    addresses = [memory.ctypes.data + at * frame_bytes for at in range(len(keys))]
    sizes = [frame_bytes] * len(keys)
    match what:
        case "put":
            return list(store.batch_put_from(keys, addresses, sizes))
        case "get":
            return list(store.batch_get_into(keys, addresses, sizes))
        case _:
            return list(store.batch_remove(keys, True))  # forced, since its last reader may still hold a lease on it


def _local_address(master: str) -> str:
    """Returns this host's address in the network of the master."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))
        return way.getsockname()[0]
