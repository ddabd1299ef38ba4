"""What workers say of the attempts that they work on: reservations, progress, tokens, ends; for the router."""

from __future__ import annotations

from jdisagg.core.events import EmitTokens
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import Abort, Ended, Preempted, Progress, Refused, Reserved, TokenDelta
from jdisagg.core.request import Attempt, FinishReason, Phase, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.policy import message_builders
from jdisagg.policy.failures import Failure, FailureKind
from jdisagg.policy.planning import readable_pages
from jdisagg.policy.request_state import PHASE_OF_MARK, RequestState, Waiting
from jdisagg.policy.request_table import RequestTable


class AttemptProgress:
    """Follows every request of the table; a word of an attempt that is over, or of somebody without a part, is void."""

    def __init__(self, config: RouterConfig, requests: RequestTable) -> None:
        self.config, self.requests = config, requests
        self.rows, self.peers, self.out, self.aborts = requests.rows, requests.peers, requests.out, requests.aborts

    def _row_of(self, sender: WorkerId, attempt: Attempt) -> RequestState | None:
        """Its row, where it runs still and `sender` has a part in it."""
        row = self.rows.get(attempt.request_id)
        ours = row is not None and row.epoch == attempt.epoch and sender in (row.prefill, row.decode)
        return row if ours else None

    def _begun_row(self, sender: WorkerId, attempt: Attempt) -> RequestState | None:
        """As `_row_of`, where its prefill was ordered: of what nobody has begun there is nothing to say."""
        row = self._row_of(sender, attempt)
        return None if row is None or row.phase is Phase.QUEUED else row

    def answered(self, sender: WorkerId, message: Reserved | Refused, now_s: float) -> None:
        attempt, held = message.attempt, isinstance(message, Reserved)
        if sender in self.peers:
            self.peers[sender].answered(attempt, held=held)
        row = self._row_of(sender, attempt)
        if row is None and held:  # it was asked for late
            self.aborts.send(sender, attempt, "nobody waits for this reservation any more", now_s)
        if row is None or row.waiting is not Waiting.ANSWER or sender != row.decode:
            return
        if isinstance(message, Reserved):
            self._found(row, sender, message.cached_pages)
            self._start(row, message, now_s)
        else:
            self.requests.enqueue(row, now_s)

    def follow(self, sender: WorkerId, message: Progress | Ended | Preempted, now_s: float) -> None:
        """Of what nobody has begun there is nothing to say."""
        row = self._begun_row(sender, message.attempt)
        if row is None:
            return
        match message:
            case Progress(mark=mark, at_s=at_s):
                row.mark(mark, at_s, message.wire_s)
                if mark is Mark.PREFILL_STARTED:
                    row.begun(message.cached_tokens)
                    self._found_by_prefill(row, sender, message.cached_tokens)
                if mark is Mark.COMMITTED and sender == row.decode and row.phase is not Phase.DECODING:
                    self.requests.routes.shipped(row, message.cached_tokens, message.wire_s)
                self._reach(row, PHASE_OF_MARK.get(mark, row.phase), now_s)
            case Ended():
                row.ended = message
                self._end_if_complete(row, sender, now_s)
            case Preempted():
                self.requests.gave_back(row, message.detail, now_s)

    def _found_by_prefill(self, row: RequestState, sender: WorkerId, cached_tokens: int) -> None:
        """Where a prompt decodes, its beginning was looked up when it was reserved for."""
        if sender != row.decode and sender in self.peers:
            self._found(row, sender, cached_tokens // self.peers[sender].config.page_size)

    def _found(self, row: RequestState, sender: WorkerId, pages: int) -> None:
        """The worker has so many of the prompt's leading pages: whether that is what the directory says."""
        directory = self.requests.routes.directory
        if sender in self.peers and directory.follows(sender):
            config = self.peers[sender].config
            names = row.page_names(config.page_size)
            most = readable_pages(row.to_prefill(), config) if sender == row.prefill else len(names)
            directory.found(config, names[:most], pages * config.page_size)

    def drawn(self, sender: WorkerId, delta: TokenDelta, now_s: float) -> None:
        row = self._begun_row(sender, delta.attempt)
        if row is None:
            return
        self._reach(row, Phase.SHIPPING if delta.index == row.num_before else Phase.DECODING, now_s)
        if row.waiting is Waiting.TOKEN:
            row.deadline_s = now_s + self.config.stall_timeout_s  # the timer finds this out when it fires
        told = row.take(delta)
        if told.sampled:
            self.out.put(EmitTokens(told, sender))
            self._end_if_complete(row, sender, now_s)

    def _reach(self, row: RequestState, phase: Phase, now_s: float) -> None:
        """Moves a row on to `phase`, step by step; a word that says less than is known changes nothing."""
        if row.phase is Phase.PREFILLING and phase in (Phase.SHIPPING, Phase.DECODING):
            row.enter(Phase.SHIPPING)
            self._prefilled(row, now_s)
            self.requests.wait(row, Waiting.SHIP, now_s + self.config.handoff_timeout_s)
        if row.phase is Phase.SHIPPING and phase is Phase.DECODING:
            row.enter(Phase.DECODING)
            self.requests.wait(row, Waiting.TOKEN, now_s + self.config.stall_timeout_s)

    def _prefilled(self, row: RequestState, now_s: float) -> None:
        if row.prefill is None or row.prefill not in self.peers:
            return
        peer = self.peers[row.prefill]
        began = [at_ns for mark, at_ns in row.ledger.marks if mark is Mark.PREFILL_STARTED]
        tokens = peer.prefill_work.get(row.request_id, 0.0)
        if began and tokens:
            self.requests.routes.forecasts.drain.done(row.prefill, tokens, began[-1] / 1e9, now_s)
        peer.prefilled(row.request_id)

    def _end_if_complete(self, row: RequestState, sender: WorkerId, now_s: float) -> None:
        if row.ended is not None and len(row.output) >= row.ended.num_output:
            self.requests.finish(row, row.ended.reason, row.ended.detail, now_s, gone=sender)

    def aborted(self, sender: WorkerId, message: Abort, now_s: float) -> None:
        row = self._row_of(sender, message.attempt)
        if row is not None:
            kind = FailureKind.DECODE_GAVE_UP if sender == row.decode else FailureKind.PREFILL_GAVE_UP
            avoid = row.blamed(sender) if message.reason is FinishReason.TIMEOUT else sender
            self.requests.meet(row, Failure(kind, message.reason, message.detail, gone=sender, avoid=avoid), now_s)

    def _start(self, row: RequestState, reservation: Reserved, now_s: float) -> None:
        assert row.prefill is not None and row.decode is not None, "a reserved row has its pair"
        row.enter(Phase.PREFILLING)
        row.ledger.mark(Mark.RESERVED, now_s)
        decode = self.peers[row.decode].config
        apart = row.prefill != row.decode and row.prefill in self.peers
        holders = self.requests.routes.holders(self.peers[row.prefill].config, row) if apart else ()
        self.out.send(row.prefill, message_builders.start_prefill(row, reservation, decode, self.config, holders))
        self.requests.wait(row, Waiting.PREFILL, now_s + self.config.prefill_timeout_s)
