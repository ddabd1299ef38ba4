"""Figures computed by hand."""

import pytest

from benchmarks.figures import SLO, Spread, summed_up
from benchmarks.load import Burst, Sample

LEDGER = {"queue": 2_000_000, "decode": 4_000_000}
QUICK = Sample(0.0, (0.1, 0.2, 0.3), 0.31, 10, 3, LEDGER)
SLOW = Sample(0.0, (0.5, 1.0), 1.1, 10, 2, {"queue": 4_000_000, "decode": 0})
FAILED = Sample(0.0, error="gone", ended_s=0.2)
SLO_200_150 = SLO(ttft_ms=200, tpot_ms=150)


def test_percentiles_are_values_that_occurred() -> None:
    spread = Spread.of(n / 1000 for n in range(100, 0, -1))
    assert spread is not None
    assert (spread.p50, spread.p90, spread.p99) == pytest.approx((50, 90, 99))
    assert spread.mean == pytest.approx(50.5)


def test_the_spread_of_nothing_is_none() -> None:
    assert Spread.of([]) is None


def test_tpot_spreads_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    merged = Sample(0.0, (0.1, 0.4), 0.4, 10, num_tokens=4)  # three tokens came at once
    assert merged.tpot_s == pytest.approx(0.1)
    assert Sample(0.0, (0.1,), 0.1, 10, num_tokens=1).tpot_s is None


def test_rates_count_whole_answers_over_the_wall() -> None:
    figures = summed_up(Burst(2, 2.0, (QUICK, SLOW, FAILED)), SLO_200_150)
    assert (figures.requests, figures.failed, figures.output_tokens) == (3, 1, 5)
    assert figures.output_tokens_per_s == pytest.approx(2.5)
    assert figures.requests_per_s == pytest.approx(1.0)
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.p50 == pytest.approx(100)


def test_goodput_counts_requests_within_both_limits_among_all_asked_for() -> None:
    figures = summed_up(Burst(2, 2.0, (QUICK, SLOW, FAILED)), SLO_200_150)
    assert figures.good_share == pytest.approx(1 / 3)
    assert figures.good_requests_per_s == pytest.approx(0.5)
    assert not SLO(ttft_ms=99, tpot_ms=150).met_by(QUICK)
    assert not SLO(ttft_ms=200, tpot_ms=99).met_by(QUICK)


def test_ledger_means_are_in_milliseconds_over_the_samples_that_have_one() -> None:
    figures = summed_up(Burst(2, 2.0, (QUICK, SLOW, FAILED)), SLO_200_150)
    assert figures.ledger_ms == {"queue": 3.0, "decode": 2.0}


def test_a_level_where_everything_failed_still_has_figures() -> None:
    figures = summed_up(Burst(1, 1.0, (FAILED,)), SLO_200_150)
    assert (figures.ttft_ms, figures.output_tokens_per_s, figures.good_share, figures.ledger_ms) == (None, 0, 0, {})
