"""Whether guesses are as good after a disturbance as without: pairs of the same greedy answer, undisturbed and not.

A greedy answer is the same tokens whatever happens to it, so that its rows are to draw as many tokens each: what a row
draws is told of each quarter of an answer, undisturbed and disturbed, and the ratio. Disturbed how:

  found      its first half comes as the prompt of a new request, whose pages are there already
  anew       so, and no page of it is there: all of it is computed in chunks. What is undisturbed is to be as good as
             this where guesses get worse along an answer: it is then the answer's doing
  lost       the decode worker that draws it is lost half way, and another goes on
  preempted  pages do not do for all answers: some give theirs back and are computed again
  parked     so, with room below HBM

Counts of greedy answers: a machine's load does not change them.

    python -m benchmarks.acceptance --output=benchmarks/results/acceptance_embedded.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from benchmarks.speculation import NAMES, prompt
from jdisagg import devices
from jdisagg.core.events import EmitTokens, Send
from jdisagg.core.messages import Preempted
from jdisagg.core.request import Attempt, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.settings import Settings
from jdisagg.serve.build import build
from jdisagg.serve.deployment import mesh_of, resolve_deployment
from jdisagg.serve.local import LocalService

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "", "folder; empty: the embedded model", flag_values=FLAGS)
flags.DEFINE_list(
    "kinds",
    ["ngram:3", "draft/ship", "draft/rebuild", "eagle"],
    "what --speculative says, and behind a slash --draft_kv",
    flag_values=FLAGS,
)
flags.DEFINE_list(
    "works",
    ["copies:1500", "new:2000"],
    "kinds of prompts, as benchmarks.speculation's, and tokens of the answers",
    flag_values=FLAGS,
)
flags.DEFINE_integer("answers", 2, "to each kind of prompt", 1, len(NAMES), flag_values=FLAGS)
flags.DEFINE_integer("max_model_len", 2048, "of a prompt and its answer", 1, flag_values=FLAGS)
flags.DEFINE_float("room", 0.6, "of the tokens that all answers want, where they do not fit", 0.1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

QUARTERS = 4
PATIENCE_S = 3600.0  # who has no pages may wait until others have ended, on a busy machine
FOUND, ANEW, LOST, PREEMPTED, PARKED = "found", "anew", "lost", "preempted", "parked"


@dataclass(frozen=True, slots=True)
class Row:
    """Of one kind of guess and prompts and one disturbance: tokens a row drew in each quarter of the answers, None
    where nothing of them was drawn. `ratio`: tokens a row over those undisturbed, of all that was drawn."""

    speculative: str
    work: str
    disturbed: str
    answers: int
    times: int  # that they were disturbed, together
    undisturbed: list[float | None]
    tokens_a_row: list[float | None]
    ratio: float
    differing: int  # tokens unlike the undisturbed answers'


@dataclass(frozen=True, slots=True)
class Drawn:
    """By one row of a step: its first token's place in the answer, and how many."""

    place: int
    tokens: int


@dataclass
class Rows:
    """Observes a driver: what each row of a step drew, by request. An attempt's first token is its prompt's."""

    of: dict[RequestId, list[Drawn]] = field(default_factory=dict)
    attempts: dict[Attempt, WorkerId] = field(default_factory=dict)  # and the worker that drew of each last
    preempted: Counter[RequestId] = field(default_factory=Counter)

    def __call__(self, actor: str, item: Any, now_s: float) -> None:
        match item:
            case EmitTokens(delta, worker) if delta.sampled:
                if delta.attempt in self.attempts:
                    rows = self.of.setdefault(delta.attempt.request_id, [])
                    rows.append(Drawn(delta.index, len(delta.sampled)))
                self.attempts[delta.attempt] = worker
            case Send(message=Preempted(attempt)):
                self.preempted[attempt.request_id] += 1
            case _:
                return

    def forget(self) -> None:
        self.of.clear()
        self.attempts.clear()

    def drawing(self) -> WorkerId:
        """That has most of the answers."""
        last = {attempt.request_id: worker for attempt, worker in self.attempts.items()}
        return Counter(last.values()).most_common(1)[0][0]

    def times(self, request: RequestId) -> int:
        """That it was begun again."""
        return sum(attempt.request_id == request for attempt in self.attempts) - 1


def quarters(rows: Iterable[Drawn], tokens: int, first: int = 0) -> list[list[int]]:
    """What rows drew in each quarter of an answer of so many tokens; their places count from its token `first` on."""
    found: list[list[int]] = [[] for _ in range(QUARTERS)]
    for row in rows:
        found[min(QUARTERS - 1, QUARTERS * (first + row.place) // tokens)].append(row.tokens)
    return found


def mean(drawn: Sequence[int]) -> float | None:
    return sum(drawn) / len(drawn) if drawn else None


@dataclass(frozen=True, slots=True)
class Answer:
    """Its tokens, and what rows drew of them by quarters."""

    work: str
    tokens: list[int]
    drawn: list[list[int]]
    times: int = 1


def together(answers: Iterable[Answer]) -> list[list[int]]:
    """What rows of all drew, by quarters."""
    drawn = [each.drawn for each in answers]
    return [[tokens for quarters in drawn for tokens in quarters[quarter]] for quarter in range(QUARTERS)]


def compared(kind: str, work: str, disturbed: str, pairs: Sequence[tuple[Answer, Answer]]) -> Row:
    """Of pairs (undisturbed, disturbed); of the latter there may be the answers' ends alone."""
    before, after = (together(side) for side in zip(*pairs, strict=True))
    there = [quarter for quarter, drawn in enumerate(after) if drawn]
    undisturbed, found = (mean([each for quarter in there for each in side[quarter]]) for side in (before, after))
    assert undisturbed and found, "something was drawn"
    differing = sum(
        mine != same for one, other in pairs for mine, same in zip(other.tokens[::-1], one.tokens[::-1], strict=False)
    )
    times = sum(answer.times for _, answer in pairs)
    figures = [mean(each) for each in before], [mean(each) for each in after]
    return Row(kind, work, disturbed, len(pairs), times, *figures, found / undisturbed, differing)


# ------------------------------------------------------------ a stack


class Stack:
    """One way of decoding, and what its rows draw."""

    def __init__(self, service: LocalService, rows: Rows) -> None:
        self.service, self.rows = service, rows

    async def ask(self, name: str, tokens: Sequence[int], length: int, salt: str = "") -> list[int]:
        """One greedy answer of so many tokens, its end ignored."""
        sampling, found = SamplingParams(max_tokens=length, temperature=0.0), list[int]()
        request = Request(RequestId(name), tuple(tokens), sampling, self.service.now_s(), cache_salt=salt)
        finish = None
        async for update in self.service.stream(request):
            found += [each.token for each in update.delta.sampled]
            finish = update.finish or finish
        assert len(found) == length, f"{name} ended after {len(found)} tokens of {length}: {finish}"
        return found

    def answer(self, name: str, work: str, tokens: list[int], first: int = 0) -> Answer:
        request = RequestId(name)
        drawn = quarters(self.rows.of[request], first + len(tokens), first)
        return Answer(work, tokens, drawn, 1 if first else self.rows.times(request))

    async def lose(self, place: int) -> None:
        """Loses the worker that draws most, once an answer is so long."""
        while not any(rows and rows[-1].place >= place for rows in [*self.rows.of.values()]):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(self.service.driver.give_up, self.rows.drawing())


@asynccontextmanager
async def opened(kind: str, mesh: str, **sizes: Any) -> AsyncGenerator[Stack]:
    speculative, _, draft_kv = kind.partition("/")
    asked: dict[str, Any] = {"model": FLAGS.model, "mesh": mesh, "speculative": speculative, **sizes}
    asked |= {"max_model_len": FLAGS.max_model_len, "max_num_seqs": len(FLAGS.works) * FLAGS.answers}
    asked |= dict.fromkeys(("stall_timeout_s", "prefill_timeout_s", "handoff_timeout_s"), PATIENCE_S)
    settings = Settings(**asked, draft_kv=draft_kv or "auto")
    settings.check()
    found = devices.prepare(settings.platform, mesh_of(settings).num_devices, settings.compile_cache_dir)
    deployment = resolve_deployment(settings, found[0].platform, devices.memory_bytes(found[0]))
    rows = Rows()
    service = build(deployment, settings, found, observers=[rows])
    service.start()
    try:
        yield Stack(service, rows)
        assert service.recompiles() == 0, f"{kind} on {mesh} compiled something while it ran"
    finally:
        service.stop()


# ------------------------------------------------------------ what happens to answers


@dataclass(frozen=True, slots=True)
class Asked:
    """A kind of work, its prompt, and tokens of the answer."""

    work: str
    prompt: list[int]
    tokens: int

    @property
    def half(self) -> int:
        return self.tokens // 2


Prompts = Mapping[str, Asked]  # by name


def prompts_of(service: LocalService) -> Prompts:
    works = [(work, int(tokens)) for work, _, tokens in (each.partition(":") for each in FLAGS.works)]
    return {
        f"{work}-{index}": Asked(work, service.tokenizer.encode(prompt(work, NAMES[index], index)), tokens)
        for work, tokens in works
        for index in range(FLAGS.answers)
    }


async def all_of(stack: Stack, prompts: Prompts, salt: str = "") -> dict[str, Answer]:
    """The whole answers, asked for together."""
    asked = [stack.ask(name + salt, each.prompt, each.tokens, salt) for name, each in prompts.items()]
    found = await asyncio.gather(*asked)
    pairs = zip(prompts.items(), found, strict=True)
    return {name: stack.answer(name + salt, each.work, tokens) for (name, each), tokens in pairs}


async def second_halves(stack: Stack, prompts: Prompts, whole: Mapping[str, Answer], salt: str) -> dict[str, Answer]:
    """What follows the first half of each answer, which is a new request's prompt."""

    async def one(name: str) -> Answer:
        asked, again = prompts[name], f"{name}-again{salt}"
        prompt = [*asked.prompt, *whole[name].tokens[: asked.half]]
        found = await stack.ask(again, prompt, asked.tokens - asked.half, salt)
        return stack.answer(again, asked.work, found, asked.half)

    return dict(zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True))


async def measure(kind: str) -> list[Row]:
    """All that is done to one kind of guess."""
    found = list[Row]()
    async with opened(kind, "prefill:tp1,decode:2xtp1") as stack:
        prompts = prompts_of(stack.service)
        whole = await all_of(stack, prompts)
        assert not any(each.times for each in whole.values()), "nothing disturbed them"
        for name, salt in ((FOUND, ""), (ANEW, "other")):
            halves = await second_halves(stack, prompts, whole, salt)
            found += rows_of(kind, name, whole, halves)
        stack.rows.forget()
        lost = asyncio.create_task(stack.lose(min(each.half for each in prompts.values())))
        found += rows_of(kind, LOST, whole, await all_of(stack, prompts, "lost"))
        await lost
    tokens = sum(len(each.prompt) + each.tokens for each in prompts.values())
    few = {"kv_tokens": int(FLAGS.room * tokens), "reserve_tokens": 64}
    for name, more in ((PREEMPTED, {}), (PARKED, {"dram_tokens": tokens})):
        async with opened(kind, "prefill:tp1,decode:tp1", **few, **more) as stack:
            found += rows_of(kind, name, whole, await all_of(stack, prompts))
    return found


def rows_of(kind: str, disturbed: str, whole: Mapping[str, Answer], found: Mapping[str, Answer]) -> list[Row]:
    """Of each kind of prompts, those answers that were disturbed at all."""
    rows = []
    for work in dict.fromkeys(each.work for each in whole.values()):
        pairs = [(whole[name], each) for name, each in found.items() if each.work == work and each.times]
        rows += [compared(kind, work, disturbed, pairs)] if pairs else []
        print(f"{kind}: {work}, {disturbed}: {len(pairs)} answers", file=sys.stderr, flush=True)
    return rows


# ------------------------------------------------------------ what is told


def told(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="tokens a row in each quarter of the answers")
    for name in ("speculative", "work", "disturbed", "answers", "times", "undisturbed", "disturbed", "ratio", "differ"):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = (" ".join(map(told, each)) for each in (row.undisturbed, row.tokens_a_row))
        counts = str(row.answers), str(row.times)
        shown.add_row(
            row.speculative, row.work, row.disturbed, *counts, *figures, f"{row.ratio:.3f}", str(row.differing)
        )
    return shown


def main() -> int:
    report: dict[str, Any] = {**described(), "model": Path(FLAGS.model).name or "embedded", "works": FLAGS.works}
    rows = list[Row]()
    for kind in FLAGS.kinds:
        rows += asyncio.run(measure(kind))
        if FLAGS.output:
            report["rows"] = [asdict(row) for row in rows]
            Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Console(width=160).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
