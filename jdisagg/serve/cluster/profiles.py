"""Profiles of all processes of a cluster: the router requests them over the control links, files return in chunks.

Both ends wrap the node's callbacks and handle messages about profiles themselves.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.codec import shown
from jdisagg.core.errors import SenselessWord
from jdisagg.serve.cluster.control_client import ClientCallbacks
from jdisagg.serve.cluster.control_server import ServerCallbacks
from jdisagg.serve.cluster.kv_notices import read_peer
from jdisagg.serve.cluster.link import Link
from jdisagg.serve.observability.tracing import LONGEST_S, ROUTER_PROCESS, Busy, Files, Profiles, device_trace

log = logging.getLogger("jdisagg.cluster")

CHUNK_BYTES = 384 << 10
PAUSE_S = 0.005  # between chunks, because messages of requests use the same link
MOST_BYTES = 1 << 30  # per process
LATE_S = 120.0  # the longest wait for files after the profile's end
FAILED = "failed.txt"  # replaces a process's files; has the reason why there are none
NAME = re.compile(r"\w[\w.-]{0,99}")


@dataclass(slots=True)
class Answer:
    """The profile files of one process, as their chunks arrive."""

    process: str
    files: dict[str, bytearray] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    why: str = ""  # the reason why there are no files

    def fail(self, why: str) -> None:
        if not self.over.is_set():
            self.why = why
            self.over.set()

    def note(self, body: dict[str, Any]) -> None:
        """Adds a chunk of a file, or notes the end. Raises SenselessWord."""
        if "end" in body:
            self.why = str(body["end"])[:1000]
            self.over.set()
            return
        name, data = body.get("file"), body.get("data")
        if not (isinstance(name, str) and NAME.fullmatch(name) and isinstance(data, str)):
            raise SenselessWord(f"a part of a profile that is none: {shown(body)}")
        try:
            chunk = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise SenselessWord(f"a part of a profile that cannot be read: {error}") from error
        if sum(map(len, self.files.values())) + len(chunk) > MOST_BYTES:
            raise SenselessWord(f"a profile of over {MOST_BYTES} bytes, the limit here")
        self.files.setdefault(name, bytearray()).extend(chunk)

    def files_by(self, end_s: float) -> Files:
        """Waits until `end_s` for all files and returns them; on failure a single file with the reason."""
        if not self.over.wait(max(0.0, end_s - time.monotonic())):
            self.fail(f"nothing came within {LATE_S:g} s")
        return {FAILED: self.why.encode()} if self.why else {name: bytes(data) for name, data in self.files.items()}


class RouterProfiles:
    """The router's side: a `ServerCallbacks` that wraps the node's. `take` is safe from any thread."""

    def __init__(self, node: ServerCallbacks, own: Callable[[float], Files] = device_trace) -> None:
        self._node, self._own = node, own
        self._processes: dict[Link, str] = {}
        self._joined: set[Link] = set()
        self._lock, self._one = threading.Lock(), threading.Lock()
        self._number, self._pending = 0, dict[Link, Answer]()

    def take(self, seconds: float) -> Profiles:
        """Takes profiles of this process and all others during the same `seconds`. Raises Busy."""
        if not self._one.acquire(blocking=False):
            raise Busy("another profile is being taken; there can be one at a time")
        try:
            pending = self._request(seconds)
            found = {ROUTER_PROCESS: self._own(seconds)}
            end_s = time.monotonic() + LATE_S
            return found | {answer.process: answer.files_by(end_s) for answer in pending}
        finally:
            with self._lock:
                self._pending = {}
            self._one.release()

    def _request(self, seconds: float) -> list[Answer]:
        with self._lock:
            self._number += 1
            self._pending = {link: Answer(self._processes[link]) for link in self._joined}
            pending, number = dict(self._pending), self._number
        for link in pending:
            link.send({"profile": {"number": number, "seconds": seconds}})
        return [*pending.values()]

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        answer = self._node.admit(link, hello)
        with self._lock:
            self._processes[link] = "+".join(read_peer(record).worker for record in hello["workers"])
        return answer

    def on_joined(self, link: Link) -> None:
        with self._lock:
            self._joined.add(link)
        self._node.on_joined(link)

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        if "profile" not in body:
            self._node.on_message(link, body)
            return
        profile = body["profile"]
        if not isinstance(profile, dict):
            raise SenselessWord(f"a profile that is none: {shown(profile)}")
        with self._lock:
            answer = self._pending.get(link) if profile.get("number") == self._number else None
        if answer is not None:  # otherwise it is too late
            answer.note(profile)

    def on_lost(self, link: Link, why: str) -> None:
        with self._lock:
            self._processes.pop(link, None)
            self._joined.discard(link)
            answer = self._pending.pop(link, None)
        if answer is not None:
            answer.fail(f"the process is gone: {why}")
        self._node.on_lost(link, why)


class WorkerProfiles:
    """A worker process's side: a `ClientCallbacks` that wraps the node's."""

    def __init__(self, node: ClientCallbacks, own: Callable[[float], Files] = device_trace) -> None:
        self._node, self._own = node, own
        self._link: Link | None = None

    def hello(self) -> dict[str, Any]:
        return self._node.hello()

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        self._link = link
        self._node.on_joined(link, welcome)

    def on_lost(self, why: str) -> None:
        self._link = None
        self._node.on_lost(why)

    def on_message(self, body: dict[str, Any]) -> None:
        if "profile" not in body:
            self._node.on_message(body)
            return
        profile, link = body["profile"], self._link
        number, seconds = (profile.get("number"), profile.get("seconds")) if isinstance(profile, dict) else (None, None)
        if type(number) is not int or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_S:
            raise SenselessWord(f"a profile that cannot be taken: {shown(profile)}")
        if link is not None:
            threading.Thread(target=self._answer, args=(link, number, seconds), name="profile", daemon=True).start()

    def _answer(self, link: Link, number: int, seconds: float) -> None:
        try:
            files = self._own(seconds)
        except Exception as error:  # any failure of the profiler is reported to the router
            log.exception("no profile was taken")
            link.send({"profile": {"number": number, "end": f"{type(error).__name__}: {error}"}})
            return
        for name, data in _chunks(files):
            link.send({"profile": {"number": number, "file": name, "data": base64.b64encode(data).decode()}})
            time.sleep(PAUSE_S)
        link.send({"profile": {"number": number, "end": ""}})


def _chunks(files: Files) -> Iterator[tuple[str, bytes]]:
    for name, content in files.items():
        for start in range(0, len(content), CHUNK_BYTES):
            yield name, content[start : start + CHUNK_BYTES]
