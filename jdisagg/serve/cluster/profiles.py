"""A profile of every process of a cluster: the router asks by the control links, and the files come back in parts.

Both ends stand around the node's callbacks and keep what is said of profiles to themselves.
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

PART_BYTES = 384 << 10
PAUSE_S = 0.005  # between parts: messages of requests go by the same link
MOST_BYTES = 1 << 30  # of a process
LATE_S = 120.0  # longest wait for the files once the time is over
FAILED = "failed.txt"  # instead of a process's files: why there are none
NAME = re.compile(r"\w[\w.-]{0,99}")


@dataclass(slots=True)
class Answer:
    """What one process was asked for, as it comes."""

    process: str
    files: dict[str, bytearray] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    why: str = ""  # there is nothing

    def fail(self, why: str) -> None:
        if not self.over.is_set():
            self.why = why
            self.over.set()

    def note(self, said: dict[str, Any]) -> None:
        """A part of a file, or the end. Raises SenselessWord."""
        if "end" in said:
            self.why = str(said["end"])[:1000]
            self.over.set()
            return
        name, data = said.get("file"), said.get("data")
        if not (isinstance(name, str) and NAME.fullmatch(name) and isinstance(data, str)):
            raise SenselessWord(f"a part of a profile that is none: {shown(said)}")
        try:
            part = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise SenselessWord(f"a part of a profile that cannot be read: {error}") from error
        if sum(map(len, self.files.values())) + len(part) > MOST_BYTES:
            raise SenselessWord(f"a profile of over {MOST_BYTES} bytes, the limit here")
        self.files.setdefault(name, bytearray()).extend(part)

    def told(self, end_s: float) -> Files:
        """The files, once all are there; why there are none where they do not come until `end_s`."""
        if not self.over.wait(max(0.0, end_s - time.monotonic())):
            self.fail(f"nothing came within {LATE_S:g} s")
        return {FAILED: self.why.encode()} if self.why else {name: bytes(data) for name, data in self.files.items()}


class RouterProfiles:
    """The router's end: a `ServerCallbacks` around the node's. `take` is called from any thread."""

    def __init__(self, node: ServerCallbacks, own: Callable[[float], Files] = device_trace) -> None:
        self._node, self._own = node, own
        self._processes: dict[Link, str] = {}
        self._joined: set[Link] = set()
        self._lock, self._one = threading.Lock(), threading.Lock()
        self._number, self._asked = 0, dict[Link, Answer]()

    def take(self, seconds: float) -> Profiles:
        """Of this process and all others for the same `seconds`. Raises Busy."""
        if not self._one.acquire(blocking=False):
            raise Busy("another profile is being taken; there can be one at a time")
        try:
            asked = self._ask(seconds)
            found = {ROUTER_PROCESS: self._own(seconds)}
            end_s = time.monotonic() + LATE_S
            return found | {answer.process: answer.told(end_s) for answer in asked}
        finally:
            with self._lock:
                self._asked = {}
            self._one.release()

    def _ask(self, seconds: float) -> list[Answer]:
        with self._lock:
            self._number += 1
            self._asked = {link: Answer(self._processes[link]) for link in self._joined}
            asked, number = dict(self._asked), self._number
        for link in asked:
            link.send({"profile": {"number": number, "seconds": seconds}})
        return [*asked.values()]

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
        said = body["profile"]
        if not isinstance(said, dict):
            raise SenselessWord(f"a profile that is none: {shown(said)}")
        with self._lock:
            answer = self._asked.get(link) if said.get("number") == self._number else None
        if answer is not None:  # else it is too late
            answer.note(said)

    def on_lost(self, link: Link, why: str) -> None:
        with self._lock:
            self._processes.pop(link, None)
            self._joined.discard(link)
            answer = self._asked.pop(link, None)
        if answer is not None:
            answer.fail(f"the process is gone: {why}")
        self._node.on_lost(link, why)


class WorkerProfiles:
    """A worker process's end: a `ClientCallbacks` around the node's."""

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
        asked, link = body["profile"], self._link
        number, seconds = (asked.get("number"), asked.get("seconds")) if isinstance(asked, dict) else (None, None)
        if type(number) is not int or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_S:
            raise SenselessWord(f"a profile that cannot be taken: {shown(asked)}")
        if link is not None:
            threading.Thread(target=self._answer, args=(link, number, seconds), name="profile", daemon=True).start()

    def _answer(self, link: Link, number: int, seconds: float) -> None:
        try:
            files = self._own(seconds)
        except Exception as error:  # whatever the profiler cannot: who asked is told
            log.exception("no profile was taken")
            link.send({"profile": {"number": number, "end": f"{type(error).__name__}: {error}"}})
            return
        for name, data in _parts(files):
            link.send({"profile": {"number": number, "file": name, "data": base64.b64encode(data).decode()}})
            time.sleep(PAUSE_S)
        link.send({"profile": {"number": number, "end": ""}})


def _parts(files: Files) -> Iterator[tuple[str, bytes]]:
    for name, content in files.items():
        for start in range(0, len(content), PART_BYTES):
            yield name, content[start : start + PART_BYTES]
