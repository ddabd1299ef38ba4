"""The requests of a simulated run: those still to come, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from jdisagg.core.events import EmitTokens, Finish, Reject
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.sim.outcome import SLO, Record
from jdisagg.sim.sequence import NamedPrompts, Sequence
from jdisagg.sim.stops import STOP_TOKEN
from jdisagg.sim.traces import Trace


def requests_of(trace: Trace) -> Iterator[Request]:
    """The trace's rows as requests, named by their place in it."""
    sizes = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for index, ((arrival_s, _, outputs), prompt) in enumerate(zip(sizes, _prompts(trace), strict=True)):
        words = cast(tuple[int, ...], prompt)  # the actors only slice, join, measure it, and ask what its pages are
        yield Request(RequestId(f"r{index:07d}"), words, SamplingParams(max_tokens=outputs), arrival_s)


def _prompts(trace: Trace) -> Iterator[Sequence]:
    if not trace.block_hashes:
        return map(Sequence, trace.input_tokens.tolist())
    return map(NamedPrompts(trace.block_tokens).prompt, trace.input_tokens.tolist(), trace.block_hashes)


class Requests:
    """Of an open loop they come at the trace's times; of a closed one when another has ended, and `think_s` later."""

    def __init__(self) -> None:
        self.records: dict[RequestId, Record] = {}
        self.closed, self.think_s = False, 0.0
        self.asks: SLO | None = None  # what each states as its objectives
        self.limit = 0  # output tokens that each asks for where its length is not foreseen; 0: it is
        self.lengths: dict[RequestId, int] = {}  # then, how long each turns out
        self._coming: Iterator[Request] = iter(())

    def begin(self, trace: Trace, closed: bool, think_s: float) -> None:
        self._coming, self.closed, self.think_s = requests_of(trace), closed, think_s

    def next(self, at_s: float) -> Request | None:
        """The next one, booked; of a closed loop it arrives at `at_s`."""
        request = next(self._coming, None)
        if request is None:
            return None
        request = replace(request, arrival_s=at_s) if self.closed else request
        if self.asks is not None:
            request = replace(request, ttft_s=self.asks.ttft_s, tpot_s=self.asks.tpot_s)
        self.book(request, request.arrival_s)
        return self._unforeseen(request) if self.limit else request

    def _unforeseen(self, request: Request) -> Request:
        """It asks for up to the limit, and ends by a stop."""
        length = self.lengths[request.request_id] = request.sampling.max_tokens
        limited = replace(request.sampling, max_tokens=max(self.limit, length), stop_token_ids=(STOP_TOKEN,))
        return replace(request, sampling=limited)

    def book(self, request: Request, arrival_s: float) -> None:
        sizes = len(request.prompt), request.sampling.max_tokens
        self.records[request.request_id] = Record(request.request_id, arrival_s, *sizes)

    def emit(self, effect: EmitTokens, now_s: float) -> None:
        record = self.records[effect.request_id]
        assert not record.ends, f"{effect.request_id} got tokens after its end"
        if not record.told_tokens:
            record.first_s = now_s
        record.told_tokens += len(effect.delta.sampled)
        record.last_s = now_s

    def end(self, effect: Finish | Reject, now_s: float) -> None:
        record = self.records[effect.request_id]
        record.reason = effect.reason if isinstance(effect, Finish) else "rejected"
        record.detail, record.end_s = effect.detail, now_s
        record.ends += 1
        if isinstance(effect, Finish):
            record.ledger = effect.ledger
            record.prefill_worker, record.decode_worker = effect.prefill_worker or "", effect.decode_worker or ""

    def check_all_ended(self) -> None:
        """Asserts that each ended once."""
        wrong = [record for record in self.records.values() if record.ends != 1]
        assert not wrong, f"{wrong[0].request_id} ended {wrong[0].ends} times"
