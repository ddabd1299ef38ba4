"""Requests with random features in any company: structured, tools, choices, log-probabilities, penalties, stops, seeds,
biases, priorities, salts, drafts, cut prompts, adapters, vectors, scores, responses, messages; some of them wrong, some
left half way.

A server process with a prefill and a decode worker, drafts on, and more adapters than have room in a step. What was
asked is checked against what came: the number of choices, the form of an answer, log-probabilities where they were
asked for, an end that may be; some requests are asked twice, and must be answered alike. Exit code 1 where the server
made a mistake (any status but 200, 429, and 400 to what is wrong), compiled a program after it was ready, kept a page,
or grew. The report is written as the run goes: one that is cut tells what it saw until then.

    python -m benchmarks.features --requests=10000
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from absl import flags

from benchmarks import adapters, entry, machine, report, soak_watch
from benchmarks.asked import Asked, asked, wrong_of
from benchmarks.asked_elsewhere import asked_elsewhere
from benchmarks.peers.processes import Command, Running, free_port, start
from jdisagg.model.checkpoint import read_model
from jdisagg.named_models import EMBEDDED_FOLDER

FLAGS = flags.FlagValues()
REQUESTS = flags.DEFINE_integer("requests", 10_000, "in all", lower_bound=1, flag_values=FLAGS)
AT_ONCE = flags.DEFINE_integer("at_once", 24, "clients that ask at the same time", lower_bound=1, flag_values=FLAGS)
MODEL = flags.DEFINE_string("model", "", "empty: the embedded model", flag_values=FLAGS)
SPECULATIVE = flags.DEFINE_string("speculative", "ngram", "as for jdisagg.launch", flag_values=FLAGS)
ADAPTERS = flags.DEFINE_integer("adapters", 3, "that requests ask for; two have room", 0, flag_values=FLAGS)
SEED = flags.DEFINE_integer("seed", 0, "of what is asked", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)

START_S, JOB_S, SETTLE_S = 300.0, 120.0, 60.0
TWICE, CANCELLED, WRONG, ELSEWHERE = 0.08, 0.12, 0.05, 0.12  # shares of all requests
SHOWN_FAULTS = 20
TOLD_EVERY_S = 15.0
GROWN_SHARE = 0.05  # of its memory in the middle, that a server may have taken by the end


@dataclass(slots=True)
class Book:
    """How requests ended, what they asked, the first faults in words, and the server's memory meanwhile."""

    ends: Counter[str] = field(default_factory=Counter[str])
    features: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    samples: list[soak_watch.Sample] = field(default_factory=list[soak_watch.Sample])

    def told(self) -> dict[str, Any]:
        """For the file, at any moment."""
        kept = self.samples[:: max(1, len(self.samples) // 40)]
        return {
            "ended": self.ends.total(),
            "ends": dict(self.ends),
            "features": dict(self.features),
            "faults": self.faults,
            "memory_mib": [round(each["server rss_mib"]) for each in kept],
        }

    def grown(self) -> str:
        """What memory did in the second half, where that is more than it may; "" where it is not, or nobody looked."""
        if len(self.samples) < SHOWN_FAULTS:
            return ""
        middle, last = self.samples[len(self.samples) // 2]["server rss_mib"], self.samples[-1]["server rss_mib"]
        return f"{middle:.0f} MiB in the middle, {last:.0f} at the end" if last > (1 + GROWN_SHARE) * middle else ""

    def fault(self, what: str, body: Any) -> None:
        self.ends["FAULT"] += 1
        if len(self.faults) < SHOWN_FAULTS:
            self.faults.append(f"{what}; asked: {json.dumps(body)}"[:1500])


async def ask(client: httpx.AsyncClient, one: Asked) -> tuple[int, Any]:
    """Status, and what was said: a document, or the events of a stream."""
    answer = await client.post(one.path, json=one.body)
    if answer.status_code != 200 or not one.body.get("stream"):
        return answer.status_code, answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return 599, {"a stream that did not end": lines[-1:]}
    events = [json.loads(line) for line in lines[:-1]]
    return (599 if any("error" in each for each in events) else 200), events


async def leave(client: httpx.AsyncClient, one: Asked, draw: random.Random) -> None:
    """Asks, hears a little or nothing, and goes."""
    with suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(draw.random() / 2), client.stream("POST", one.path, json=one.body) as answer:
            async for _ in answer.aiter_lines():
                if draw.random() < 0.1:
                    return


def drawn(draw: random.Random, models: Sequence[str]) -> Asked:
    return (asked_elsewhere if draw.random() < ELSEWHERE else asked)(draw, models)


async def one_client(
    client: httpx.AsyncClient, numbers: Iterator[int], seed: int, book: Book, models: Sequence[str]
) -> None:
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        kind = draw.random()
        one = wrong_of(draw) if kind < WRONG else drawn(draw, models)
        try:
            async with asyncio.timeout(JOB_S):
                await _one(client, one, kind, draw, book)
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, IndexError) as error:
            book.fault(f"request {number} of seed {seed}: {error!r}", one.body)


async def _one(client: httpx.AsyncClient, one: Asked, kind: float, draw: random.Random, book: Book) -> None:
    if kind < WRONG:
        status, said = await ask(client, one)
        return _tell(book, one, status, "" if status == 400 else f"status {status}: {said}", "refused")
    book.features.update(one.features)
    if kind < WRONG + CANCELLED:
        await leave(client, one, draw)
        book.ends["left"] += 1
        return None
    status, said = await ask(client, one)
    if status == 429:
        book.ends["429"] += 1
        return None
    fault = one.fault(said) if status == 200 else f"status {status}: {said}"
    if not fault and kind > 1 - TWICE:
        again, same = await ask(client, one)
        if again == 200 and one.told(same) != one.told(said):
            fault = f"asked twice: {one.told(said)!r} and {one.told(same)!r}"
    return _tell(book, one, status, fault, "answered")


def _tell(book: Book, one: Asked, status: int, fault: str, end: str) -> None:
    if fault:
        book.fault(fault[:700], one.body)
    else:
        book.ends[end if status in (200, 400) else str(status)] += 1


async def drive(
    url: str, requests: int, at_once: int, seed: int, book: Book | None = None, models: Sequence[str] = ()
) -> Book:
    """Asks the server at `url`, now and then for one of its `models`; `book` is written as it goes."""
    book, numbers = book or Book(), iter(range(requests))
    async with httpx.AsyncClient(base_url=url, timeout=JOB_S, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one_client(client, numbers, seed, book, models) for _ in range(at_once)))
    return book


def left_held(url: str, within_s: float) -> dict[str, float]:
    """Pages that nobody gives back, and programs compiled after ready."""
    end_s = time.monotonic() + within_s
    while (held := soak_watch.held(url)) and time.monotonic() < end_s:
        time.sleep(0.5)
    recompiles = {name: value for name, value in soak_watch.metrics(url).items() if name.startswith("recompiles")}
    return held | {name: value for name, value in recompiles.items() if value}


@dataclass(frozen=True, slots=True)
class Report:
    """One file, written again whenever there is more to tell."""

    described: dict[str, Any]
    began_s: float

    def write(self, book: Book, **more: Any) -> dict[str, Any]:
        seconds = round(time.monotonic() - self.began_s, 1)
        told = {"requests": REQUESTS.value, "seconds": seconds, **book.told(), **more, **self.described}
        if OUTPUT.value:
            report.write_json(OUTPUT.value, told)
        return told


async def watch(url: str, pid: int, book: Book, to: Report) -> None:
    """Writes down what there is, until it is cancelled."""
    while True:
        with suppress(TimeoutError, OSError):  # who asks for work is told of a server that does not answer
            book.samples.append(await asyncio.to_thread(soak_watch.watched, url, {"server": pid}, to.began_s))
        to.write(book, finished=False)
        await asyncio.sleep(TOLD_EVERY_S)


async def asked_of(running: Running, url: str, book: Book, to: Report) -> None:
    looks = asyncio.create_task(watch(url, running.process.pid, book, to))
    await drive(url, REQUESTS.value, AT_ONCE.value, SEED.value, book, names())
    looks.cancel()
    await asyncio.wait([looks])


def names() -> list[str]:
    return [f"adapter-{number}" for number in range(ADAPTERS.value)]


def lora(folder: Path) -> list[str]:
    """The flags of as many random adapters as there are names, one more than have room in a step."""
    if not ADAPTERS.value:
        return []
    model = read_model(Path(MODEL.value) if MODEL.value else EMBEDDED_FOLDER)
    written = [f"{name}={adapters.write(folder / name, model, seed, rank=4)}" for seed, name in enumerate(names())]
    return [f"--lora={','.join(written)}", f"--max_loras={max(1, ADAPTERS.value - 1)}", "--max_lora_rank=4"]


def run(running: Running, url: str) -> int:
    asyncio.run(running.until_ready(START_S))
    book, to = Book(), Report(machine.described(), time.monotonic())
    asyncio.run(asked_of(running, url, book, to))
    seconds = round(time.monotonic() - to.began_s, 1)
    held, mistakes = left_held(url, SETTLE_S), running.log.read_text(errors="replace").count("Traceback")
    wrong = {"tracebacks": mistakes, "held": held, "grown": book.grown()}
    print(json.dumps(to.write(book, finished=True, **wrong) | {"seconds": seconds}, indent=1))
    return int(bool(book.faults or any(wrong.values())))


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended takes its server along
    port = free_port()
    given = [f"--model={MODEL.value}"] if MODEL.value else []
    given += ["--mesh=prefill:tp1,decode:tp1", f"--speculative={SPECULATIVE.value}", "--grpc_port=-1"]
    given += ["--max_model_len=512", "--kv_tokens=4096", "--page_size=16", "--log_level=warning", "--queue_limit=256"]
    with tempfile.TemporaryDirectory() as folder:
        given += ["--embeddings=mean", *lora(Path(folder)), f"--http_port={port}"]
        words = (sys.executable, "-m", "jdisagg.launch", *given)
        running = start(Command(words, port, "/ready"), Path(folder) / "server.log")
        try:
            return run(running, f"http://127.0.0.1:{port}")
        finally:
            running.stop()


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
