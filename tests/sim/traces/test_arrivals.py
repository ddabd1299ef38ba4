"""Traces keep what makes them what they are while they are scaled, cut, split and given times."""

from pathlib import Path

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces import Trace, poisson, read_azure, read_mooncake, spread_ticks, varying_rate

FIXTURES = Path(__file__).parents[2] / "fixtures" / "traces"


@pytest.fixture(scope="module")
def azure() -> Trace:
    return read_azure(FIXTURES / "azure_conv_first_400.csv")


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return read_mooncake(FIXTURES / "mooncake_conversation_first_300.jsonl.gz")


def test_the_same_seed_gives_the_same_arrivals(azure: Trace):
    assert np.array_equal(poisson(azure, 3.0, seed=1).arrival_s, poisson(azure, 3.0, seed=1).arrival_s)
    assert not np.array_equal(poisson(azure, 3.0, seed=1).arrival_s, poisson(azure, 3.0, seed=2).arrival_s)


def test_poisson_arrivals_have_the_rate_asked_for(azure: Trace):
    trace = poisson(azure.sample(20_000), 7.0)
    gaps = np.diff(trace.arrival_s)
    assert trace.rate_rps == pytest.approx(7.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)


def test_a_trace_brought_to_another_rate_stays_as_bursty(azure: Trace):
    def burstiness(trace: Trace) -> float:
        gaps = np.diff(trace.arrival_s)
        return float(gaps.std() / gaps.mean())

    faster = azure.at_rate(4 * azure.rate_rps)
    assert faster.rate_rps == pytest.approx(4 * azure.rate_rps)
    assert burstiness(faster) == pytest.approx(burstiness(azure))


def test_a_changing_rate_is_followed(azure: Trace):
    trace = varying_rate(azure, np.array([50.0, 10.0]), 60.0, seed=3)
    first, second = len(trace.window(0, 60)), len(trace.window(60, 120))
    assert first == pytest.approx(3000, rel=0.1) and second == pytest.approx(600, rel=0.2)


def test_a_window_counts_its_times_from_its_start(azure: Trace):
    part = azure.window(10.0, 20.0)
    assert 0 < len(part) < len(azure) and part.arrival_s[0] >= 0 and part.arrival_s[-1] < 10.0


def test_a_split_loses_no_request(mooncake: Trace):
    parts = mooncake.split(3, seed=5)
    assert sum(map(len, parts)) == len(mooncake)
    assert sorted(path for part in parts for path in part.block_hashes) == sorted(mooncake.block_hashes)


def test_a_coarse_clock_is_spread_within_its_ticks(mooncake: Trace):
    smooth = spread_ticks(mooncake)
    ticks = np.unique(mooncake.arrival_s)
    assert len(np.unique(smooth.arrival_s)) == len(mooncake)
    assert np.array_equal(np.searchsorted(ticks, smooth.arrival_s, side="right"),
                          np.searchsorted(ticks, mooncake.arrival_s, side="right"))  # fmt: skip


def test_scaled_lengths_drop_block_names_that_no_longer_fit(mooncake: Trace):
    longer = mooncake.scaled_lengths(inputs=2.0)
    assert longer.input_tokens.sum() == 2 * mooncake.input_tokens.sum() and not longer.block_hashes


def test_a_draw_keeps_input_and_output_of_a_request_together(azure: Trace):
    pairs = set(zip(azure.input_tokens.tolist(), azure.output_tokens.tolist(), strict=True))
    drawn = azure.sample(1000, seed=9)
    assert set(zip(drawn.input_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)) <= pairs


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0.0], [1, 1], [1]), r"have \[1, 2\] rows"),
        (([1.0, 0.0], [1, 1], [1, 1]), "in order of arrival"),
        (([0.0], [0], [1]), "at least 1 input"),
    ],
)
def test_columns_that_make_no_trace_are_refused(columns: tuple, message: str):
    with pytest.raises(ConfigError, match=message):
        Trace(np.array(columns[0]), np.array(columns[1]), np.array(columns[2]))


def test_a_rate_that_cannot_be_is_refused(azure: Trace):
    with pytest.raises(ConfigError, match="to 0"):
        azure.at_rate(0.0)
