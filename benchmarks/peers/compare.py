"""Engines side by side on one machine: `python -m benchmarks.peers.compare --help`.

    python -m benchmarks.peers.compare --models=DIR/small,DIR/base --vllm_python=VENV/bin/python \
        --hf_python=VENV/bin/python --output=peers.json

One engine at a time, A B A B: every round starts each engine anew, warms it, and asks for --repeats bursts of 8
requests (128 tokens in, 64 out, greedy, new prompts each time). Medians over all bursts; CPU seconds are those of the
server's processes. Everything stays on loopback, and every server is ended, also by Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report
from benchmarks.figures import SLO, Figures, summed_up
from benchmarks.load import closed_loop
from benchmarks.peers import contestants
from benchmarks.peers.contestants import Contestant, Generated, Served
from benchmarks.peers.processes import ServerFailed, running, signal_group
from benchmarks.workload import Job, Lengths, Workload

FLAGS = flags.FlagValues()
MODELS = flags.DEFINE_list(
    "models", None, "checkpoint folders (make_models.py makes them)", required=True, flag_values=FLAGS
)
VLLM_PYTHON = flags.DEFINE_string(
    "vllm_python", "", "interpreter of an environment with vLLM's CPU build", flag_values=FLAGS
)
HF_PYTHON = flags.DEFINE_string(
    "hf_python", "", "interpreter of an environment with torch and transformers", flag_values=FLAGS
)
LLAMACPP = flags.DEFINE_string("llamacpp_server", "", "llama.cpp's server binary, with --gguf", flag_values=FLAGS)
GGUF = flags.DEFINE_list("gguf", [], "a GGUF file for each of --models", flag_values=FLAGS)
MESHES = flags.DEFINE_string(
    "meshes", "colocated:1xtp1;prefill:tp1,decode:pp2", "ours, apart by ';'", flag_values=FLAGS
)
OURS_FLAGS = flags.DEFINE_string("ours_flags", "", "more flags of jdisagg.launch, apart by spaces", flag_values=FLAGS)
PEERS = flags.DEFINE_list(
    "peers", ["eager", "default", "generate", "llamacpp", "pair"], "which of the peers take part", flag_values=FLAGS
)
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "of weights and activations, everywhere", flag_values=FLAGS
)
ROUNDS = flags.DEFINE_integer("rounds", 2, "times each engine is started", lower_bound=1, flag_values=FLAGS)
REPEATS = flags.DEFINE_integer("repeats", 3, "bursts measured in each round", lower_bound=1, flag_values=FLAGS)
STREAMS = flags.DEFINE_integer("streams", 8, "requests of a burst, all at once", lower_bound=1, flag_values=FLAGS)
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 128, "of each request", lower_bound=1, flag_values=FLAGS)
OUTPUT_TOKENS = flags.DEFINE_integer("output_tokens", 64, "of each request", lower_bound=1, flag_values=FLAGS)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 8192, "token ids are drawn below this", lower_bound=2, flag_values=FLAGS
)
START_TIMEOUT_S = flags.DEFINE_float("start_timeout_s", 240.0, "longest start of a server", flag_values=FLAGS)
BURST_TIMEOUT_S = flags.DEFINE_float("burst_timeout_s", 120.0, "longest answer", flag_values=FLAGS)
LIMIT_S = flags.DEFINE_float("limit_s", 3600.0, "longest time for everything", flag_values=FLAGS)
CACHE_DIR = flags.DEFINE_string(
    "cache_dir", "", "for the peers' caches and all logs; empty: a temporary folder", flag_values=FLAGS
)
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write", flag_values=FLAGS)

NO_SLO = SLO(ttft_ms=1e9, tpot_ms=1e9)
SCRIPT = Path(__file__).parent / "hf_generate.py"


@dataclass(frozen=True, slots=True)
class Result:
    """One burst of one engine. Latencies in milliseconds, None where the engine streams nothing."""

    engine: str
    round: int
    output_tokens_per_s: float
    cpu_s: float
    tokens: int
    failed: int = 0
    ttft_ms_p50: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p99: float | None = None


def bursts(model: str, round_number: int) -> Iterator[list[Job]]:
    """A warm-up and the measured bursts: the same for every engine, new in every round."""
    lengths = Lengths(PROMPT_TOKENS.value, PROMPT_TOKENS.value), Lengths(OUTPUT_TOKENS.value, OUTPUT_TOKENS.value)
    workload = Workload(*lengths, VOCAB_SIZE.value)
    for number in range(REPEATS.value + 1):
        yield workload.draw(STREAMS.value, f"{Path(model).name}-{round_number}-{number}")


def line_up(model: str, gguf: str, cache: str) -> list[Contestant]:
    """Everybody that the flags name, ours first."""
    cores = sorted(os.sched_getaffinity(0))
    dtype, wanted, streams = DTYPE.value, PEERS.value, STREAMS.value
    more = OURS_FLAGS.value.split()
    found: list[Contestant] = [contestants.ours(model, m, dtype, streams, more) for m in MESHES.value.split(";") if m]
    python = VLLM_PYTHON.value
    if python and "eager" in wanted:
        found.append(contestants.vllm(python, model, dtype, cache, eager=True))
    if python and "default" in wanted:
        found.append(contestants.vllm(python, model, dtype, cache, eager=False))
    if HF_PYTHON.value and "generate" in wanted:
        found.append(contestants.generate(HF_PYTHON.value, model, cache))
    if LLAMACPP.value and gguf and "llamacpp" in wanted:
        found.append(contestants.llamacpp(LLAMACPP.value, gguf, len(cores), streams))
    if python and "pair" in wanted and len(cores) > 1:
        found.append(contestants.vllm_pair(python, model, dtype, cache, cores))
    return found


async def measure(contestant: Contestant, model: str, round_number: int, logs: Path) -> list[Result]:
    """One start of one engine. Raises ServerFailed."""
    jobs = list(bursts(model, round_number))
    if isinstance(contestant, Generated):
        return await measure_generated(contestant, jobs, round_number, logs)
    return await measure_served(contestant, jobs, round_number, logs)


async def measure_served(served: Served, jobs: list[list[Job]], round_number: int, logs: Path) -> list[Result]:
    async with running(served.commands, logs, START_TIMEOUT_S.value) as servers:
        ask, results = served.ask(BURST_TIMEOUT_S.value), []
        for burst_jobs in jobs:
            before = sum(each.cpu_s() for each in servers)
            burst = await closed_loop(burst_jobs, STREAMS.value, ask)
            cpu_s = sum(each.cpu_s() for each in servers) - before
            errors = [each.error for each in burst.samples if not each.ok]
            if len(errors) == len(burst.samples):
                raise ServerFailed(f"{served.name} answered nothing: {errors[0]}")
            results.append(result_of(served.name, round_number, summed_up(burst, NO_SLO, cpu_s)))
    return results[1:]


def result_of(name: str, round_number: int, figures: Figures) -> Result:
    ttft, itl = figures.ttft_ms, figures.itl_ms
    return Result(
        name,
        round_number,
        figures.output_tokens_per_s,
        figures.server_cpu_s or 0.0,
        figures.output_tokens,
        figures.failed,
        ttft.p50 if ttft else None,
        itl.p50 if itl else None,
        itl.p99 if itl else None,
    )


async def measure_generated(generated: Generated, jobs: list[list[Job]], round_number: int, logs: Path) -> list[Result]:
    asked = {
        "model": generated.model,
        "dtype": DTYPE.value,
        "threads": machine.usable_cores(),
        "max_tokens": OUTPUT_TOKENS.value,
        "bursts": [[job.prompt for job in burst] for burst in jobs],
    }
    log = logs / "generate.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            generated.python,
            str(SCRIPT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **generated.environment},
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S.value + BURST_TIMEOUT_S.value * len(jobs)):
            out, _ = await process.communicate(json.dumps(asked).encode())
    except TimeoutError as error:
        raise ServerFailed(f"{generated.name}: {log.read_text(errors='replace')[-800:]}") from error
    finally:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    if process.returncode or len(rows) != len(jobs) - 1:
        raise ServerFailed(f"{generated.name}: {log.read_text(errors='replace')[-800:]}")
    name = generated.name
    return [Result(name, round_number, row["tokens"] / row["wall_s"], row["cpu_s"], row["tokens"]) for row in rows]


async def compare(model: str, gguf: str, cache: Path, console: Console) -> list[Result]:
    """All rounds of one model; an engine that fails is told of and left out of that round."""
    results: list[Result] = []
    for round_number in range(1, ROUNDS.value + 1):
        for each in line_up(model, gguf, str(cache)):
            console.print(f"[dim]{Path(model).name}, round {round_number}: {each.name} ...[/]", highlight=False)
            try:
                found = await measure(each, model, round_number, cache)
            except ServerFailed as error:
                console.print(f"[red]{each.name}: {error}[/]", highlight=False)
                continue
            rates = ", ".join(f"{one.output_tokens_per_s:.1f}" for one in found)
            console.print(f"  {rates} output tokens/s", highlight=False)
            results += found
    return results


COLUMNS = ("tok/s", "range", "CPU s", "TTFT", "ITL p50", "p99")


def table_of(title: str, results: Sequence[Result]) -> Table:
    """Medians over all bursts, one row an engine, in the order of the line-up."""
    table = Table(title=title, caption="medians of all bursts, latencies in ms; CPU s: of the server, one burst")
    table.add_column("engine", min_width=14, overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for engine in dict.fromkeys(each.engine for each in results):
        table.add_row(engine, *cells_of([each for each in results if each.engine == engine]))
    return table


def cells_of(mine: Sequence[Result]) -> list[str]:
    """One engine's cells, in the order of COLUMNS."""
    rates = [each.output_tokens_per_s for each in mine]
    return [
        f"{statistics.median(rates):.1f}",
        f"{min(rates):.0f}-{max(rates):.0f}",
        f"{statistics.median(each.cpu_s for each in mine):.1f}",
        *(median_cell(mine, field) for field in ("ttft_ms_p50", "itl_ms_p50", "itl_ms_p99")),
    ]


def median_cell(results: Sequence[Result], field: str) -> str:
    values = [value for each in results if (value := getattr(each, field)) is not None]
    if not values:
        return "-"
    median = statistics.median(values)
    return f"{median:.0f}" if median >= 100 else f"{median:.1f}"


async def compare_all(console: Console, cache: Path, written: dict[str, Any]) -> None:
    """Every model; what was measured goes into `written` as it is known, so that an early end keeps it."""
    ggufs = [*GGUF.value, *[""] * len(MODELS.value)]
    async with asyncio.timeout(LIMIT_S.value):
        for model, gguf in zip(MODELS.value, ggufs, strict=False):
            results = await compare(model, gguf, cache, console)
            written["models"][Path(model).name] = [asdict(each) for each in results]
            load = f"{STREAMS.value} x ({PROMPT_TOKENS.value} in + {OUTPUT_TOKENS.value} out)"
            console.print(table_of(f"{Path(model).name}, {DTYPE.value}: {load}", results))


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    console, written = Console(), machine.described() | {"dtype": DTYPE.value, "models": {}}
    with tempfile.TemporaryDirectory(prefix="jdisagg-peers-") as temporary:
        cache = Path(CACHE_DIR.value or temporary)
        cache.mkdir(parents=True, exist_ok=True)
        try:
            asyncio.run(compare_all(console, cache, written))
        except TimeoutError:
            print(f"not finished after --limit_s={LIMIT_S.value:g}; what was measured is kept", file=sys.stderr)
            return 1
        finally:
            if OUTPUT.value:
                report.write_json(OUTPUT.value, written)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
