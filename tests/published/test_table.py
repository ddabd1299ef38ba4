"""The table tells what was held, what was missed and why, and what did not run."""

from tests.published.gates import absolute, relative
from tests.published.table import Collector, full_table, summary

MISSED = relative("goodput | 13B", 2.3, 3.0, 0.2, "reservations first")
FOUND = Collector({"test_arithmetic": [absolute("nodes", 70, 70, 0), MISSED]}, {"no file in --data_dir": 3})


def test_a_row_says_target_published_ours_band_verdict_and_why():
    table = full_table(FOUND)
    assert "| nodes | 70 | 70 | ±0 | within |  |" in table
    assert "| goodput / 13B | 2.3 | 3 | ±20 % | outside | reservations first |" in table
    assert "Not run: 3 tests, no file in --data_dir." in table


def test_the_summary_counts_and_names_the_misses():
    text = summary(FOUND)
    assert "| 2 | 1 |" in text and "Missed: goodput" in text
