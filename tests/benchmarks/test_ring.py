from benchmarks.ring import Round, row_of


def test_ratios_are_of_pairs_and_medians_of_rounds():
    """A machine that is twice as slow in one round slows both of the pair."""
    stages = [Round(1.0, 10.0), Round(2.0, 5.0), Round(1.0, 10.0)]
    ring = [Round(0.8, 12.0), Round(1.6, 6.0), Round(0.9, 11.0)]
    row = row_of("ring, 8", 4, ring, stages)
    assert (row.tpot_s, row.tokens_per_s, round(row.ratio, 6)) == (0.9, 11.0, 0.8)
    assert row_of("stages", 4, stages, stages).ratio == 1.0
