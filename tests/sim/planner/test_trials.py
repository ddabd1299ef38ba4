"""What a trial counts of its requests."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from jdisagg.sim.planner.search import _quantile


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.95, 1.0])
def test_a_quantile_is_numpys_and_infinite_beside_those_that_were_turned_away(share: float):
    """numpy subtracts infinities there: a warning, and no number."""
    finite = np.array([3.0, 1.0, 2.0, 5.0, 4.0, 9.0])
    some, all_of_them = np.array([1.0, math.inf, 2.0, math.inf]), np.array([math.inf] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _quantile(finite, share) == np.quantile(finite, share)
        assert _quantile(some, share) == (1.0 + 3 * share if share <= 1 / 3 else math.inf)
        assert _quantile(all_of_them, share) == math.inf
