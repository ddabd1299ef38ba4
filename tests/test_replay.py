"""A recorded world replays to the same decisions, and a changed record is found out."""

import json
from pathlib import Path

import pytest

from jdisagg.core.journal import Header, Journal
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.replay import main
from jdisagg.sim.faults import Faults
from jdisagg.sim.world import World
from tests.sim.cases import check_ended, colocated, pair, request


def record(path: Path, workers: list[WorkerConfig], faults: Faults) -> int:
    """Writes the journal of a small world to `path`; the number of its events."""
    limits = RouterConfig()
    with path.open("w", encoding="utf-8") as file:
        journal = Journal(Header(limits, tuple(workers)), limit=5, sink=lambda line: file.write(line + "\n"))
        world = World(workers, limits, faults=faults, journal=journal)
        requests = [request(f"r{i}", 9, max_tokens=20, arrival_s=i * 1e-3) for i in range(10)]
        for each in requests:
            world.submit(each, each.arrival_s)
        world.cancel(requests[3].request_id, 0.02)
        world.run()
    check_ended(world, requests)
    return journal.num_recorded


@pytest.mark.parametrize("workers", [pair(num_pages=12, reserve_tokens=2), colocated(num_microbatches=2)])
@pytest.mark.parametrize("faults", [Faults(), Faults(1, 1e-3, 0.02, 0.05, 0.1, 0.1, 0.05)])
def test_a_recorded_run_replays_to_the_same_decisions(tmp_path, capsys, workers, faults):
    events = record(tmp_path / "run.jsonl", workers, faults)
    assert main([str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().out == f"{events} events, same decisions\n" and events > 100


def test_the_first_decision_that_differs_is_named(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    record(path, pair(), Faults())
    lines = path.read_text().splitlines()
    number, changed = next((i, json.loads(line)) for i, line in enumerate(lines) if '"DecodeDone"' in line)
    changed["event"]["sampled"][0][1]["token"] += 1
    lines[number] = json.dumps(changed)
    path.write_text("\n".join(lines))
    assert main([str(path)]) == 1
    assert f"event {number}, at {changed['at_s']} s, decode-0" in capsys.readouterr().err


def test_a_file_that_is_not_there_or_no_journal_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "text.jsonl").write_text("hello\n")
    assert main([str(tmp_path / "text.jsonl")]) == 1
    assert "line 1 is not JSON" in capsys.readouterr().err
