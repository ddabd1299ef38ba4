"""Results back what is written, and what moved between two of them is told."""

import json
import re

import pytest

from benchmarks import all as everything
from benchmarks.claims import Claim, claims, figures
from benchmarks.moved import moved
from benchmarks.stored import RESULTS
from docs.generate.__main__ import written


def test_pages_and_marked_figures_are_those_of_the_results():
    assert not everything.check()


def test_a_figure_that_no_result_backs_is_found():
    text = "it gives 38 %<!-- =crossover.x --> fewer, and 1,234 ms<!-- =y --> more; 2.5<!-- =z --> times"
    found = claims(text)
    assert found == [Claim("38", True, "crossover.x"), Claim("1,234", False, "y"), Claim("2.5", False, "z")]
    known = {"crossover.x": 0.3789, "y": 1233.2}
    assert [each.wrong(known) for each in found] == [
        "",
        "1,234 is marked y, which is 1233.2",
        "2.5 is marked z, which no result has",
    ]
    with pytest.raises(ValueError, match="no figure stands before the marks lost"):
        claims("a word<!-- =lost -->")


def test_prose_claims_something_and_all_of_it_is_known():
    found = [each for page in written() for each in claims(page.read_text(encoding="utf-8"))]
    assert len(found) > 20 and {each.key for each in found} <= figures().keys()


def test_every_share_and_time_in_the_readmes_prose_is_marked():
    readme = (everything.ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", readme, flags=re.DOTALL).replace("the aim is 15 %", "")
    assert not re.findall(r"\b[\d.,]+ (?:%|ms)(?!<!-- =).{0,20}", prose)


def test_every_stored_result_is_of_one_benchmark():
    stored = {path.stem for path in RESULTS.glob("*.json")}
    assert stored == {each.result for each in everything.ALL}


def test_what_is_not_given_is_named_and_left_out(capsys: pytest.CaptureFixture[str]):
    chosen = [each for each in everything.ALL if each.needs()]
    assert {name for each in chosen for name in each.needs()} <= everything.GIVEN.keys()
    lines = []
    for each in chosen:
        lines.append(f"{each.result}: not run, needs {', '.join(f'--{name}' for name in each.needs())}")
    before = {path: path.read_bytes() for path in RESULTS.glob("*.json")}
    assert not everything.run_all(chosen, {}, limit_s=60.0)
    assert capsys.readouterr().out.splitlines() == lines
    assert before == {path: path.read_bytes() for path in RESULTS.glob("*.json")}


def test_what_moved_is_told_by_its_place_the_most_first():
    last = {
        "date": "2026-01-01",
        "cells": [{"mode": "a", "streams": 2, "ms": 10.0}, {"mode": "b", "streams": 2, "ms": 1.0}],
    }
    now = json.loads(json.dumps(last))
    now["cells"][0]["ms"], now["cells"][1]["ms"], now["date"] = 12.0, 3.0, "2026-02-02"
    assert moved(last, now) == ["cells[b 2].ms: 1 -> 3 (+200%)", "cells[a 2].ms: 10 -> 12 (+20%)"]
    assert not moved(last, last)


@pytest.mark.slow
def test_the_small_edition_runs_and_its_files_hold_what_the_tables_read():
    assert not everything.run_small(everything.ALL, limit_s=200.0)
