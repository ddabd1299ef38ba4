"""The worker's side of a change of its role: it says when it is empty, asks its driver for another machine, and joins.

While its machine is being changed it holds nothing and takes nothing. A router that took over meanwhile does not know:
it is refused, and told what the worker is as soon as it is that.
"""

from __future__ import annotations

from jdisagg.core.events import Reshape
from jdisagg.core.messages import Joined, Leave, Left, Message, Refused, Reserve, StartPrefill
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.role_change import Signal, Standing, next_standing


class Leaving:
    """Where one worker stands, by the table of `role_change.py`."""

    def __init__(self) -> None:
        self.standing = Standing.SERVING
        self._asked = Leave(0)

    def asked(self, out: Outbox, message: Leave, config: WorkerConfig) -> None:
        """Asked again, it says again what it has said, lest that was lost. `config`: what the worker is."""
        if message.life != self._asked.life:
            if self.standing is not Standing.CHANGING:
                self.standing, self._asked = Standing.LEAVING, message
        elif self.standing is Standing.DRAINED:
            out.tell_router(Left(message.life))
        elif self.standing is Standing.SERVING:
            out.tell_router(Joined(message.life, config))

    def look(self, out: Outbox, *, idle: bool) -> None:
        """After every event: whether it is empty now."""
        if self.standing is not Standing.LEAVING or not idle:
            return
        self._take(Signal.EMPTY)
        out.tell_router(Left(self._asked.life))
        if self._asked.config is not None:
            self._take(Signal.CHANGE)
            out.put(Reshape(self._asked.config))

    def reshaped(self, out: Outbox, config: WorkerConfig, why: str) -> None:
        self._take(Signal.JOIN)
        out.tell_router(Joined(self._asked.life, config, why))

    def refuses(self, out: Outbox, message: Message) -> bool:
        """Whether the message asks for something of a worker that is being changed."""
        if self.standing is not Standing.CHANGING:
            return False
        detail = "the worker's role is being changed"
        if isinstance(message, Reserve):
            out.tell_router(Refused(message.attempt, detail))
        elif isinstance(message, StartPrefill):
            out.abort(message.attempt, detail)
        return isinstance(message, Reserve | StartPrefill)

    @property
    def lends(self) -> bool:
        """Whether its pages can be read now."""
        return self.standing is not Standing.CHANGING

    def router_lost(self) -> None:
        """The next router asks again, if it wants anything. A change that is under way ends."""
        if self.standing is not Standing.CHANGING:
            self.standing = Standing.SERVING

    def _take(self, signal: Signal) -> None:
        self.standing = next_standing(self.standing, signal)
