"""Prompts whose decode pages were only promised: they are claimed from here, and nothing is shipped before that."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.messages import Claim, Granted, Renew
from jdisagg.core.request import Attempt, Sampled
from jdisagg.core.router_config import Reserving
from jdisagg.core.worker_config import TransferMode
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.prefill_sequence import PrefillSequence


class PageClaims:
    """Of one worker's prompts."""

    def __init__(self, out: Outbox) -> None:
        self.out = out
        self.computed: dict[Attempt, Sampled] = {}  # prompts that wait for nothing else, and what they drew

    def dispatched(self, prompt: PrefillSequence) -> None:
        """A chunk is under way. Pages are claimed as soon as something is to be shipped, or all of it is under way;
        again where that is not answered yet."""
        due = prompt.mode is not TransferMode.WHOLE or not prompt.tokens_left
        if due and prompt.asked.reserve is Reserving.CALENDAR and prompt.request.sampling.max_tokens > 1:
            self._claim(prompt, computed=False)

    def wait(self, prompt: PrefillSequence, first: Sampled) -> None:
        """All of it is computed."""
        self.computed[prompt.owner] = first
        self._claim(prompt, computed=True)

    def _claim(self, prompt: PrefillSequence, *, computed: bool) -> None:
        if not prompt.granted:
            self.out.send(prompt.decode_worker, Claim(prompt.owner, computed))

    def take(self, prompt: PrefillSequence, message: Granted) -> Sampled | None:
        """There are pages to ship to; what was drawn, where that was all that was waited for. Said twice, it counts
        once."""
        if prompt.granted:
            return None
        prompt.asked = replace(prompt.asked, decode_pages=message.pages, cached_pages=message.cached_pages)
        prompt.sent_pages = message.cached_pages // prompt.group.destination * prompt.group.source
        return self.computed.pop(prompt.owner, None)

    def beat(self, owner: Attempt) -> Claim | Renew:
        """What renews its place: the claim, lest that was lost, or its answer."""
        return Claim(owner, computed=True) if owner in self.computed else Renew(owner)
