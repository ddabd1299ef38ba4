"""The leader's view of its members: commands out to all in one order, their replies in, and proof that they are in
step.

A member that is lost, out of step, or fails at what it was told ends the group: `over` is called once, with one line.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jdisagg.core.dispatch_digest import EVERY, DigestComparison, RunningDigest
from jdisagg.core.errors import JdisaggError
from jdisagg.serve.group.stream import GroupStream, Pulse

LAST_WORD_S = 0.5  # for the others to be told why the group ends

Reply = dict[str, Any]


class Outstanding:
    """Commands that members have yet to reply to or to carry out. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, dict[int, Future[Reply]]] = {}  # by command, by rank
        self._sent_s: dict[int, float] = {}  # commands that some member has not carried out yet

    def sent(self, number: int, replies: dict[int, Future[Reply]] | None) -> None:
        with self._lock:
            if replies is not None:
                self._waiting[number] = replies
            self._sent_s[number] = time.monotonic()

    def replied(self, rank: int, number: int, body: Reply) -> None:
        with self._lock:
            waiting = self._waiting.get(number, {})
            found = waiting.pop(rank, None)
            if not waiting:
                self._waiting.pop(number, None)
        if found is not None:
            found.set_result(body)

    def oldest(self, done: int) -> tuple[int, float]:
        """The first command after number `done`, and how long ago it was sent, in seconds; 0 s where there is none."""
        with self._lock:
            for number in [number for number in self._sent_s if number <= done]:
                del self._sent_s[number]
            first = next(iter(self._sent_s), 0)
            return first, time.monotonic() - self._sent_s[first] if first else 0.0


class InStep:
    """Our digest of what was dispatched, and its comparison with those of members. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digest, self._comparison = RunningDigest(), DigestComparison()

    def note(self, text: str) -> None:
        self._digest.note(text)

    def ours(self, step: int) -> str | None:
        with self._lock:
            return self._comparison.ours(step, self._digest.now)

    def theirs(self, rank: int, step: int, digest: str) -> str | None:
        with self._lock:
            return self._comparison.theirs(rank, step, digest)


class Members:
    """Methods are safe from any thread; commands that dispatch programs all come from one."""

    def __init__(
        self,
        group: str,
        streams: Mapping[int, GroupStream],
        over: Callable[[str], None],
        silence_s: float,
    ) -> None:
        self.group, self.streams = group, dict(streams)
        self._over, self._stall_s = over, math.inf
        self._order = threading.Lock()  # who holds it says the next command
        self._number = 0  # of the last command
        self._outstanding, self._in_step = Outstanding(), InStep()
        self._ended = False
        self._pulse = Pulse([*streams.values()], silence_s, self.end, lambda: self._number, self._stuck)
        self.on_leave: Callable[[], None] = lambda: None  # a member was asked to stop

    def start(self) -> None:
        self._pulse.start()
        for rank, stream in self.streams.items():
            threading.Thread(target=self._listen, args=(rank, stream), name=f"group-{rank}", daemon=True).start()

    def expect_within(self, stall_s: float) -> None:
        """From now on a member that takes longer over one command ends the group; 0: none does."""
        self._stall_s = stall_s or math.inf

    # ------------------------------------------------------------ out

    def command(self, body: dict[str, Any]) -> int:
        """Tells all members; returns the command's number. A stream that breaks ends the group."""
        return self._send(body, None)

    def ask(self, body: dict[str, Any]) -> dict[int, Future[Reply]]:
        """Tells all members; what each replies, by rank. A group that ends leaves futures that never come."""
        return self.ask_numbered(body)[0]

    def ask_numbered(self, body: dict[str, Any]) -> tuple[dict[int, Future[Reply]], int]:
        """As `ask`, and the command's number."""
        replies: dict[int, Future[Reply]] = {rank: Future() for rank in self.streams}
        return replies, self._send(body, dict(replies))

    def _send(self, body: dict[str, Any], replies: dict[int, Future[Reply]] | None) -> int:
        with self._order:
            self._number += 1
            number = self._number
            self._outstanding.sent(number, replies)
            for rank, stream in self.streams.items():
                try:
                    stream.send({"n": number, **body})
                except JdisaggError as error:
                    threading.Thread(target=self.end, args=(f"{self._name(rank)} is lost: {error}",)).start()
        return number

    def note(self, text: str) -> None:
        """Something that every process dispatches at this point of the order."""
        self._in_step.note(text)

    def compare(self, step: int) -> None:
        """Our digest after this step; members send theirs by themselves."""
        if step % EVERY == 0:
            why = self._in_step.ours(step)
            if why is not None:
                self.end(why)

    # ------------------------------------------------------------ in

    def _listen(self, rank: int, stream: GroupStream) -> None:
        try:
            for body in stream.bodies():
                self._take(rank, body)
        except JdisaggError as error:
            self.end(f"{self._name(rank)} is lost: {error}")
        except Exception as error:
            self.end(f"{self._name(rank)} says what cannot be followed: {type(error).__name__}: {error}")

    def _take(self, rank: int, body: Reply) -> None:
        if "failed" in body:
            self.end(f"{self._name(rank)} failed: {str(body['failed'])[:600]}")
        elif "digest" in body:
            why = self._in_step.theirs(rank, int(body["step"]), str(body["digest"]))
            if why is not None:
                self.end(why)
        elif "leave" in body:
            self.on_leave()
        else:
            self._outstanding.replied(rank, int(body["to"]), body)

    def _stuck(self) -> str | None:
        """Why work stands still, where it does: every heartbeat says how far a member is."""
        done = {rank: stream.done for rank, stream in self.streams.items()}
        slowest = min(done.values())
        first, waited_s = self._outstanding.oldest(slowest)
        if waited_s <= self._stall_s:
            return None
        late = next(rank for rank, number in done.items() if number == slowest)
        return f"{self._name(late)} stands still: command {first} has not been carried out for {waited_s:.0f} s"

    # ------------------------------------------------------------ the end

    def end(self, why: str) -> None:
        """Tells the others and `over`, once."""
        if self.tell_end(why):
            self._over(f"group {self.group!r} ends: {why}")

    def tell_end(self, why: str) -> bool:
        """Tells the members that the group ends; blank: as it was asked to. False where they know."""
        if self._ended:
            return False
        self._ended = True
        words = [threading.Thread(target=_say_end, args=(each, why), daemon=True) for each in self.streams.values()]
        for word in words:
            word.start()
        for word in words:
            word.join(LAST_WORD_S)  # a stream to a process that is stopped may be held up for ever
        return True

    def stop(self, wait_s: float = 5.0) -> None:
        """A clean end: the members leave first."""
        self.tell_end("")
        self._pulse.stop()
        deadline_s = time.monotonic() + wait_s
        for stream in self.streams.values():
            while time.monotonic() < deadline_s and not stream.frames.has_ended():
                time.sleep(0.01)
            stream.frames.close()

    @property
    def over(self) -> bool:
        return self._ended

    def _name(self, rank: int) -> str:
        return self.streams[rank].who


def _say_end(stream: GroupStream, why: str) -> None:
    with contextlib.suppress(JdisaggError):
        stream.send({"end": why}, time.monotonic() + LAST_WORD_S)
