"""Random walks go where no search comes: more of everything, and much going wrong at once."""

from __future__ import annotations

import pytest

from tests.explore.walks import walk_many


@pytest.mark.parametrize(
    "first_seed",
    [
        0,
        pytest.param(20, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.hostile) for seed in (40, 60)),
    ],
)
def test_random_walks_through_large_worlds_break_no_law(first_seed):
    walked = walk_many(20, first_seed)
    print(walked.line())
    assert walked.walks == 20 and walked.outcomes["length"] > 0
