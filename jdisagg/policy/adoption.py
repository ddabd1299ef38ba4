"""How a router comes by the streams of one before it: fronts ask for them, workers say what they have kept of them.

Either may come first. A stream that no worker has kept, or whose client lacks tokens that nobody can tell again, is
prefilled with the tokens that its client has: these are the same tokens, later.
"""

from __future__ import annotations

import math

from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Adopt, Kept
from jdisagg.core.request import Attempt, Phase, RequestId, WorkerId
from jdisagg.policy.request_state import RequestState, Waiting
from jdisagg.policy.request_table import RequestTable

ADOPTED = (Phase.PREFILLING, Phase.SHIPPING, Phase.DECODING)  # a row goes through them in one go


class Adoption:
    """The streams that workers keep and nobody has asked for yet."""

    def __init__(self, requests: RequestTable) -> None:
        self.requests, self.config, self.out = requests, requests.config, requests.out
        self.kept: dict[RequestId, tuple[WorkerId, Kept]] = {}

    def resumed(self, row: RequestState, now_s: float) -> None:
        """A new row that another router had: it is taken over, or waits for a worker that says it has kept it."""
        natural = row.natural_end()
        worker, kept = self.kept.pop(row.request_id, (None, None))
        if natural is not None:  # only its end was not told
            if worker is not None and kept is not None:
                self._refuse(worker, kept)
            self.requests.rows[row.request_id] = row
            row.enter(Phase.PREFILLING)  # as it was, somewhere
            self.requests.finish(row, natural, "", now_s)
            return
        self.requests.rows[row.request_id] = row
        self.requests.wait(row, Waiting.KEEPER, now_s + self.config.adopt_s)
        if worker is not None and kept is not None:
            self.told(worker, kept, now_s)

    def told(self, sender: WorkerId, kept: Kept, now_s: float) -> None:
        """A worker has kept this."""
        row = self.requests.rows.get(kept.attempt.request_id)
        if sender not in self.requests.peers:
            return
        if row is None:
            self.kept[kept.attempt.request_id] = sender, kept
        elif self._may_adopt(row, kept):
            self._adopt(row, sender, kept, now_s)
        else:
            self._refuse(sender, kept)

    def _may_adopt(self, row: RequestState, kept: Kept) -> bool:
        """Nobody else works for it, and its client lacks nothing that was drawn elsewhere."""
        scored = row.request.sampling.reads_prompt and not row.output
        free = row.waiting is Waiting.KEEPER or (row.waiting is Waiting.RESERVATION and row.phase is Phase.QUEUED)
        return free and not scored and kept.num_output <= len(row.output)

    def _adopt(self, row: RequestState, worker: WorkerId, kept: Kept, now_s: float) -> None:
        if row in self.requests.queue:
            self.requests.queue.remove(row)
        row.epoch, row.decode, row.num_before = kept.attempt.epoch, worker, len(row.output)
        for phase in ADOPTED:
            row.enter(phase)
        row.ledger.mark(Mark.FIRST_STEP, now_s)
        tokens = row.request.sampling.max_tokens * self.config.decode_token_weight
        self.requests.peers[worker].book(row.request_id, 0.0, tokens)
        self.out.send(worker, Adopt(row.attempt, len(row.output)))
        self.requests.wait(row, Waiting.TOKEN, now_s + self.config.stall_timeout_s)

    def _refuse(self, worker: WorkerId, kept: Kept) -> None:
        self.out.send(worker, Abort(kept.attempt, "nobody asks for what was kept"))

    def waited(self, row: RequestState, now_s: float) -> None:
        """No worker has kept it."""
        deadline_s = now_s + (self.config.queue_timeout_s or math.inf)
        row.queue_deadline_s = max(row.queue_deadline_s, deadline_s)
        self.requests.add(row)

    def gave_up(self, sender: WorkerId, attempt: Attempt) -> None:
        """A worker keeps this no longer."""
        if self.kept.get(attempt.request_id, (None, None))[0] == sender:
            del self.kept[attempt.request_id]

    def lose(self, worker: WorkerId) -> None:
        self.kept = {name: each for name, each in self.kept.items() if each[0] != worker}
