"""Workloads by their text: what is cut out, thinned, and given arrivals."""

from pathlib import Path

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces import Trace
from jdisagg.sim.traces.workloads import by_rates, cut, drawn, read_workload


def minute(gap_s: float = 1.0) -> Trace:
    count = round(60 / gap_s)
    return Trace(np.arange(count) * gap_s, np.arange(1, count + 1), np.ones(count, np.int64))


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    path = tmp_path / "rates.csv"
    rows = [("a", 0, 1.0), ("a", 600, 3.0), ("a", 1200, 0.0), ("b", 0, 9.0)]
    lines = [",".join(map(str, row)) for row in [("model", "window_start_s", "rate_rps"), *rows]]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_window_holds_its_requests_and_counts_from_its_start():
    found = cut(minute(), "10:20", "")
    assert found.input_tokens.tolist() == list(range(11, 21))
    assert found.arrival_s[0] == 0


def test_the_parts_of_a_trace_hold_each_request_once():
    parts = [cut(minute(), "", f"{number}/3", seed=5) for number in (1, 2, 3)]
    assert sorted(np.concatenate([part.input_tokens for part in parts])) == list(range(1, 61))
    assert min(map(len, parts)) > 10


def test_arrivals_follow_the_rates_of_their_windows(rates: Path):
    found = by_rates(minute(), f"{rates}@a", "", 0.0)
    first = (found.arrival_s < 600).sum()
    assert 500 < first < 700 and 1600 < len(found) - first < 2000
    assert found.arrival_s.max() < 1200


def test_rates_are_brought_to_the_mean_that_is_asked_for(rates: Path):
    found = by_rates(minute(), f"{rates}@a", "0:1200", 0.5)
    assert len(found) == pytest.approx(600, rel=0.15)
    assert (found.arrival_s >= 600).mean() == pytest.approx(0.75, abs=0.06)


def test_lengths_are_drawn_at_a_rate():
    found = drawn(read_workload("mix:100+10"), 4.0, 400, seed=1)
    assert len(found) == 400 and found.rate_rps == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize(
    ("window", "part", "said"),
    [
        ("20:10", "", "20 s must lie before 10 s"),
        ("soon", "", "'soon': write START:STOP"),
        ("", "4/3", "'4/3': write K/N"),
        ("", "half", "'half': write K/N"),
    ],
)
def test_a_cut_that_cannot_be_is_named(window: str, part: str, said: str):
    with pytest.raises(ConfigError, match=said):
        cut(minute(), window, part)


def test_rates_that_cannot_be_are_named(rates: Path):
    with pytest.raises(ConfigError, match="write FILE@MODEL"):
        by_rates(minute(), "rates", "", 1.0)
    with pytest.raises(ConfigError, match="no requests in --window='1200:1800'"):
        by_rates(minute(), f"{rates}@a", "1200:1800", 1.0)
