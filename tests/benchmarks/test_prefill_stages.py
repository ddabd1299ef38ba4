from benchmarks.prefill_stages import Round, row_of


def test_ratios_are_the_stages_times_over_the_mesh_beside_them_in_pairs():
    """A machine that is twice as slow in one round slows both of the pair."""
    stages = [Round(0.7, 10.0), Round(1.4, 5.0), Round(0.8, 9.0)]
    shards = [Round(1.0, 8.0), Round(2.0, 4.0), Round(1.0, 8.0)]
    row = row_of("tp2", (1984, 1), shards, stages)
    assert (row.mesh, row.prompt_tokens, row.batch) == ("tp2", 1984, 1)
    assert (row.ttft_s, row.tokens_per_s, round(row.ratio, 6)) == (1.0, 8.0, 0.7)
    assert row_of("pp2", (1984, 1), stages, stages).ratio == 1.0
