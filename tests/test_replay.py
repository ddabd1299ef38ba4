"""A recorded world replays to the same decisions, and a changed record is found out."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.commands.replay import main
from jdisagg.core.journal import Header, Journal
from jdisagg.core.model_identity import ModelIdentity
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.tiers import Tier
from jdisagg.core.worker_config import Role, Stages, WorkerConfig
from tests.policy.cache.test_tiers import ask, several
from tests.sim.cases import check_ended, colocated, pair, request, run_all
from tests.sim.fault_injector import Faults
from tests.sim.world import World

TWO_STAGES = {"is": "Stages", "n": 2}


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


@pytest.mark.parametrize("workers", [pair(num_pages=12, reserve_tokens=2), colocated(decode=Stages(2))])
@pytest.mark.parametrize("faults", [Faults(), Faults(1, 1e-3, 0.02, 0.05, 0.1, 0.1, 0.05)])
def test_a_recorded_run_replays_to_the_same_decisions(tmp_path, capsys, workers, faults):
    events = record(tmp_path / "run.jsonl", workers, faults)
    assert main(["replay", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().out == f"{events} events, same decisions\n" and events > 100


@pytest.mark.parametrize("how", [[], ["--virtual"]])
def test_a_run_with_pages_that_go_down_come_up_and_are_lent_replays_to_the_same_decisions(tmp_path, capsys, how):
    path, limits = tmp_path / "run.jsonl", RouterConfig(routing=Routing.ROUND_ROBIN)
    workers = several(Role.COLOCATED, prefix_caching=True, num_pages=16, dram_pages=64, peer_fetch=True)
    with path.open("w", encoding="utf-8") as file:
        journal = Journal(Header(limits, tuple(workers)), limit=5, sink=lambda line: file.write(line + "\n"))
        world = World(workers, limits, journal=journal)
        run_all(world, [ask(f"r{number}", number % 3, 0.5 * number) for number in range(12)])
    moved = world.yard.moved
    assert moved[Tier.HBM, Tier.DRAM] and moved[Tier.DRAM, Tier.HBM] and moved[Tier.PEER, Tier.HBM]
    assert main(["replay", str(path), *how]) == 0
    assert f"{journal.num_recorded} events, same decisions" in capsys.readouterr().out


def test_the_first_decision_that_differs_is_named(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    record(path, pair(), Faults())
    lines = path.read_text().splitlines()
    found = (i for i, line in enumerate(lines) if '"StepDone"' in line and '"decode":[[' in line)
    number = next(found)
    changed = json.loads(lines[number])
    changed["event"]["decode"][0][1][0]["token"] += 1
    lines[number] = json.dumps(changed)
    path.write_text("\n".join(lines))
    assert main(["replay", str(path)]) == 1
    assert f"event {number}, at {changed['at_s']} s, decode-0" in capsys.readouterr().err


def changed(lines: list[str], number: int, **fields: object) -> list[str]:
    """The lines, with these fields of one record exchanged."""
    record = json.loads(lines[number]) | fields
    return [*lines[:number], json.dumps(record), *lines[number + 1 :]]


def event_changed(lines: list[str], kind: str, **fields: object) -> list[str]:
    """The lines, with these fields of the first event of a kind exchanged."""
    number = next(i for i, line in enumerate(lines) if f'"event":{{"is":"{kind}"' in line)
    return changed(lines, number, event=json.loads(lines[number])["event"] | fields)


def worker_changed(lines: list[str], **fields: object) -> list[str]:
    workers = json.loads(lines[0])["workers"]
    return changed(lines, 0, workers=[workers[0] | fields, *workers[1:]])


EFFECT, TEXT = {"is": "SetTimer", "at_s": 1, "key": "x"}, {"is": "Request", "prompt": "abc"}
DAMAGE = {
    "empty": (lambda x: [], "line 1 is not JSON"),
    "only its header, cut": (lambda x: [x[0][:100]], "line 1 is not JSON"),
    "cut in a line": (lambda x: [*x[:5], x[5][:40]], "line 6 is not JSON"),
    "a header in the middle": (lambda x: [*x[:3], x[0]], "line 4 lacks actor, at_s, decided, event"),
    "no header": (lambda x: x[1:], "line 1 lacks version"),
    "another version": (lambda x: changed(x, 0, version=[2]), r"line 1 says version \[2\]"),
    "workers that are no list": (lambda x: changed(x, 0, workers=7), "line 1: workers is 7 and no list"),
    "a worker that is an event": (lambda x: changed(x, 0, workers=[{"is": "TimerFired", "key": "x"}]), "line 1: "),
    "a router that is a text": (lambda x: changed(x, 0, router="x"), "line 1: .*'x': it names no record"),
    "a page size of text": (lambda x: worker_changed(x, page_size="x"), "line 1: .*got `str` - at `..page_size`"),
    "a page size of nothing": (lambda x: worker_changed(x, page_size=0), "line 1: .*page_size is 0"),
    "pages without number": (lambda x: worker_changed(x, num_pages=10**18), "line 1: .*num_pages is 10000"),
    "slots that fill nothing": (lambda x: worker_changed(x, num_slots=7, decode=TWO_STAGES), "line 1: .*7 slots"),
    "a time of text": (lambda x: changed(x, 2, at_s="now"), "line 3: at_s is 'now' and no time"),
    "a time without end": (lambda x: changed(x, 2, at_s=float("inf")), "line 3: at_s is inf and no time"),
    "a huge time": (lambda x: changed(x, 2, at_s=10**4000), "line 3: at_s is a huge number and no time"),
    "a number of 5,000 digits": (lambda x: [*x[:2], '{"at_s":' + "9" * 5000 + "}"], "line 3 is not JSON"),
    "brackets without end": (lambda x: [*x[:2], "[" * 100_000], "line 3 is not JSON"),
    "an actor that is a list": (lambda x: changed(x, 2, actor=["router"]), "line 3: actor is"),
    "an actor nobody knows": (lambda x: changed(x, 2, actor="nobody"), "line 3: event 2 is for 'nobody'"),
    "an event that is none": (lambda x: changed(x, 2, event={"is": "Party"}), "line 3: .*names no record"),
    "an effect for an event": (lambda x: changed(x, 2, event=EFFECT), "SetTimer is no event"),
    "a plan nobody made": (lambda x: event_changed(x, "StepDone", step_id=10**9), "cannot follow on"),
    "a prompt of text": (lambda x: event_changed(x, "Submit", request=TEXT), "got `str` - at `..request.prompt`"),
    "a timer of no form": (lambda x: event_changed(x, "TimerFired", key=7), "TimerFired: .*got `int` - at `..key`"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("replay") / "run.jsonl"
    record(path, pair(), Faults(1, 1e-3, 0.02, 0.05, 0.1, 0.1, 0.05))
    return path.read_text().splitlines()


@pytest.mark.parametrize("mode", [[], ["--virtual"]], ids=["", "virtual"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_is_one_line_that_names_file_line_and_what_was_found(tmp_path, capsys, whole, damage, mode):
    change, says = DAMAGE[damage]
    path = tmp_path / "damaged.jsonl"
    path.write_text("\n".join(change(whole)))
    assert main(["replay", str(path), *mode]) == 1
    said = capsys.readouterr().err
    assert re.search(says, said) and said.startswith(f"{path}: line ") and len(said) < 900
    assert said.count("\n") == 1


@pytest.mark.parametrize("mode", [[], ["--virtual"]], ids=["", "virtual"])
@pytest.mark.parametrize("change", [lambda x: x[:1] + x[9:], lambda x: x + x[1:]], ids=["lines are missing", "twice"])
def test_a_journal_with_lines_missing_or_said_twice_is_found_out_by_its_line(tmp_path, capsys, whole, change, mode):
    (tmp_path / "other.jsonl").write_text("\n".join(change(whole)))
    assert main(["replay", str(tmp_path / "other.jsonl"), *mode]) == 1
    assert "other.jsonl: line " in capsys.readouterr().err


def test_a_journal_that_is_no_text_is_one_line(tmp_path, capsys, whole):
    (tmp_path / "binary.jsonl").write_bytes(whole[0].encode() + b"\n\xff\xfe\x00\x80")
    assert main(["replay", str(tmp_path / "binary.jsonl")]) == 1
    assert "no text in UTF-8" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_is_not_there_or_no_journal_is_one_line(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "text.jsonl").write_text("hello\n")
    assert main(["replay", str(tmp_path / "text.jsonl")]) == 1
    assert "line 1 is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], ["--virtual"]])
def test_a_replay_says_the_model_and_refuses_another_with_both_fingerprints(tmp_path, capsys, how):
    path, workers, limits = tmp_path / "run.jsonl", pair(), RouterConfig()
    model = ModelIdentity("a" * 32, "b" * 32, "c" * 32)
    header, other = Header(limits, tuple(workers), model.described("tiny")), replace(model, weights="d" * 32)
    with path.open("w", encoding="utf-8") as file:
        world = World(workers, limits, journal=Journal(header, sink=lambda line: file.write(line + "\n")))
        run_all(world, [request("one", 9, max_tokens=20)])
    for asked in ("", model.short, model.fingerprint):
        assert main(["replay", str(path), *how, f"--fingerprint={asked}"]) == 0
        assert f"model tiny:{model.short} (weights aaaaaaaaaaaa, " in capsys.readouterr().out
    assert main(["replay", str(path), *how, f"--fingerprint={other.short}"]) == 1
    told = capsys.readouterr().err
    assert model.short in told and other.short in told
