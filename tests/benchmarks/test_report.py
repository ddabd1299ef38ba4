"""From a measured level to a table, a JSON and a picture."""

import asyncio
import io
import json
import os
from pathlib import Path

from matplotlib.image import imread
from rich.console import Console

from benchmarks import machine, report
from benchmarks.figures import SLO, Figures, summed_up
from benchmarks.http_client import Server
from benchmarks.load import Burst, Sample
from benchmarks.plot import plot_load
from benchmarks.serve import Plan, Target, measure, report_of
from benchmarks.workload import Lengths, Workload
from tests.benchmarks.sse_server import SSEServer, serving

SLO_LOOSE = SLO(ttft_ms=1000, tpot_ms=100)
PLAN = Plan((1, 4), 6, Workload(Lengths(8, 16), Lengths(3, 5), 1000), 0, SLO_LOOSE)


def measured(server: SSEServer) -> tuple[Target, list[Figures]]:
    async def run() -> tuple[Target, list[Figures]]:
        async with serving(server):
            ask = Server(server.url, "counter", {"ledger": True}).ask
            target = Target("counter over HTTP", ask, lambda: machine.cpu_seconds(os.getpid()))
            return target, await measure(target, PLAN, lambda *_: None)

    return asyncio.run(run())


def test_every_level_is_warmed_then_measured_with_prompts_of_its_own() -> None:
    server = SSEServer()
    _, levels = measured(server)
    assert [(each.concurrency, each.requests, each.failed) for each in levels] == [(1, 6, 0), (4, 6, 0)]
    assert len(server.bodies) == (1 + 6) + (4 + 6)
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies)


def test_the_report_is_json_and_says_on_what_and_how_it_was_made(tmp_path: Path) -> None:
    target, levels = measured(SSEServer())
    path = tmp_path / "new" / "report.json"
    report.write_json(str(path), report_of(target, PLAN, levels))
    read = json.loads(path.read_text())
    assert read["machine"]["cores"] >= 1
    assert {"date", "command", "versions", "workload", "slo", "target"} <= read.keys()
    assert read["workload"]["prompt_tokens"] == "8:16"
    assert read["levels"][1]["ttft_ms"]["p50"] > 0
    assert read["levels"][0]["server_cpu_s"] >= 0


def test_the_tables_show_each_level_and_each_phase() -> None:
    _, levels = measured(SSEServer())
    text = io.StringIO()
    Console(file=text, width=80).print(report.load_table("a title", levels))
    for word in ("a title", "output tokens/s", "queue", "decode", "1.00", "3.00", "100%"):
        assert word in text.getvalue()


def test_a_level_without_a_single_answer_still_prints() -> None:
    failed = summed_up(Burst(2, 1.0, (Sample(0.0, error="gone"),)), SLO_LOOSE)
    text = io.StringIO()
    Console(file=text, width=80).print(report.load_table("a title", [failed]))
    assert "failed" in text.getvalue()


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    _, levels = measured(SSEServer())
    path = tmp_path / "load.png"
    plot_load(str(path), "a title", "a note", levels, SLO_LOOSE)
    height, width, _ = imread(path).shape
    assert width > height > 400


def test_cpu_seconds_count_this_process_and_not_one_that_is_not_there() -> None:
    mine = machine.cpu_seconds(os.getpid())
    assert mine is not None
    assert mine > 0
    assert machine.cpu_seconds(2**22 + 1) is None
