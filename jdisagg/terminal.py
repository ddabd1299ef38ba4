"""What the launcher says and hears in a terminal: one answer with its ledger, or a conversation."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.console import Console

from jdisagg import banner
from jdisagg.core.errors import RequestError, TooLong
from jdisagg.core.events import Finish
from jdisagg.core.ledger import Ledger
from jdisagg.core.request import FinishReason
from jdisagg.core.settings import Settings
from jdisagg.serve import offline
from jdisagg.serve.offline import Prompt
from jdisagg.serve.sampling_params import SamplingParams
from jdisagg.serve.service import Service

FAILED = 1
YOU = "> "


def sampling_of(settings: Settings) -> SamplingParams:
    return SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)


async def complete_one(service: Service, settings: Settings, console: Console) -> int:
    """Streams one answer to stdout, then prints its ledger: a chat's, where the model has a template, or a
    continuation of --prompt, which is then printed before it. The exit code."""
    if settings.raw_prompt or not service.tokenizer.has_chat_template:
        prompt: Prompt = settings.prompt
        num_tokens = len(service.tokenizer.encode(settings.prompt))
        print(settings.prompt, end="", flush=True)
    else:
        prompt, _ = await _chat_prompt(service, [_said("user", settings.prompt)], settings)
        num_tokens = len(prompt)
    answer = Answer()
    await answer.stream(service, prompt, _fitting(service, settings, num_tokens))
    print(flush=True)
    if answer.finish is None:
        return 0
    console.print(banner.ledger_table(answer.finish.ledger, answer.num_tokens))
    return _failed(answer.finish)


def _failed(finish: Finish) -> int:
    if finish.reason is not FinishReason.ERROR:
        return 0
    print(f"jdisagg: the answer ended early: {finish.detail}", file=sys.stderr)
    return FAILED


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


async def _chat_prompt(service: Service, messages: offline.Messages, settings: Settings) -> tuple[Prompt, Any]:
    return await offline.chat_prompt(service, messages, sampling_of(settings))


def _fitting(service: Service, settings: Settings, num_tokens: int) -> SamplingParams:
    """As asked for, but no more tokens than the model has left after the prompt."""
    room = max(1, service.max_model_len - num_tokens)
    return sampling_of(replace(settings, max_tokens=min(settings.max_tokens, room)))


@dataclass(slots=True)
class Answer:
    """One answer as it is printed, and when its tokens came."""

    text: str = ""
    num_tokens: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    finish: Finish | None = None

    async def stream(self, service: Service, prompt: Prompt, sampling: SamplingParams) -> None:
        async with aclosing(offline.stream(service, prompt, sampling)) as pieces:
            async for piece in pieces:
                if piece.delta.sampled:
                    self.last_s = time.perf_counter()
                    self.first_s = self.last_s if self.first_s is None else self.first_s
                    self.num_tokens += len(piece.delta.sampled)
                self.text += piece.text
                print(piece.text, end="", flush=True)
                self.finish = piece.finish or self.finish

    def told(self, num_prompt_tokens: int) -> str:
        """One line: time to the first token, tokens a second after it, reused tokens, and the handoff."""
        if self.first_s is None:
            return "stopped before its first token"
        parts = [f"first token after {1000 * (self.first_s - self.began_s):,.0f} ms", f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and self.last_s > self.first_s:
            parts[1] += f" at {(self.num_tokens - 1) / (self.last_s - self.first_s):,.1f} tokens/s"
        if self.finish is None:
            return ", ".join([*parts, "stopped"])
        ledger = self.finish.ledger
        return ", ".join(
            [*parts, f"{ledger.cached_tokens} of {num_prompt_tokens} prompt tokens reused", _handoff(ledger)]
        )


def _handoff(ledger: Ledger) -> str:
    hidden_ns, exposed_ns = ledger.transfer_ns()
    if not ledger.wire_ns:
        return "no handoff"
    return f"handoff {exposed_ns / 1e6:.1f} ms and {hidden_ns / 1e6:.1f} ms hidden behind prefill"


class Lines:
    """Lines of a stream, read by a thread when they are asked for, so that nothing else waits meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    async def next(self) -> str | None:
        """The next line without its end; None where there are no more."""
        loop, found = asyncio.get_running_loop(), asyncio.Future[str]()

        def read() -> None:
            line = self._stream.readline()
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(lambda: found.done() or found.set_result(line))

        threading.Thread(target=read, name="terminal", daemon=True).start()
        line = await found
        return line.rstrip("\r\n") if line else None


async def converse(service: Service, settings: Settings, console: Console, stream: TextIO | None = None) -> int:
    """A conversation until the lines of `stream` (stdin) end; Ctrl-C stops the answer that is under way."""
    source = stream or sys.stdin or io.StringIO()  # a process may have been started without stdin
    if not service.tokenizer.has_chat_template:
        raise RequestError(f"{service.model_name} has no chat template: it cannot --chat; --prompt completes", "chat")
    console.print("Ctrl-C stops an answer, Ctrl-D ends", style="dim")
    lines, messages = Lines(source), list[dict[str, Any]]()
    while (line := await _heard(lines, source)) is not None:
        if not line.strip():
            continue
        messages.append(_said("user", line))
        try:
            prompt, _ = await _chat_prompt(service, messages, settings)
            answer = await _answered(service, prompt, _fitting(service, settings, len(prompt)))
        except TooLong as error:
            console.print(f"{error}; what was said is forgotten", style="yellow", highlight=False)
            messages.clear()
            continue
        console.print(answer.told(len(prompt)), style="dim", highlight=False)
        messages.append(_said("assistant", answer.text))
        if answer.finish is not None and _failed(answer.finish):
            return FAILED
    return 0


async def _heard(lines: Lines, stream: TextIO) -> str | None:
    """The next line; written after the prompt where no terminal has echoed it."""
    print(YOU, end="", flush=True)
    with on_interrupt(lambda: print(f"\n(Ctrl-D ends)\n{YOU}", end="", flush=True)):
        line = await lines.next()
    if line is None or not stream.isatty():
        print(line or "", flush=True)
    return line


async def _answered(service: Service, prompt: Prompt, sampling: SamplingParams) -> Answer:
    """The answer as far as it came before Ctrl-C."""
    answer = Answer()
    streaming = asyncio.ensure_future(answer.stream(service, prompt, sampling))
    with on_interrupt(streaming.cancel), contextlib.suppress(asyncio.CancelledError):
        await streaming
    print(flush=True)
    return answer


@contextmanager
def on_interrupt(act: Callable[[], Any]) -> Iterator[None]:
    """Ctrl-C does this meanwhile."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
