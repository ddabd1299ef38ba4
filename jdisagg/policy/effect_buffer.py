"""The effects of one event, in the order in which the driver applies them."""

from __future__ import annotations

from jdisagg.core.events import ROUTER, Effect, Send, SetTimer
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Drawn, Ended, Message, Progress, TokenDelta
from jdisagg.core.request import Attempt, FinishReason, SamplingParams, WorkerId
from jdisagg.policy.worker.handoff import Handoff

NO_NUMBERS = "the model's logits were no numbers (NaN or infinite)"


class EffectBuffer:
    """Collects the effects of one event; the actor's `handle` returns them with `drain`."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def put(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, to: WorkerId, message: Message) -> None:
        self._effects.append(Send(to, message))

    def tell_router(self, message: Message) -> None:
        self._effects.append(Send(ROUTER, message))

    def reach(self, attempt: Attempt, mark: Mark, now_s: float, wire_s: float = 0.0, cached_tokens: int = 0) -> None:
        self.tell_router(Progress(attempt, mark, now_s, wire_s, cached_tokens))

    def draw(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self.tell_router(Drawn(tuple(deltas)))

    def end(
        self, attempt: Attempt, reason: FinishReason, num_output: int, now_s: float, sampling: SamplingParams
    ) -> None:
        """Reports the end of a sequence to the router; `num_output` tokens were sent in all attempts."""
        detail = why_nothing_was_drawn(sampling) if reason is FinishReason.ERROR else ""
        self.tell_router(Ended(attempt, reason, now_s, num_output, detail))

    def abort(self, attempt: Attempt, detail: str, reason: FinishReason = FinishReason.ERROR) -> None:
        """Tells the router that this end of a handoff is gone."""
        self.tell_router(Abort(attempt, detail, reason))

    def set_timer(self, at_s: float, key: str) -> None:
        self._effects.append(SetTimer(at_s, key))

    def arm(self, handoff: Handoff) -> None:
        self.set_timer(handoff.deadline_s, handoff.timer)

    def drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def why_nothing_was_drawn(sampling: SamplingParams) -> str:
    """Returns the likely causes; the worker sees tokens only, and its log has the grammar's message."""
    if not sampling.grammar:
        return NO_NUMBERS
    return f"no token could follow: the answer's grammar went over its limits or has none here, or {NO_NUMBERS}"
