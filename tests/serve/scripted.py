"""A small `Service` for tests of the fronts: each request gets the updates that a script writes for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

from jdisagg.core.events import Finish
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import TokenDelta
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId, Sampled, WorkerId
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.pools import NO_POOLS
from jdisagg.serve.driver.service import Capacity, Draining, Update

FIXTURE = Path(__file__).parent.parent / "fixtures" / "conformance" / "llama3"
Step = Update | Exception | float  # a float is a pause in seconds
Script = Callable[[Request], Iterator[Step]]


def end(request: Request, reason: FinishReason, detail: str = "") -> Update:
    """The last update, with a ledger whose parts are known: 1 ms in the queue, 2 ms of prefill, 3 ms of decode."""
    ledger, at_s = Ledger(), 100.0
    for mark, part_s in (
        (Mark.ARRIVED, 0.0),
        (Mark.PREFILL_STARTED, 0.001),
        (Mark.FIRST_TOKEN, 0.002),
        (Mark.ENDED, 0.003),
    ):
        at_s += part_s
        ledger.mark(mark, at_s)
    workers = (WorkerId("prefill-0"), WorkerId("decode-0"))
    return Update(finish=Finish(request.request_id, reason, ledger, *workers, detail=detail))


def sampled(request: Request, token: int) -> Sampled:
    """A token with the logprobs the request asks for: itself at -0.5, then its neighbours."""
    wanted = request.sampling.logprobs
    if wanted is None:
        return Sampled(token)
    top = tuple(((token + i) % 256, -0.5 - i) for i in range(wanted))
    return Sampled(token, -0.5, top)


def told(request: Request, *ids: int, prompt: tuple[Sampled, ...] = ()) -> Update:
    """These tokens, wherever in the output they are."""
    drawn = tuple(sampled(request, token) for token in ids)
    return Update(TokenDelta(Attempt(request.request_id, 1), 0, drawn, prompt))


def prompt_sampled(request: Request) -> tuple[Sampled, ...]:
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return ()
    return tuple(Sampled(token, -1.0, ((token, -1.0),)[:wanted]) for token in request.prompt[1:])


def tokens(request: Request, ids: list[int], reason: FinishReason | None = None) -> Iterator[Step]:
    """These ids one by one until a stop token or max_tokens; then the end."""
    prompt = prompt_sampled(request)
    for count, token in enumerate(ids, start=1):
        yield told(request, token, prompt=prompt)
        prompt = ()
        if token in request.sampling.stop_token_ids and count > request.sampling.min_tokens:
            yield end(request, FinishReason.STOP)
            return
        if count == request.sampling.max_tokens:
            yield end(request, FinishReason.LENGTH)
            return
    yield end(request, reason or FinishReason.STOP)


def echo(request: Request) -> Iterator[Step]:
    """The prompt again and again, rotated by the seed where it is not greedy, until max_tokens."""
    step = 0 if request.sampling.greedy else request.sampling.seed % len(request.prompt)
    turned = list(request.prompt[step:] + request.prompt[:step])
    times = request.sampling.max_tokens // len(turned) + 1
    yield from tokens(request, turned * times)


class ScriptedService:
    """Implements `Service`. `running` holds the ids of requests that are neither ended nor closed."""

    def __init__(self, script: Script = echo, max_model_len: int = 512) -> None:
        self.tokenizer = Tokenizer(FIXTURE)
        self.model_name, self.max_model_len = "tiny", max_model_len
        vocab = self.tokenizer.vocab_size
        self.model_config = ModelConfig("llama", vocab, 8, 16, 1, 1, 1, 8, max_model_len)
        self.ready, self.draining, self.alive, self.script = True, False, True, script
        self.most: Capacity | None = None
        self.pools = NO_POOLS
        self.sampling_defaults: dict[str, float] = {}
        self.seen: list[Request] = []
        self.running: set[RequestId] = set()
        self.cancelled: set[RequestId] = set()

    def now_s(self) -> float:
        return time.monotonic()

    def capacity(self) -> Capacity | None:
        return self.most

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> None:
        self.cancelled.add(request_id)

    async def stream(self, request: Request) -> AsyncGenerator[Update]:
        if self.draining or not self.ready:
            raise Draining("not ready, or going down")
        self.seen.append(request)
        self.running.add(request.request_id)
        try:
            for step in self.script(request):
                await asyncio.sleep(step if isinstance(step, float) else 0)
                if request.request_id in self.cancelled:
                    yield end(request, FinishReason.ABORT, "cancelled")
                    return
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Update):
                    yield step
        finally:
            self.running.discard(request.request_id)
