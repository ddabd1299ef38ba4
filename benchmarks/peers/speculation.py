"""Drafts by n-grams beside vLLM's, each beside itself without: `python -m benchmarks.peers.speculation --help`.

    python -m benchmarks.peers.speculation --model=DIR/smollm2 --vllm_python=VENV/bin/python --output=peers_drafts.json

One engine at a time, each started anew in every round and asked for the same bursts of greedy answers: prompts that
their answers copy from, and prompts that are new (those of benchmarks.speculation). Tokens/s are of a whole burst,
prompts included. How much an engine gains is told by its own two rows, which engine is quicker by both.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report
from benchmarks.load import closed_loop
from benchmarks.peers import contestants
from benchmarks.peers.contestants import Served
from benchmarks.peers.processes import Running, ServerFailed, running
from benchmarks.speculation import prompts
from benchmarks.workload import Job

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", None, "checkpoint folder of a tokenizer and weights", required=True, flag_values=FLAGS)
flags.DEFINE_string("vllm_python", "", "interpreter of an environment with vLLM's CPU build", flag_values=FLAGS)
flags.DEFINE_string("mesh", "prefill:tp1,decode:tp1", "ours", flag_values=FLAGS)
flags.DEFINE_list("kinds", ["ngram:3"], "ours, as --speculative says them", flag_values=FLAGS)
flags.DEFINE_integer("guessed", 3, "tokens that vLLM's n-grams guess", 1, flag_values=FLAGS)
flags.DEFINE_list("streams", ["1", "4", "8"], "answers at once", flag_values=FLAGS)
flags.DEFINE_integer("tokens", 64, "of an answer", 1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 2, "times each engine is started", 1, flag_values=FLAGS)
flags.DEFINE_integer("repeats", 2, "bursts in a round, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "everywhere", flag_values=FLAGS)
flags.DEFINE_float("start_timeout_s", 300.0, "longest start of a server", flag_values=FLAGS)
flags.DEFINE_float("limit_s", 3600.0, "longest time for everything", flag_values=FLAGS)
flags.DEFINE_string("cache_dir", "", "for vLLM's caches and all logs; empty: a temporary folder", flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

OFF = "off"
WORKS = ("copies", "new")


@dataclass(frozen=True, slots=True)
class Engine:
    """A server, and what it is compared with: the one of the same `family` whose drafts are OFF."""

    family: str
    drafts: str
    served: Served


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over all bursts; `ratio` over the same engine without drafts."""

    engine: str
    drafts: str
    work: str
    streams: int
    tokens_per_s: float
    ratio: float


Measured = dict[tuple[str, str, str, int], list[float]]  # tokens/s by engine, drafts, work and streams


def line_up(cache: str) -> Iterator[Engine]:
    """Each engine without drafts, then with."""
    slots = max(map(int, FLAGS.streams))
    for kind in (OFF, *FLAGS.kinds):
        ours = contestants.ours(FLAGS.model, FLAGS.mesh, FLAGS.dtype, slots, [f"--speculative={kind}"])
        yield Engine("jdisagg", kind, ours)
    if FLAGS.vllm_python:
        for guessed in (0, FLAGS.guessed):
            more = contestants.vllm_ngrams(guessed) if guessed else ()
            served = contestants.vllm(FLAGS.vllm_python, FLAGS.model, FLAGS.dtype, cache, eager=False, more=more)
            yield Engine("vLLM", f"ngram:{guessed}" if guessed else OFF, served)


async def measure(engine: Engine, logs: Path, measured: Measured) -> None:
    """One start of one engine, and all its bursts. Raises ServerFailed."""
    async with running(engine.served.commands, logs, FLAGS.start_timeout_s) as servers:
        for work in WORKS:
            for streams in map(int, FLAGS.streams):
                speeds = [await burst(engine, servers, work, streams) for _ in range(FLAGS.repeats + 1)]
                measured.setdefault((engine.family, engine.drafts, work, streams), []).extend(speeds[1:])


async def burst(engine: Engine, servers: Sequence[Running], work: str, streams: int) -> float:
    """Output tokens/s of so many answers at once."""
    jobs = [Job(prompt, FLAGS.tokens) for prompt in prompts(work, streams)]
    found = await closed_loop(jobs, streams, engine.served.ask(FLAGS.start_timeout_s))
    if failed := [each.error for each in found.samples if not each.ok]:
        raise ServerFailed(f"{engine.served.name}, {work}: {failed[0]}")
    return sum(each.num_tokens for each in found.samples) / found.wall_s


async def measure_all(cache: Path, measured: Measured, console: Console) -> None:
    async with asyncio.timeout(FLAGS.limit_s):
        for number in range(1, FLAGS.rounds + 1):
            for engine in line_up(str(cache)):
                console.print(f"[dim]round {number}: {engine.family}, {engine.drafts} ...[/]", highlight=False)
                try:
                    await measure(engine, cache, measured)
                except ServerFailed as error:
                    console.print(f"[red]{engine.family}, {engine.drafts}: {error}[/]", highlight=False)


def rows_of(measured: Measured) -> list[Row]:
    """In the order of the line-up; nothing of an engine that has no row without drafts."""
    medians = {key: statistics.median(speeds) for key, speeds in measured.items()}
    return [
        Row(*key, speed, speed / medians[key[0], OFF, *key[2:]])
        for key, speed in medians.items()
        if (key[0], OFF, *key[2:]) in medians
    ]


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title=f"{Path(FLAGS.model).name}, {FLAGS.dtype}, {FLAGS.tokens} tokens an answer")
    for name in ("work", "streams", "engine", "drafts", "tokens/s", "beside off"):
        shown.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (row.work, row.streams)):
        figures = f"{row.tokens_per_s:,.1f}", f"{row.ratio:.2f}"
        shown.add_row(row.work, str(row.streams), row.engine, row.drafts, *figures)
    return shown


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    about, console, measured = machine.described(), Console(), Measured()
    with tempfile.TemporaryDirectory(prefix="jdisagg-drafts-") as temporary:
        cache = Path(FLAGS.cache_dir or temporary)
        cache.mkdir(parents=True, exist_ok=True)
        asyncio.run(measure_all(cache, measured, console))
    rows = rows_of(measured)
    console.print(table(rows))
    if FLAGS.output:
        written = {"dtype": FLAGS.dtype, "tokens": FLAGS.tokens, "rows": [asdict(row) for row in rows]}
        report.write_json(FLAGS.output, about | {"model": Path(FLAGS.model).name} | written)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
