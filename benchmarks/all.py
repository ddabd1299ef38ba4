"""Every table and plot of README and docs, measured again: `python -m benchmarks.all [--only=REGEX] [--small|--check]`.

Each benchmark runs by its own command, one after the other; its result goes to benchmarks/results/ with machine, date,
versions and command, and what moved against the last one is told. Then pages are made anew and every marked figure in
prose is held to the results. What needs something that is not given (--data_dir, --models, ...) is named and left out.

--small runs small editions into a scratch folder (under a minute) and compares what their files hold, not the figures;
--check runs nothing. Exit code 1: a benchmark failed, a page is behind, or no result backs a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.claims import claims, figures
from benchmarks.moved import moved
from benchmarks.stored import RESULTS
from benchmarks.tables import TABLES
from docs.generate import __main__ as pages

ROOT = Path(__file__).parent.parent
IMAGES = "docs/images"
PROVENANCE = ("date", "command", "machine", "versions")
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}  # of small editions: their figures are not looked at
OF_NO_MACHINE = ("published",)  # arithmetic and virtual time: the same everywhere
GIVEN = {
    "data_dir": "folder of the public traces (azure_llm_2023_conv.csv.gz and others)",
    "models": "folder of benchmarks.peers.make_models' checkpoints, small and base, and of smollm2 as jdisagg convert"
    " --format=hf writes it",
    "vllm_python": "interpreter of an environment with vLLM",
    "hf_python": "interpreter of an environment with transformers",
    "json_schema_suite": "folder json/tests in the source of jsonschema (pip download --no-binary :all: jsonschema)",
    "profiles": "two profiles of jdisagg profile, with a comma, for the simulated lines of the crossover",
}
KERNELS = (
    "paged.*(x 128|x 512|x 2,048) tokens.*pages of (32|64)|paged.*x 512 tokens|prefill.*(1,024|2,048)|pack.*(raw|int8)"
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One command, the result it writes, and its edition of seconds (none: the stored result alone is looked at)."""

    result: str
    module: str
    flags: str = ""
    small: str = ""
    knows_its_file: bool = False  # it takes no --output

    def needs(self) -> list[str]:
        """Names of `GIVEN` in its flags."""
        return re.findall(r"\{(\w+)\}", self.flags)

    def command(self, output: Path, given: Mapping[str, str], small: bool = False) -> list[str]:
        words = shlex.split((self.small if small else self.flags).format(**given))
        return [sys.executable, "-m", self.module, *words, *([] if self.knows_its_file else [f"--output={output}"])]


ALL = (
    Benchmark(
        "serve_demo",
        "benchmarks.serve",
        "--mesh=prefill:tp2,decode:pp2 --settings=max_model_len=512 --concurrency=1,2,4,8,16,32"
        f" --plot={IMAGES}/serve_demo.png",
        "--model=tests/fixtures/conformance/llama3 --mesh=colocated:tp1 --settings=max_model_len=64,max_num_seqs=2"
        " --concurrency=1 --num_requests=2 --prompt_tokens=16 --output_tokens=8",
    ),
    Benchmark("crossover", "benchmarks.crossover", f"--profiles={{profiles}} --plot={IMAGES}/crossover.png"),
    Benchmark("transfer_cpu", "benchmarks.transfer", f"--rounds=3 --plot={IMAGES}/transfer_cpu.png"),
    Benchmark("transport_cpu", "benchmarks.transport", "--rounds=15"),
    Benchmark(
        "tiers_cpu", "benchmarks.tiers", "--model=smollm2 --prompt_tokens=512", "--rounds=2 --records=4 --record_kb=64"
    ),
    Benchmark("topology", "benchmarks.topology", "--requests=300", "--requests=20"),
    Benchmark(
        "mooncake_tiers",
        "benchmarks.mooncake_tiers",
        "--data_dir={data_dir}",
        "--requests=20 --kept=1 --nodes=2",
    ),
    Benchmark("early_rejection", "benchmarks.early_rejection", "", "--rates=16 --requests=20"),
    Benchmark("reservations", "benchmarks.reservations", "--data_dir={data_dir}", "--requests=20"),
    Benchmark("soak_cpu", "benchmarks.soak"),
    Benchmark("features_cpu", "benchmarks.features", "--requests=10000 --at_once=24 --speculative=auto"),
    Benchmark("forced_cpu", "benchmarks.forced"),
    Benchmark("exploding_cpu", "benchmarks.exploding"),
    Benchmark("autoscale", "benchmarks.autoscale", "--data_dir={data_dir}"),
    Benchmark(
        "role_flip_cpu",
        "benchmarks.role_flip",
        "--model=tests/fixtures/conformance/llama3 --before_s=4 --drain_s=2",
    ),
    Benchmark("takeover", "benchmarks.takeover", "--rounds=2", "--rounds=1"),
    Benchmark("scale", "benchmarks.scale", "", "--workers=16,32 --streams=64 --followed=20"),
    Benchmark("failures", "benchmarks.failures", "", "--rates=4 --seconds=20 --moments=1"),
    Benchmark("group_stream_cpu", "benchmarks.group_stream", "--rounds=3000", "--rounds=20"),
    Benchmark("processes_cpu", "benchmarks.processes", "--rounds=4 --num_requests=8"),
    Benchmark("compression", "benchmarks.compression"),
    Benchmark("digests_cpu", "benchmarks.digests", "--rounds=40", "--rounds=1"),
    Benchmark("kv_loss_embedded", "benchmarks.kv_loss"),
    Benchmark("weight_loss_smollm2", "benchmarks.weight_loss", "--model=smollm2"),
    Benchmark("products_smollm2_cpu", "benchmarks.products", "--model=smollm2"),
    Benchmark("calibration_cpu", "benchmarks.calibration"),
    Benchmark("mixed_steps", "benchmarks.mixed_steps", "--model={models}/small --rounds=5"),
    Benchmark(
        "host_step_cpu",
        "benchmarks.host_step",
        "--slots=8,256 --rounds=3 --steps=64",
        "--slots=2 --stages=1 --turns=2 --forms=stacked --layers=2 --rounds=1 --steps=8",
    ),
    Benchmark("ring", "benchmarks.ring", "--rounds=7"),
    Benchmark("aot_pods", "benchmarks.aot_pods", "", "--pods=h100_2 --layers=4"),
    Benchmark("compiler_flags", "benchmarks.compiler_flags", "", "--targets=h100:8 --layers=1"),
    Benchmark(
        "speculation",
        "benchmarks.speculation",
        "--streams=1,4,8 --drafts=1,3 --kinds=auto,draft,auto:draft,eagle",
        "--drafts=3 --streams=1 --rounds=1 --tokens=8",
    ),
    Benchmark(
        "decay_embedded",
        "benchmarks.speculation",
        "--streams=1 --tokens=1500 --drafts=3 --kinds=draft,eagle --rounds=1",
    ),
    Benchmark(
        "decay_smollm2",
        "benchmarks.speculation",
        "--model=smollm2 --streams=1 --tokens=2000 --drafts=3 --kinds=eagle --rounds=1",
    ),
    Benchmark(
        "acceptance_embedded",
        "benchmarks.acceptance",
        "--kinds=eagle --works=new:2000 --answers=2",
    ),
    Benchmark(
        "acceptance_parked_embedded",
        "benchmarks.acceptance",
        "--kinds=eagle --works=new:2000 --answers=2 --disturbances=parked",
    ),
    Benchmark(
        "acceptance_smollm2",
        "benchmarks.acceptance",
        "--model=smollm2 --kinds=eagle,ngram:3 --works=new:2000 --answers=1 --disturbances=found,lost,preempted",
    ),
    Benchmark(
        "acceptance_draft_embedded",
        "benchmarks.acceptance",
        "--kinds=draft/rebuild,ngram:3 --works=new:2000 --answers=2",
    ),
    Benchmark(
        "acceptance_ship_embedded",
        "benchmarks.acceptance",
        "--kinds=draft/ship --works=new:2000 --answers=1 --disturbances=found,lost",
    ),
    Benchmark("adapters_cpu", "benchmarks.adapters", "--rounds=25", "--adapters=2 --rank=2 --tokens=4 --rounds=1"),
    Benchmark("adapters_smollm2_cpu", "benchmarks.adapters", "--model=smollm2 --rounds=3 --tokens=32"),
    Benchmark("schemas", "benchmarks.schemas", "--suite={json_schema_suite}", "--every=60"),
    Benchmark("prefill_stages", "benchmarks.prefill_stages", "--rounds=5", "--prompts=64 --batches=1 --rounds=1"),
    Benchmark("prefix_reuse", "benchmarks.prefix_reuse", "--model={models}/small --turns=6"),
    Benchmark("published", "tests.published.table", "{data_dir}", knows_its_file=True),
    Benchmark("simulator_cpu", "benchmarks.simulator", "--data_dir={data_dir}"),
    Benchmark(
        "peers_cpu_f32",
        "benchmarks.peers.compare",
        "--models={models}/small,{models}/base --vllm_python={vllm_python} --hf_python={hf_python}"
        " --peers=eager,generate,pair --rounds=2 --repeats=3",
    ),
    Benchmark(
        "peers_smollm2_cpu",
        "benchmarks.peers.compare",
        "--models={models}/smollm2 --vllm_python={vllm_python} --peers=eager,default"
        " '--meshes=colocated:1xtp1;prefill:tp1,decode:tp1' --rounds=1 --repeats=3 --vocab_size=40000",
    ),
    Benchmark(
        "peers_drafts_smollm2_cpu",
        "benchmarks.peers.speculation",
        "--model={models}/smollm2 --vllm_python={vllm_python} --rounds=1 --repeats=2"
        " --kinds=ngram:3,eagle:jdisagg/heads/SmolLM2-135M-Instruct,auto",
    ),
    Benchmark(
        "kernels_cpu",
        "benchmarks.kernels",
        f"--rounds=20 '--only={KERNELS}'",
        "--suite=tiny --rounds=1 --no_peers --only=paged_attention",
    ),
)
PLOTS = (["-m", "benchmarks.readme_plot"],)  # of results, when these are there


def run_all(chosen: Sequence[Benchmark], given: Mapping[str, str], limit_s: float) -> list[str]:
    """What went wrong; results are replaced one by one, and what moved is printed."""
    wrong = []
    for each in chosen:
        missing = [name for name in each.needs() if not given.get(name)]
        if missing:
            print(f"{each.result}: not run, needs {', '.join(f'--{name}' for name in missing)}")
            continue
        path = RESULTS / f"{each.result}.json"
        last = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        why = run_one(each, each.command(path, given), limit_s)
        wrong += [why] if why else []
        if not why:
            told(each.result, last, json.loads(path.read_text(encoding="utf-8")))
    for plot in PLOTS:
        subprocess.run([sys.executable, *plot], cwd=ROOT, timeout=limit_s, check=True)
    return wrong


def run_one(
    each: Benchmark, command: Sequence[str], limit_s: float, environment: Mapping[str, str] = os.environ
) -> str:
    """Why it failed; empty where it did not."""
    began_s = time.monotonic()
    print(f"{each.result}: python {shlex.join(command[1:])}", flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False, env={**environment}
        )
    except subprocess.TimeoutExpired:
        return f"{each.result}: not done after {limit_s:g} s"
    print(f"{each.result}: {time.monotonic() - began_s:.0f} s", flush=True)
    return f"{each.result}: {(done.stderr or done.stdout).strip()[-2000:]}" if done.returncode else ""


def told(name: str, last: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """What moved by more than a tenth, the most first."""
    lines = moved(last, now)
    print(f"{name}: {len(lines)} figures moved by more than 10 % since {str(last.get('date', 'never'))[:10]}")
    for line in lines[:12]:
        print(f"  {line}")


def run_small(chosen: Sequence[Benchmark], limit_s: float) -> list[str]:
    """What went wrong: a command that fails, or whose file lacks what the tables read."""
    wrong = []
    with TemporaryDirectory() as folder:
        for each in (benchmark for benchmark in chosen if benchmark.small):
            path = Path(folder) / f"{each.result}.json"
            why = run_one(each, each.command(path, {}, small=True), limit_s, {**os.environ, **QUICK})
            wrong += [why] if why else lacking(each.result, json.loads(path.read_text(encoding="utf-8")))
    return wrong


def lacking(name: str, report: Mapping[str, Any]) -> list[str]:
    """Keys of the stored result that a new one has not."""
    stored = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return [f"{name}: its file has no {key!r}" for key in stored if key not in report]


def check() -> list[str]:
    """What is wrong with what is written: provenance, pages, figures in prose."""
    return [*without_provenance(), *behind(), *unbacked()]


def without_provenance() -> Iterator[str]:
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if path.stem not in OF_NO_MACHINE and not set(PROVENANCE) <= report.keys():
            yield f"{path.name} does not say its {', '.join(key for key in PROVENANCE if key not in report)}"


def behind() -> list[str]:
    return [f"{path.relative_to(ROOT)} is behind: run python -m docs.generate" for path in pages.behind()]


def unbacked() -> list[str]:
    """Marked figures in prose that no result backs."""
    known, wrong = figures(), []
    for path in pages.written():
        found = claims(path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(ROOT)}: {why}" for each in found if (why := each.wrong(known))]
    return wrong


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="results whose names this regular expression is found in")
    parser.add_argument("--small", action="store_true", help="small editions, then --check; nothing is kept")
    parser.add_argument("--check", action="store_true", help="run nothing; hold pages and prose to the results")
    parser.add_argument("--limit_s", type=float, default=3600.0, help="longest time of one benchmark")
    for name, meaning in GIVEN.items():
        parser.add_argument(f"--{name}", default="", help=meaning)
    options = parser.parse_args(argv)
    chosen = [each for each in ALL if re.search(options.only, each.result)]
    wrong: list[str] = []
    if options.small:
        wrong += run_small(chosen, min(options.limit_s, 300.0))
    elif not options.check:
        wrong += run_all(chosen, {name: getattr(options, name) for name in GIVEN}, options.limit_s)
        subprocess.run([sys.executable, "-m", "docs.generate"], cwd=ROOT, timeout=300, check=True)
    wrong += check()
    print("\n".join(wrong) if wrong else f"{len(TABLES)} tables and every marked figure are backed by results")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
