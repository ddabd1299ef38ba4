from benchmarks.mixed_steps import between


def test_a_gap_counts_where_any_of_it_falls_into_the_prompts_computation():
    times = [0.0, 1.0, 2.5, 3.0, 6.0, 7.0]
    assert between(times, began_s=2.0, ended_s=4.0) == [1.5, 0.5, 3.0]


def test_no_gap_counts_before_or_after():
    assert between([0.0, 1.0, 5.0, 6.0], began_s=5.5, ended_s=5.8) == [1.0] and between([0.0, 1.0], 2.0, 3.0) == []
