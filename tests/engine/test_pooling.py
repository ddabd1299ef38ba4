"""Pooled states: sums of whole numbers, the same however rows are cut into steps."""

from __future__ import annotations

from fractions import Fraction

import jax
import numpy as np
import pytest

from jdisagg.core.request import POOLED_ONE, RequestId, SamplingParams
from jdisagg.core.steps import PrefillChunk
from jdisagg.engine.pooling import MOST_STATE, pooled, summed_rows, whole

HIDDEN = 16
SUM = jax.jit(pooled)


def states(rows: int, seed: int = 0) -> np.ndarray:
    """Of every size that a number of a state may have."""
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(rows, HIDDEN)) * 2.0 ** draw.integers(-30, 10, (rows, HIDDEN))).astype(np.float32)


def by_definition(rows: np.ndarray) -> tuple[int, ...]:
    return tuple(sum(round(Fraction(float(value)) * POOLED_ONE) for value in column) for column in rows.T)


def sums(x: np.ndarray, *runs: tuple[int, int]) -> list[tuple[int, ...]]:
    parts = np.asarray(SUM(x, np.array(runs, np.int32).T))
    return [whole(parts[:, index]) for index in range(len(runs))]


def test_sums_are_exact_to_the_last_part():
    x = states(64)
    assert sums(x, (0, 40), (40, 41), (50, 64)) == [by_definition(x[a:b]) for a, b in ((0, 40), (40, 41), (50, 64))]


def test_rows_of_nobody_count_for_nothing():
    assert sums(states(8), (0, 0), (3, 3)) == [(0,) * HIDDEN] * 2


def test_the_most_that_states_may_be_is_summed_and_more_is_cut_off():
    x = np.full((1000, HIDDEN), MOST_STATE, np.float32)
    x[0], x[1], x[2] = 1e30, np.inf, np.nan
    assert sums(x, (0, 1000)) == [(999 * MOST_STATE * POOLED_ONE,) * HIDDEN]
    assert sums(-x, (0, 1000)) == [(-999 * MOST_STATE * POOLED_ONE,) * HIDDEN]


def chunk(pooling: str, tokens: int, last: bool) -> PrefillChunk:
    sampling = SamplingParams(max_tokens=1, pooling=pooling)
    return PrefillChunk(RequestId("a"), (7,) * tokens, 0, (), last, sampling)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ([("mean", 5, False), ("last", 4, True)], [(0, 5), (8, 9), (0, 0)]),
        ([("last", 5, False), ("", 4, True), ("mean", 3, True)], [(0, 0), (0, 0), (9, 12)]),
    ],
)
def test_of_each_chunk_all_rows_are_summed_or_the_last_one_of_its_prompt(
    kinds: list[tuple[str, int, bool]], runs: list[tuple[int, int]]
) -> None:
    assert [*map(tuple, summed_rows([chunk(*kind) for kind in kinds], 3).T.tolist())] == runs
