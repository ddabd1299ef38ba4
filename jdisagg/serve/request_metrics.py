"""Metrics of requests: how many run and wait, how they end, how long they are and how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jdisagg.core.events import EmitTokens, Finish, Received, Reject, RunStep, Submit
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Progress
from jdisagg.core.request import Request, RequestId
from jdisagg.serve.metric_families import SECONDS, TOKENS, Families, Fold, Kind, observe_times

TIMED_TOKENS = 16  # of an answer, from which its pace counts


@dataclass(slots=True)
class RequestTimes:
    """One request between Submit and its end."""

    request: Request
    started: bool = False  # a prefill plan has held it
    first_s: float | None = None
    last_s: float = 0.0
    num_output: int = 0


class LatencyMetrics:
    """Seconds of requests, and where they went."""

    def __init__(self, families: Families) -> None:
        ttft = families.histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        itl = families.histogram("inter_token_latency_seconds", "Between consecutive tokens of a request", SECONDS)
        tpot = families.histogram("time_per_output_token_seconds", "Mean after the first token, a request", SECONDS)
        self._ttft, self._itl, self._tpot = ttft.of(), itl.of(), tpot.of()
        self._whole = families.histogram("request_seconds", "From arrival to the end", SECONDS).of()
        self._parts = families.histogram("request_part_seconds", "Where a request's time went", SECONDS, "part")
        self._transfer = families.histogram(
            "transfer_seconds", "Of a request's KV: hidden behind its prefill, and exposed after it", SECONDS, "share"
        )
        self.fastest_s = 0.0  # a token, over the best of all answers

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        self._ttft.observe(now_s - times.request.arrival_s)

    def tokens(self, times: RequestTimes, count: int, now_s: float) -> None:
        """`count` tokens after the first that came at once."""
        observe_times(self._itl, (now_s - times.last_s) / count, count)

    def finish(self, times: RequestTimes, ledger: Ledger, now_s: float) -> None:
        self._whole.observe(now_s - times.request.arrival_s)
        if times.first_s is not None and times.num_output > 1:
            mean_s = (times.last_s - times.first_s) / (times.num_output - 1)
            self._tpot.observe(mean_s)
            if times.num_output >= TIMED_TOKENS:
                self.fastest_s = min(self.fastest_s or mean_s, mean_s)
        for part, nanoseconds in ledger.parts_ns().items():
            self._parts.of(part).observe(nanoseconds / 1e9)
        if ledger.wire_ns:
            for share, nanoseconds in zip(("hidden", "exposed"), ledger.transfer_ns(), strict=True):
                self._transfer.of(share).observe(nanoseconds / 1e9)


class RequestMetrics:
    """Requests that the router of this process was asked, until they end."""

    def __init__(self, families: Families) -> None:
        self.latency = LatencyMetrics(families)
        self._running: dict[RequestId, RequestTimes] = {}
        self._waiting = 0
        self._ended = families.counter("requests", "Requests that ended, by reason", "reason")
        self._rejected = families.counter(
            "rejects", "Requests turned away: the queue was full, or their objectives out of reach"
        )
        self._prompt_tokens = families.counter("prompt_tokens", "Prompt tokens of requests that were answered")
        self._output_tokens = families.counter("generation_tokens", "Output tokens given to clients").of()
        self._input_length = families.histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._output_length = families.histogram("request_generation_tokens", "Output tokens of a request", TOKENS)
        running = families.gauge("requests_running", "Requests whose prefill has begun").of()
        waiting = families.gauge("requests_waiting", "Requests whose prefill has not begun").of()
        running.set_function(lambda: len(self._running) - self._waiting)
        waiting.set_function(lambda: self._waiting)

    def folds(self) -> Mapping[Kind, Fold]:
        return {
            Submit: self._submit,
            RunStep: self._step,
            (Received, Progress): self._progress,
            EmitTokens: self._emit,
            Finish: self._finish,
            Reject: self._reject,
        }

    def adapters(self) -> tuple[list[str], list[str]]:
        """Names of those that requests ask for: which run, and which wait. From any thread."""
        asked = [(times.request.sampling.adapter, times.started) for times in [*self._running.values()]]
        return [each.name for each, on in asked if each and on], [each.name for each, on in asked if each and not on]

    def _submit(self, actor: str, item: Submit, now_s: float) -> None:
        self._running[item.request.request_id] = RequestTimes(item.request)
        self._waiting += 1

    def _step(self, actor: str, item: RunStep, now_s: float) -> None:
        for chunk in item.plan.prefill.chunks if item.plan.prefill else ():
            self._start(self._running.get(chunk.request_id))

    def _progress(self, actor: str, item: Received, now_s: float) -> None:
        """Of a worker of another process, whose steps are not seen here."""
        assert isinstance(item.message, Progress)
        if item.message.mark is Mark.PREFILL_STARTED:
            self._start(self._running.get(item.message.attempt.request_id))

    def _start(self, times: RequestTimes | None) -> None:
        if times is not None and not times.started:
            times.started = True
            self._waiting -= 1

    def _emit(self, actor: str, item: EmitTokens, now_s: float) -> None:
        times, count = self._running.get(item.request_id), len(item.delta.sampled)
        self._output_tokens.inc(count)
        if times is None or count == 0:
            return
        if times.first_s is None:
            times.first_s = now_s
            self.latency.first_token(times, now_s)
            self._prompt_tokens.of().inc(len(times.request.prompt))
        else:
            self.latency.tokens(times, count, now_s)
        times.last_s = now_s
        times.num_output += count

    def _finish(self, actor: str, item: Finish, now_s: float) -> None:
        times = self._running.pop(item.request_id, None)
        if times is None:
            return
        self._start(times)
        self._ended.of(item.reason.value).inc()
        self._input_length.of().observe(len(times.request.prompt))
        self._output_length.of().observe(times.num_output)
        self.latency.finish(times, item.ledger, now_s)

    def _reject(self, actor: str, item: Reject, now_s: float) -> None:
        self._start(self._running.pop(item.request_id, None))
        self._rejected.of().inc()
