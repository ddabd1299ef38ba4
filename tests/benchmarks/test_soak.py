"""A soak judges what it saw, and a short one of everything ends with nothing held and nothing wrong."""

import asyncio
import os
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import soak, soak_watch
from benchmarks.soak_clients import JOBS, Book

CALM = {"server rss_mib": 500.0, "server descriptors": 40.0, "server threads": 30.0, "http_connections": 1.0}


def found(**changed: object) -> soak.Found:
    """An hour in which nothing happened, but for what is `changed`."""
    samples = [{"at_s": float(at_s), **CALM} for at_s in range(0, 3600, 60)]
    seen = {
        "before": CALM,
        "samples": samples,
        "after": CALM | {"recompiles": 0.0},
        "held": {},
        "complaints": {"server": 0},
        "book": Book(),
        "took_s": 3600.0,
    }
    return soak.Found(**(seen | changed))  # pyright: ignore[reportArgumentType]


def risen(mib: float) -> list[soak_watch.Sample]:
    """A process that grows in the first half, as one does that fills its caches, and by so much in all the second."""
    growth = [min(at_s, 1800) / 18 + mib * max(0, at_s - 1800) / 1800 for at_s in range(0, 3600, 60)]
    return [{"at_s": 60.0 * index, **CALM, "server rss_mib": 500 + more} for index, more in enumerate(growth)]


def test_an_hour_in_which_nothing_is_left_is_good():
    assert not found().wrong()


def test_memory_is_judged_by_the_second_half():
    assert soak_watch.rise_per_hour(risen(3.0), "server rss_mib") == pytest.approx(6.0, rel=0.05)
    assert not found(samples=risen(3.0)).wrong()
    (wrong,) = found(samples=risen(30.0)).wrong()
    assert wrong.startswith("server rises by 6")
    assert not found(samples=risen(30.0), took_s=60.0).wrong(), "a minute says nothing of it"


def test_each_thing_that_is_left_or_went_wrong_is_told():
    book = Book(faults=["whole: Fault('status 500')", "another"])
    after = CALM | {"recompiles": 2.0, "server descriptors": 100.0}
    held = {"kv_pages_by_use decode-0 live": 3.0}
    assert found(book=book, after=after, held=held, complaints={"server": 4}).wrong() == [
        "2 faults, the first: whole: Fault('status 500')",
        "kv_pages_by_use decode-0 live is still 3",
        "server logged 4 errors",
        "2 programs were compiled meanwhile",
        "server has 100 descriptors and had 64",
    ]


def test_the_shares_of_jobs_are_one():
    assert sum(JOBS.values()) == pytest.approx(1.0, abs=0.001)


@pytest.mark.slow
def test_a_short_soak_of_everything_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(soak.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    soak.FLAGS(["soak", "--minutes=0.4", "--requests=400", "--connections=60"])
    seen = asyncio.run(soak.run(Console(quiet=True), tmp_path))
    assert not seen.wrong()
    told = seen.told()
    assert told["requests"] == 400 and {"answered", "429"} >= set(told["ends"]["whole"]) >= {"answered"}
    assert told["connections_cut"]["displaced"] > 0 and set(told["ends"]) <= {job.__name__ for job in JOBS}
