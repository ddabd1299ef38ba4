"""One end of the ordered stream between a group's leader and a member: signed bodies, and heartbeats both ways.

A record is signed in its session and direction and comes once and in order (`core/authenticated_channel.py`). An end
that hears nothing for `silence_s` gives the other up, whatever TCP believes; so does one whose peer hung up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jdisagg.core.authenticated_channel import AuthenticatedChannel
from jdisagg.core.errors import JdisaggError, TransferTimeout
from jdisagg.serve.cluster.periodic import PeriodicTask
from jdisagg.serve.group.frames import FrameSocket

BEAT = "beat"


class GroupStream:
    """`send` is safe from any thread, `bodies` is one thread's. `who` is the other end, for people."""

    def __init__(self, frames: FrameSocket, secret: bytes, session: str, sides: tuple[str, str], who: str) -> None:
        """sides: what this end is in the session, and what the other is."""
        self.frames, self.who = frames, who
        self._outgoing, self._incoming = (AuthenticatedChannel(secret, session, side) for side in sides)
        self._turn = threading.Lock()  # records go out in the order of their numbers
        self.heard_s = time.monotonic()
        self.done = 0  # commands that the other end has carried out, by its last heartbeat

    def send(self, body: dict[str, Any], deadline_s: float | None = None) -> None:
        """Returns once the kernel has it. Raises PeerDead, TransferTimeout, BadTicket."""
        with self._turn:
            self.frames.send(self._outgoing.sign(body), deadline_s)

    def receive(self, deadline_s: float | None = None) -> dict[str, Any]:
        """The next body, heartbeats among them. Raises PeerDead, TransferTimeout, BadTicket."""
        body = self._incoming.verify(self.frames.receive(deadline_s))
        self.heard_s = time.monotonic()
        if BEAT in body and isinstance(body[BEAT], int):
            self.done = body[BEAT]
        return body

    def bodies(self) -> Iterator[dict[str, Any]]:
        """What is said, heartbeats apart, until the stream breaks: then as `receive`."""
        while True:
            body = self.receive()
            if BEAT not in body:
                yield body

    def silent_s(self) -> float:
        return time.monotonic() - self.heard_s


class Commands:
    """The leader's commands, read ahead: what is heard of it counts while this process is busy with an earlier one.

    A leader that is lost, or says why the group ends, is told to `over` at once, whatever this process waits for.
    """

    def __init__(self, stream: GroupStream, over: Callable[[str], None]) -> None:
        self._stream, self._over = stream, over
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="group-commands", daemon=True).start()

    def next(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Raises TransferTimeout."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TransferTimeout(f"{self._stream.who} has said nothing for {timeout_s:g} s") from error

    def _read(self) -> None:
        try:
            for body in self._stream.bodies():
                self._queue.put(body)
                if "end" in body or "refused" in body:
                    if body.get("end"):
                        self._over(str(body["end"])[:1000])
                    return
        except JdisaggError as error:
            self._over(f"{self._stream.who} is lost: {error}")


class Pulse:
    """Heartbeats on these streams, and the watch over what is heard: two threads, since a send may be held up."""

    def __init__(
        self,
        streams: list[GroupStream],
        silence_s: float,
        over: Callable[[str], None],
        done: Callable[[], int] = lambda: 0,
        stuck: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`over` is called with why the group ends; `done` says how many commands were carried out here, `stuck`
        why work stands still."""
        self._streams, self._silence_s, self._over, self._done, self._stuck = streams, silence_s, over, done, stuck
        self._tasks = [PeriodicTask(silence_s / 5, self._beat), PeriodicTask(silence_s / 10, self._watch)]

    def start(self) -> None:
        for each in self._streams:
            each.heard_s = time.monotonic()
        for task in self._tasks:
            task.start()

    def stop(self) -> None:
        for task in self._tasks:
            task.stop()

    def _beat(self) -> None:
        for each in self._streams:
            try:
                each.send({BEAT: self._done()}, time.monotonic() + self._silence_s)
            except JdisaggError as error:
                self._over(f"{each.who} is lost: {error}")

    def _watch(self) -> None:
        for each in self._streams:
            if each.silent_s() > self._silence_s:
                self._over(f"{each.who} is lost: nothing heard for {each.silent_s():.1f} s")
        why = self._stuck()
        if why is not None:
            self._over(why)
