"""What a simulation leaves behind: rows that agree in every format, pictures, and a page that stands alone."""

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from jdisagg.commands.sim import main
from jdisagg.core.errors import ConfigError
from jdisagg.core.ledger import PARTS
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Checked
from jdisagg.core.request import WorkerId
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role
from jdisagg.sim import report
from jdisagg.sim.cluster import Cluster
from jdisagg.sim.cluster_spec import cluster_spec, longest, plain_settings, published
from jdisagg.sim.outcome import NOT_CALIBRATED, SLO, CacheLookups, Outcome, Point, columns, goodput_rps, write_csv
from jdisagg.sim.parquet import write_parquet
from jdisagg.sim.report import ReportContent, tiles
from jdisagg.sim.simulation import KVLocation, SpanLog, WorkKind, WorkSpan
from jdisagg.sim.tiers import MoveStats
from jdisagg.sim.traces import Trace, poisson

GOOD = SLO(0.4, 0.1)


def simulated(mesh: str, requests: int = 40) -> tuple[Outcome, SpanLog]:
    draw = np.random.default_rng(0)
    work = poisson(Trace(np.zeros(requests), draw.integers(50, 900, requests), draw.integers(1, 40, requests)), 4.0)
    given, log = cluster_spec(MeshSpec.parse(mesh), plain_settings(longest(work)), published("opt-13b"), 5e9), SpanLog()
    return Cluster(given.workers, given.costs, given.links, log=log).run(work), log


@pytest.fixture(scope="module")
def run() -> tuple[Outcome, SpanLog]:
    return simulated("prefill:2xtp1,decode:1xtp1")


def told(run: tuple[Outcome, SpanLog], **changes) -> ReportContent:
    outcome, log = run
    return replace(ReportContent("a <mesh>", "python -m jdisagg sim", {"model": "m"}, outcome, log, GOOD, 3), **changes)


def point(rate_rps: float, attainment: float) -> Point:
    return Point(rate_rps, attainment, rate_rps * attainment, 0.1, 0.2, 0.03, 0.04)


def test_csv_and_parquet_have_the_same_rows_and_the_ledgers_parts_sum_to_the_latency(run, tmp_path):
    outcome, _ = run
    write_csv(outcome, tmp_path / "a.csv")
    write_parquet(outcome, tmp_path / "a.parquet")
    written = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert written == columns(outcome)
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["ttft_s"]) for row in rows] == written["ttft_s"]
    for row in rows:
        assert sum(float(row[f"{part}_s"]) for part in PARTS) == pytest.approx(float(row["latency_s"]), abs=1e-3)
        hidden_exposed = float(row["transfer_hidden_s"]) + float(row["transfer_exposed_s"])
        assert hidden_exposed == pytest.approx(max(float(row["wire_s"]), float(row["transfer_s"])))


def test_whoever_was_not_served_has_no_latency(run):
    outcome, _ = run
    first = replace(outcome.records[0], reason="rejected", ledger=None)
    table = columns(replace(outcome, records=[first, *outcome.records[1:]]))
    assert table["ttft_s"][0] is None and table["prefill_s"][0] == 0.0 and table["ttft_s"][1] is not None


class Outside(HTMLParser):
    """Notes whatever a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("data:"):
                self.found.append(f"{tag} {value}")
        self.images += tag == "img"
        if tag in ("script", "link", "iframe"):
            self.found.append(tag)


def test_a_page_stands_alone_and_escapes_what_it_is_given(run):
    text = report.page(told(run, curve=[point(1, 1.0), point(2, 0.5)]))
    parser = Outside()
    parser.feed(text)
    assert parser.found == [] and parser.images == 5 and "@import" not in text and "url(" not in text
    assert "a &lt;mesh&gt;" in text and NOT_CALIBRATED in text


def test_a_page_tells_what_was_found_again_where_anybody_looked(run):
    outcome, log = run
    looked = {Role.PREFILL: CacheLookups(800, 200), Role.DECODE: CacheLookups()}
    assert "found on" not in tiles(told(run))
    shown = tiles(told((replace(outcome, lookups=looked), log)))
    assert "<b>25.0%</b><span>of prompt tokens found on prefill workers" in shown and "on decode workers" not in shown


def test_a_page_tells_the_error_of_the_last_check(run):
    text = report.page(told(run, checked=Checked("2026-11-20", "closed loop", {"TTFT": -0.081, "TPOT": 0.042}, 0.062)))
    assert "checked 2026-11-20 (closed loop): MAPE 6.2% (TTFT -8.1%, TPOT +4.2%)" in text
    assert NOT_CALIBRATED not in text


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((1.0, 0.95, 0.85, 0.2), 3.0), ((0.8, 0.2, 0.1, 0.0), 0.0), ((1.0, 1.0, 1.0, 0.9), 8.0)],
    ids=["between two rates", "never", "beyond the last"],
)
def test_goodput_is_the_rate_at_which_the_share_is_still_kept(shares, expected):
    points = [point(rate, share) for rate, share in zip((1, 2, 4, 8), shares, strict=True)]
    assert goodput_rps(points[::-1], 0.9) == pytest.approx(expected)


def test_every_picture_is_one_even_of_a_run_with_nothing_in_it():
    nothing, empty = Outcome([], 0, 0.0, {}), SpanLog()
    pictures = [report.cdfs(nothing, GOOD), report.where_time_goes(nothing), report.occupancy(empty, 0.0)]
    pictures.append(report.where_kv_lies(empty, 0.0))
    for png in (*pictures, report.gantt(empty)[0]):
        assert imread(io.BytesIO(png)).shape[1] == 1650


def test_a_page_shows_where_kv_lies_and_what_came_from_where_only_where_any_is_kept(run):
    outcome, log = run
    assert "Where KV lies" not in report.page(told(run))
    lying = replace(log, lies={(WorkerId("prefill-0"), KVLocation.DRAM): [(1.0, 512)]}, came=[(2.0, Tier.DRAM, 512)])
    moved = {(Tier.DRAM, Tier.HBM): MoveStats(pages=1, missed=2, tokens=512, num_bytes=3e9, seconds=0.5, moves=2)}
    text = report.page(told((replace(outcome, moved=moved), lying)))
    assert 'alt="where KV lies' in text
    assert "<td>dram</td><td>hbm</td><td>512</td><td>3</td><td>2</td><td>250</td><td>2</td>" in text


def test_a_gantt_shows_a_window_of_the_busiest_worker_and_no_more_rows_than_fit():
    log = SpanLog()
    for index in range(20 * report.MOST_SPANS):
        log.did(WorkSpan(WorkerId(f"prefill-{index % 20}"), WorkKind.PREFILL, index, index + 1, 5))
    for index in range(3 * report.MOST_SPANS):
        log.did(WorkSpan(WorkerId("decode-0"), WorkKind.DECODE, 2 * index, 2 * index + 1, 1))
    start_s, stop_s = report.window(log)
    assert (start_s, stop_s) == (2 * report.MOST_SPANS, 4 * report.MOST_SPANS - 1)
    assert "5 more workers" in report.gantt(log)[1]
    assert report.in_order(log.workers)[:3] == ["prefill-0", "prefill-1", "prefill-2"]


def test_decode_steps_without_a_gap_and_of_one_batch_are_one_span():
    log = SpanLog()
    for start_s, amount in ((0.0, 2), (1.0, 2), (2.0, 3), (4.0, 3)):
        log.did(WorkSpan(WorkerId("decode-0"), WorkKind.DECODE, start_s, start_s + 1, amount))
    assert [(span.start_s, span.done_s) for span in log.spans] == [(0.0, 2.0), (2.0, 3.0), (4.0, 5.0)]


def test_the_command_runs_every_rate_and_writes_what_it_is_asked_for(tmp_path, capsys):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n500,20\n90,7\n", encoding="utf-8")
    out = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "parquet", "report")}
    flags = ["--mesh=prefill:tp1,decode:tp1", "--cost=distserve", "--rates=40,1,9", "--requests=25", "--slo_ttft_s=0.3"]
    assert main(["sim", f"--trace=lengths:{lengths}", *flags, *(f"--{kind}={path}" for kind, path in out.items())]) == 0
    said = capsys.readouterr().out
    assert [line.split("│")[1].strip() for line in said.splitlines() if "%  │" in line or "% │" in line] == [
        "1", "9", "40"
    ]  # fmt: skip
    assert "requests/s with 90% within TTFT 0.3 s" in said
    assert len(pq.read_table(out["parquet"])) == 25
    assert len(re.findall("<img ", out["report"].read_text(encoding="utf-8"))) == 5


def test_a_wrong_rate_and_a_folder_that_is_not_there_are_one_line(tmp_path, capsys):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n50,2\n", encoding="utf-8")
    for flag, words in (
        ("--rates=1,-2", "--rates=1,-2 has -2"),
        ("--csv=/nowhere/x.csv", "cannot write /nowhere/x.csv"),
    ):
        assert main(["sim", f"--trace=lengths:{lengths}", "--cost=distserve", "--rate=1", flag]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot write"):
        write_parquet(Outcome([], 0, 0.0, {}), "/nowhere/x.parquet")
