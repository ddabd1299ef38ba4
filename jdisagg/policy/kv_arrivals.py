"""How KV comes to its decode worker: what COMMIT says of it, part by part, and again where one was lost."""

from __future__ import annotations

from jdisagg.core.errors import PeerMismatch, SenselessWord
from jdisagg.core.events import DropKV, InsertKV, KVArrived
from jdisagg.core.messages import Abort, Ack, Commit, Renew, Resend
from jdisagg.core.request import Attempt, FinishReason, WorkerId
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.policy.decode_sequence import DecodeSequence, admitted
from jdisagg.policy.decode_side import DecodeSide
from jdisagg.policy.handoff import Signal, State, Timer, timer_of
from jdisagg.policy.planning import tail_tokens


def check_manifest(manifest: Commit, sequence: DecodeSequence, config: WorkerConfig) -> None:
    """Raises PeerMismatch, or SenselessWord, unless the Commit fits what was reserved."""
    ours, theirs, source = config.kv_layout, manifest.layout, sequence.source
    if ours and theirs and ours != theirs:
        raise PeerMismatch(f"{source} shipped pages of {theirs}, {config.worker} holds {ours}")
    if manifest.num_tokens != sequence.num_tokens:
        raise SenselessWord(f"{source} commits {manifest.num_tokens} tokens of {sequence.num_tokens}")
    needed = tail_tokens(sequence.asked, config)
    if len(manifest.tail) != needed:
        raise SenselessWord(f"{source} commits a tail of {len(manifest.tail)} tokens, {config.worker} needs {needed}")


class KVArrivals:
    """Of all sequences of one worker, from their reservation to their admission."""

    def __init__(self, decode_side: DecodeSide) -> None:
        self.decode_side = decode_side
        self.config, self.out, self.sequences = decode_side.config, decode_side.out, decode_side.sequences

    def renew(self, message: Renew, source: WorkerId, now_s: float) -> None:
        """The source is at it still; one that waits for an Ack though the sequence is complete has missed it."""
        sequence = self.sequences.get(message.attempt)
        if sequence is None:
            self.out.send(source, Abort(message.attempt, "no such reservation"))
        elif admitted(sequence):
            self.out.send(source, Ack(sequence.owner, sequence.arrivals.wire_s))
        else:
            sequence.renew(now_s)

    def commit(self, message: Commit, source: WorkerId, now_s: float) -> None:
        owner = message.attempt
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.source != source:
            self.out.send(source, Abort(owner, "no such reservation"))
        elif admitted(sequence):
            self.out.send(source, Ack(owner, sequence.arrivals.wire_s))  # said twice: the Ack may have been lost
        elif sequence.handoff.can_take(Signal.COMMIT):
            self._commit(sequence, message, now_s)

    def _commit(self, sequence: DecodeSequence, message: Commit, now_s: float) -> None:
        try:
            check_manifest(message, sequence, self.config)
        except (PeerMismatch, SenselessWord) as error:
            self._give_up(sequence, f"{type(error).__name__}: {error}")
            return
        sequence.commit(message)
        sequence.renew(now_s)
        if not self.decode_side.admit_if_complete(sequence, now_s):
            self.decode_side.ahead.wait(sequence)
            self._watch_parts(sequence, now_s)

    def arrive(self, event: KVArrived, now_s: float) -> None:
        """A part landed: inserted where its sequence still waits for it, dropped where it is late or came before."""
        transfer = event.transfer
        sequence = self.sequences.get(transfer.attempt)
        if sequence is None or not sequence.wants(transfer.part) or not sequence.is_for(transfer):
            self.out.put(DropKV(transfer))
            return
        sequence.renew(now_s)
        sequence.arrivals.moved_s = now_s
        sequence.arrivals.wire.append((now_s - event.wire_s, now_s))
        if not event.intact:
            self.out.put(DropKV(transfer))
            self._ask_again(sequence, [transfer.part], "came broken", FinishReason.ERROR)
            return
        sequence.handoff.take(Signal.ARRIVE)
        sequence.arrivals.parts.add(transfer.part)
        self.out.put(InsertKV(transfer))
        self.decode_side.admit_if_complete(sequence, now_s)

    # ------------------------------------------------------------ repair

    def _ask_again(self, sequence: DecodeSequence, parts: list[int], what: str, reason: FinishReason) -> None:
        """The source still holds these pages; a part that was asked for often enough ends the handoff."""
        tried = max(sequence.arrivals.asked[part] for part in parts)
        if tried >= self.config.part_tries:
            self._give_up(sequence, f"part {parts[0]} {what} {tried + 1} times", reason)
            return
        for part in parts:
            sequence.arrivals.asked[part] += 1
            self.out.send(sequence.source, Resend(sequence.owner, part))

    def _give_up(self, sequence: DecodeSequence, detail: str, reason: FinishReason = FinishReason.ERROR) -> None:
        self.decode_side.end(sequence.owner, Signal.ABORT)
        self.out.abort(sequence.owner, detail, reason)

    def _watch_parts(self, sequence: DecodeSequence, now_s: float) -> None:
        sequence.arrivals.moved_s = now_s
        self.out.set_timer(now_s + self.config.part_timeout_s, timer_of(Timer.PARTS, sequence.owner))

    def parts_late(self, owner: Attempt, now_s: float) -> None:
        """Asks for what COMMIT counted and did not come, once nothing has come for a while."""
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.handoff.state is not State.COMMITTED:
            return
        due_s = sequence.arrivals.moved_s + self.config.part_timeout_s
        if now_s < due_s:
            self.out.set_timer(due_s, timer_of(Timer.PARTS, owner))
            return
        self._ask_again(sequence, sequence.arrivals.missing, "did not come", FinishReason.TIMEOUT)
        if not sequence.handoff.over:
            self._watch_parts(sequence, now_s)
