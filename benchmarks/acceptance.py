"""Whether guesses are as good after a disturbance as without: pairs of the same greedy answer, undisturbed and not.

A greedy answer is the same tokens whatever happens to it, so that its rows are to draw as many tokens each: what a row
draws is told of each quarter of an answer, undisturbed and disturbed, and the ratio. Disturbed how:

  found      its first half comes as the prompt of a new request, whose pages are there already
  anew       so, and no page of it is there: all of it is computed in chunks. What is undisturbed is to be as good as
             this where guesses get worse along an answer: it is then the answer's doing
  lost       the decode worker that draws it is lost half way, and another goes on
  preempted  pages do not do for all answers: some give theirs back and are computed again
  parked     so, with room below HBM

That it did happen is looked at: pages that were there already, a worker or pages lost, pages that came up again. What
did not is told as a fault, and the exit code is 1. Counts of greedy answers: a machine's load does not change them.

    python -m benchmarks.acceptance --output=benchmarks/results/acceptance_embedded.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.drawn_rows import QUARTERS, Rows, mean, quarters
from benchmarks.machine import described
from benchmarks.speculation import NAMES, prompt
from jdisagg import devices
from jdisagg.core.request import Request, RequestId, SamplingParams
from jdisagg.core.settings import Settings
from jdisagg.named_models import located
from jdisagg.serve.deploy.assemble import build
from jdisagg.serve.deploy.deployment import mesh_of, resolve_deployment
from jdisagg.serve.driver.local_service import LocalService

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

SPARED = 64  # tokens of company's room that it leaves, and of a prompt that need not be found: less than a page's
PATIENCE_S = 3600.0  # who has no pages may wait until others have ended, on a busy machine
FOUND, ANEW, LOST, PREEMPTED, PARKED = "found", "anew", "lost", "preempted", "parked"
flags.DEFINE_list("disturbances", [FOUND, ANEW, LOST, PREEMPTED, PARKED], "what happens to answers", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Row:
    """Of one kind of guess and prompts and one disturbance: tokens a row drew in each quarter of the answers, None
    where nothing of them was drawn. `ratio`: tokens a row over those undisturbed, of all that was drawn."""

    speculative: str
    work: str
    disturbed: str
    answers: int
    times: int  # that they were disturbed, together
    cached: int  # tokens that prefill found there when they began again; what a decode worker kept is not in it
    undisturbed: list[float | None]
    tokens_a_row: list[float | None]
    ratio: float
    differing: int  # tokens unlike the undisturbed answers'


@dataclass(frozen=True, slots=True)
class Answer:
    """Its tokens, and what rows drew of them by quarters."""

    work: str
    tokens: list[int]
    drawn: list[list[int]]
    times: int = 1
    cached: int = 0


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
    cached = sum(answer.cached for _, answer in pairs)
    figures = [mean(each) for each in before], [mean(each) for each in after]
    return Row(kind, work, disturbed, len(pairs), times, cached, *figures, found / undisturbed, differing)


def missing(disturbed: str, row: Row, least: int, rows: Rows) -> str:
    """What its name says and did not happen to the answers of a row; "" where it did. least: tokens to be found."""
    yielded = sum(rows.preempted.values())
    match disturbed:
        case _ if disturbed == FOUND and row.cached < least:
            return f"{row.cached} tokens were there already, of {least}"
        case _ if disturbed == ANEW and row.cached:
            return f"{row.cached} tokens were there already"
        case _ if disturbed == LOST and yielded:
            return f"pages did not do for {yielded} answers: no worker was lost in their place"
        case _ if disturbed in (PREEMPTED, PARKED) and yielded < row.times:
            return f"{row.times} answers were begun again, and {yielded} had given back their pages"
        case _ if disturbed == PARKED and not rows.back:
            return "no page came up again"
        case _:
            return ""


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
        times, cached = self.rows.times(request), self.rows.found(request, 0 if first else 1)
        return Answer(work, tokens, drawn, 1 if first else times, cached)

    async def lose(self, place: int) -> None:
        """Loses the worker that draws most, once an answer is so long."""
        while not any(rows and rows[-1].place >= place for rows in [*self.rows.of.values()]):
            await asyncio.sleep(0.005)
        await asyncio.to_thread(self.service.driver.give_up, self.rows.drawing())


@asynccontextmanager
async def opened(kind: str, mesh: str, **sizes: Any) -> AsyncGenerator[Stack]:
    speculative, _, draft_kv = kind.partition("/")
    asked: dict[str, Any] = {"model": FLAGS.model, "mesh": mesh, "speculative": speculative, **sizes}
    asked |= {"max_model_len": FLAGS.max_model_len, "max_num_seqs": max(2, len(FLAGS.works) * FLAGS.answers)}
    asked |= dict.fromkeys(("queue_timeout_s", "stall_timeout_s", "prefill_timeout_s", "handoff_timeout_s"), PATIENCE_S)
    settings = located(Settings(**asked, draft_kv=draft_kv or "auto"), Console(stderr=True))
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
Answers = Mapping[str, Answer]


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


@dataclass
class Book:
    """All that is told, written whenever there is more: one that is cut tells what it saw until then."""

    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)

    def add(self, kind: str, disturbed: str, whole: Answers, found: Answers, rows: Rows) -> None:
        """Of each kind of prompts, those answers that were disturbed at all; where none was, that is a fault."""
        for work in dict.fromkeys(each.work for each in whole.values()):
            pairs = [(whole[name], each) for name, each in found.items() if each.work == work and each.times]
            print(f"{kind}: {work}, {disturbed}: {len(pairs)} answers", file=sys.stderr, flush=True)
            row = compared(kind, work, disturbed, pairs) if pairs else None
            least = sum(len(one.tokens) - len(other.tokens) - SPARED for one, other in pairs)
            why = missing(disturbed, row, least, rows) if row else "no answer was begun again"
            self.rows += [row] if row else []
            self.faults += [f"{kind}, {work}, {disturbed}: {why}"] if why else []
        self.write()

    def write(self) -> None:
        told = {**self.about, "faults": self.faults, "rows": [asdict(row) for row in self.rows]}
        if FLAGS.output:
            Path(FLAGS.output).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


async def measure(kind: str, book: Book) -> None:
    """All that is done to one kind of guess."""
    async with opened(kind, "prefill:tp1,decode:2xtp1") as stack:
        prompts = prompts_of(stack.service)
        whole = await all_of(stack, prompts)
        assert not any(each.times for each in whole.values()), "nothing disturbed them"
        for name, salt in ((FOUND, ""), (ANEW, "other")):
            if name in FLAGS.disturbances:
                book.add(kind, name, whole, await second_halves(stack, prompts, whole, salt), stack.rows)
        if LOST in FLAGS.disturbances:
            stack.rows.forget()
            lost = asyncio.create_task(stack.lose(min(each.half for each in prompts.values())))
            book.add(kind, LOST, whole, await all_of(stack, prompts, "lost"), stack.rows)
            await lost
    await crowded(kind, prompts, whole, book)


async def crowded(kind: str, prompts: Prompts, whole: Answers, book: Book) -> None:
    """Pages do not do for all answers, or for a single one and another beside it."""
    tokens = sum(len(each.prompt) + each.tokens for each in prompts.values())
    few = {"kv_tokens": max(FLAGS.max_model_len, int(FLAGS.room * tokens)), "reserve_tokens": 64}
    for name, more in ((PREEMPTED, {}), (PARKED, {"dram_tokens": 2 * FLAGS.max_model_len + tokens})):
        if name not in FLAGS.disturbances:
            continue
        async with opened(kind, "prefill:tp1,decode:tp1", **few, **more) as stack:
            beside = [] if len(prompts) > 1 else [asyncio.create_task(company(stack, prompts))]
            await asyncio.sleep(1.0 if beside else 0.0)  # who came last gives back its pages
            book.add(kind, name, whole, await all_of(stack, prompts), stack.rows)
            await asyncio.gather(*beside)


async def company(stack: Stack, prompts: Prompts) -> None:
    """An answer to half of a longest sequence that goes on to its end: the prompts said again and again."""
    said, half = [token for each in prompts.values() for token in each.prompt], FLAGS.max_model_len // 2
    await stack.ask("company", (said * half)[:half], half - SPARED)


# ------------------------------------------------------------ what is told


def told(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="tokens a row in each quarter of the answers")
    for name in ("speculative", "work", "disturbed", "times", "there", "undisturbed", "disturbed", "ratio", "differ"):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = (" ".join(map(told, each)) for each in (row.undisturbed, row.tokens_a_row))
        counts = str(row.times), str(row.cached)
        shown.add_row(
            row.speculative, row.work, row.disturbed, *counts, *figures, f"{row.ratio:.3f}", str(row.differing)
        )
    return shown


def main() -> int:
    book = Book(about={**described(), "model": Path(FLAGS.model).name or "embedded", "works": FLAGS.works})
    for kind in FLAGS.kinds:
        asyncio.run(measure(kind, book))
    Console(width=160).print(table(book.rows))
    print(*book.faults, sep="\n", file=sys.stderr)
    return int(bool(book.faults))


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
