"""One end of a control link: a queue of bodies out, sealed records in, and a heart that beats while nothing is said.

A link is one gRPC stream. It is heard of at least once a `beat_s`; an end that hears nothing for `silence_s` hangs up,
so that a process that is stopped, cut off or dead is missed within that time, whatever TCP believes.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jdisagg.core.errors import BadTicket
from jdisagg.core.wire import Seal

log = logging.getLogger("jdisagg.cluster")

METHOD = "/jdisagg.Control/Join"
PROTOCOL = 1
NONCE_BYTES = 16
HANDSHAKE_S = 10.0  # to prove oneself and to be answered: whoever takes longer is cut off
BEAT: dict[str, Any] = {"beat": 1}


@dataclass(frozen=True, slots=True)
class Pulse:
    """How often an end is heard of, and how long it is missed before the link ends. Seconds."""

    beat_s: float = 1.0
    silence_s: float = 5.0


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


class Link:
    """What both ends share. `send` and `hang_up` are safe from any thread; `records` is read by gRPC's."""

    def __init__(
        self, seal_out: Seal, seal_in: Seal, pulse: Pulse, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seal_out, self._seal_in, self._pulse, self._clock = seal_out, seal_in, pulse, clock
        self._out: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._heard_s = clock()
        self.why_over = ""

    def send(self, body: dict[str, Any]) -> None:
        self._out.put(body)

    def hang_up(self, why: str) -> None:
        """Ends the link once what was sent before is out. The first reason stays."""
        self.why_over = self.why_over or why
        self._out.put(None)

    def records(self) -> Iterator[bytes]:
        """Everything sent, sealed, and beats in between; ends after `hang_up`, or when the peer was silent too long."""
        while not self._silent():
            try:
                body = self._out.get(timeout=self._pulse.beat_s)
            except queue.Empty:
                body = BEAT
            if body is None:
                return
            try:
                yield self._seal_out.close(body)
            except BadTicket as error:  # its request will miss it and end; the link serves all the others
                log.error("not sent: %s", error)

    def _silent(self) -> bool:
        silent_s = self._clock() - self._heard_s
        if silent_s > self._pulse.silence_s:
            self.why_over = self.why_over or f"nothing heard for {silent_s:.1f} s"
        return silent_s > self._pulse.silence_s

    def read(self, record: bytes) -> dict[str, Any] | None:
        """The body of a record; None for a beat. Raises BadTicket."""
        body = self._seal_in.open(record)
        self._heard_s = self._clock()
        return None if body == BEAT else body
