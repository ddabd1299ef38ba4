"""What the ends of steps make of the sequences whose rows they held: tokens told, answers over, or failures."""

from __future__ import annotations

from jdisagg.core.events import StepDone
from jdisagg.core.ledger import Mark
from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import BROKEN, FinishReason, Sampled
from jdisagg.policy.decode_sequence import DecodeSequence, end_of
from jdisagg.policy.decode_side import DecodeSide
from jdisagg.policy.handoff import Signal


class StepResults:
    """Of the decode rows of one worker."""

    def __init__(self, decode_side: DecodeSide) -> None:
        self.config, self.decode_side, self.out = decode_side.config, decode_side, decode_side.out
        self.quiet = False  # whether the last step's end gave each of its sequences tokens, and did nothing else

    def done(self, event: StepDone, now_s: float) -> None:
        step = self.decode_side.steps.pop(event.step_id)
        self.decode_side.slots.end_step(step.microbatch)
        self.decode_side.turn_times.done(event.step_id, now_s)
        controller = self.decode_side.draft_controller
        if controller is not None:
            controller.on_done(event.step_id, [len(drawn) for _, drawn in event.decode if drawn], now_s)
        draws: list[TokenDelta] = []
        first_steps = 0
        over: list[tuple[DecodeSequence, FinishReason]] = []
        for slot, drawn in event.decode:
            sequence = step.sequences.get(slot)
            if sequence is None or sequence.handoff.over:
                continue  # it stopped, was preempted or aborted, or stepped back, while this step was in flight
            assert drawn, f"slot {slot} masked itself though its sequence goes on"
            first_steps += self._first_step(sequence, now_s)
            kept, reason = self._until_end(sequence, drawn)
            if controller is not None and not step.turns:
                controller.on_row_read(sequence, step.widths[slot], len(drawn))
            sequence.read(step.widths[slot], step.least(slot), len(drawn))
            if kept:
                index = sequence.num_output + len(sequence.output)
                sequence.output.extend(sampled.token for sampled in kept)
                draws.append(TokenDelta(sequence.owner, index, kept))
            if reason is not None:
                over.append((sequence, reason))
            elif sequence.drained and sequence.slot is not None:
                self.decode_side.drain(sequence)  # more of a draft was accepted than was certain
        self.out.draw(draws)
        self.quiet = not over and len(draws) == len(event.decode) == len(step.sequences) and not first_steps
        for sequence, reason in over:
            num_output = sequence.num_output + len(sequence.output)
            self.out.end(sequence.owner, reason, num_output, now_s, sequence.sampling)
            self.decode_side.end(sequence.owner, Signal.RELEASE, good=reason is not FinishReason.ERROR)

    def _until_end(
        self, sequence: DecodeSequence, drawn: tuple[Sampled, ...]
    ) -> tuple[tuple[Sampled, ...], FinishReason | None]:
        """The tokens that are the client's, and why it is over with them; None where it goes on."""
        if len(drawn) > 1 and not _may_end(sequence, drawn):
            return drawn, None
        for count, sampled in enumerate(drawn, 1):
            reason = end_of(sequence.sampling, sampled, len(sequence.output) + count)
            if reason is not None:
                return drawn[: count - sampled.broken], reason
        return drawn, None

    def _first_step(self, sequence: DecodeSequence, now_s: float) -> bool:
        """Whether it was."""
        if sequence.stepped:
            return False
        sequence.stepped = True
        self.out.reach(sequence.owner, Mark.FIRST_STEP, now_s)
        return True

    def failed(self, step_id: int, reason: str) -> None:
        step = self.decode_side.steps.pop(step_id)
        self.decode_side.slots.end_step(step.microbatch)
        self.decode_side.turn_times.failed(step_id)
        if self.decode_side.draft_controller is not None:
            self.decode_side.draft_controller.on_failed(step_id)
        self.decode_side.slots.retire_again(step.microbatch, step.retired)
        for sequence in step.sequences.values():
            if self.decode_side.end(sequence.owner, Signal.ABORT):
                self.out.abort(sequence.owner, reason)


def _may_end(sequence: DecodeSequence, drawn: tuple[Sampled, ...]) -> bool:
    """False only where it goes on after all of these: seen at once, for one in hundreds of its tokens is the last."""
    sampling, tokens = sequence.sampling, [sampled.token for sampled in drawn]
    if drawn[0].logprob is not None or len(sequence.output) + len(tokens) >= sampling.max_tokens:
        return True
    return BROKEN in tokens or any(stop in tokens for stop in sampling.stop_token_ids)
