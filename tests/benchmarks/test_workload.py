"""Draws that are the same every time."""

import pytest

from benchmarks.workload import Lengths, Workload


def test_lengths_are_read_as_fixed_or_as_a_range_and_written_back() -> None:
    assert Lengths.parse("128") == Lengths(128, 128)
    assert str(Lengths.parse("32:512")) == "32:512"
    assert str(Lengths.parse("7:7")) == "7"


@pytest.mark.parametrize("text", ["", "x", "0", "9:3", "1:2:3"])
def test_lengths_that_cannot_be_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="lengths are"):
        Lengths.parse(text)


def test_the_same_seed_draws_the_same_jobs_and_another_seed_others() -> None:
    workload = Workload(Lengths(4, 40), Lengths(1, 9), vocab_size=4096)
    assert workload.draw(20, "a") == workload.draw(20, "a")
    assert workload.draw(20, "a") != workload.draw(20, "b")


def test_lengths_and_tokens_stay_in_their_ranges() -> None:
    jobs = Workload(Lengths(4, 40), Lengths(1, 9), vocab_size=1000).draw(200, "a")
    assert {len(job.prompt) for job in jobs} == set(range(4, 41))
    assert {job.max_tokens for job in jobs} == set(range(1, 10))
    assert all(300 <= token < 1000 for job in jobs for token in job.prompt if isinstance(token, int))


def test_text_has_as_many_words_as_asked_for() -> None:
    (job,) = Workload(Lengths(12, 12), Lengths(1, 1), vocab_size=1000, text=True).draw(1, "a")
    assert isinstance(job.prompt, str)
    assert len(job.prompt.split()) == 12
