"""Drawing tokens, against definitions in numpy that sort and loop."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.request import BROKEN, SamplingParams
from jdisagg.core.steps import History
from jdisagg.engine.sampling import (
    ROWS,
    SamplingRows,
    SamplingTensors,
    TokenCounters,
    counted,
    history_rows,
    inverse,
    is_plain,
    is_stop,
    largest_threshold,
    penalised,
    pick,
    pick_greedy,
    token_logprobs,
    truncated,
    weights_of,
    with_row,
)

V = 97  # not a multiple of the rows that weights are held in
PICK, PENALISED = jax.jit(pick), jax.jit(penalised)


def metadata_of(*sampling: SamplingParams, output_start: int = 0) -> SamplingTensors:
    rows = SamplingRows(len(sampling))
    for row, each in enumerate(sampling):
        rows.set(row, each, output_start)
    return rows.on(jax.device_put)


def no_counts(slots: int) -> TokenCounters:
    return TokenCounters(jnp.zeros((slots, V), bool), jnp.zeros((slots, V), jnp.int32))


def logits_of(slots: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(slots, V)).astype(np.float32) * 3


@jax.jit
def support(logits: jax.Array, metadata: SamplingTensors) -> jax.Array:
    """bool[B, V]: what may be drawn at temperature 1."""
    kept = truncated(weights_of(logits, jnp.ones(len(logits))), metadata)
    return kept.reshape(len(logits), -1)[:, :V] > 0


def support_by_sorting(logits: np.ndarray, sampling: SamplingParams) -> set[int]:
    """min-p, then the k largest, then the smallest set of the rest that holds mass top_p."""
    kept = np.exp(logits.astype(np.float64) - logits.max())
    order = [token for token in np.argsort(-logits, kind="stable") if kept[token] >= sampling.min_p]
    order = order[: sampling.top_k] if sampling.top_k > 0 else order
    mass = np.cumsum(kept[order]) / kept[order].sum()
    count = len(order) if sampling.top_p >= 1 else int(np.searchsorted(mass, sampling.top_p)) + 1
    return {int(token) for token in order[:count]}


@pytest.mark.parametrize("seed", range(3))
def test_what_top_k_top_p_and_min_p_leave_is_what_sorting_leaves(seed: int):
    cases = [
        SamplingParams(top_k=k, top_p=p, min_p=m)
        for k in (0, 1, 5, V + 9)
        for p in (0.1, 0.7, 0.99, 1.0)
        for m in (0.0, 0.05)
    ]
    logits = logits_of(len(cases), seed)
    kept = np.asarray(support(logits, metadata_of(*cases)))
    for row, case in enumerate(cases):
        assert set(np.flatnonzero(kept[row]).tolist()) == support_by_sorting(logits[row], case), case


def test_equal_values_at_the_border_are_all_kept():
    logits = np.zeros((1, V), np.float32)
    assert np.asarray(support(logits, metadata_of(SamplingParams(top_k=3)))).all()


def test_bisection_finds_the_kth_largest_exactly():
    values = np.array([0.5, 0.0, 1e-30, 0.50000006, 1.0, 2e-42], np.float32)
    bits = jnp.asarray(values.view(np.int32))[None]
    for k, expected in enumerate(sorted(values, reverse=True), start=1):
        found = largest_threshold(lambda t, k=k: jnp.sum(bits >= t[:, None], axis=1) >= k, 1)
        assert int(found[0]) == int(np.float32(expected).view(np.int32))


def test_the_inverse_walks_through_all_weights_and_never_lands_on_a_zero():
    generator = np.random.default_rng(0)
    weights = np.where(generator.random((1, 128)) < 0.7, 0, generator.random((1, 128))).astype(np.float32)
    shaped = jnp.asarray(weights).reshape(1, ROWS, -1)
    steps = np.linspace(0, 1, 3000, endpoint=False, dtype=np.float32)
    found = np.asarray(
        jax.jit(inverse)(jnp.repeat(shaped, len(steps) + 1, axis=0), np.append(steps, np.float32(1 - 2**-24)))
    )
    assert set(found.tolist()) == set(np.flatnonzero(weights[0]).tolist())
    np.testing.assert_allclose(np.bincount(found, minlength=128) / len(found), weights[0] / weights.sum(), atol=2e-3)


def test_penalties_follow_their_definition():
    sampling = SamplingParams(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    history, logits = History((1, 2, 3), (3, 4, 4)), logits_of(2)
    prompt, output = history_rows(history, V)
    counts = with_row(no_counts(2), jnp.int32(1), jnp.asarray(prompt), jnp.asarray(output))
    expected = logits.copy()
    for token in {*history.prompt, *history.output}:
        value = logits[1, token]
        expected[1, token] = value / 1.5 if value > 0 else value * 1.5
    for token in history.output:
        expected[1, token] -= 0.3
    for token in set(history.output):
        expected[1, token] -= 0.4
    found = PENALISED(logits, metadata_of(SamplingParams(), sampling), counts)
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-6)


def test_counts_take_each_drawn_token_and_no_masked_slot():
    counts = counted(counted(no_counts(3), jnp.array([5, -1, 7])), jnp.array([5, 6, -1]))
    expected = np.zeros((3, V), np.int32)
    expected[0, 5], expected[1, 6], expected[2, 7] = 2, 1, 1
    np.testing.assert_array_equal(np.asarray(counts.output), expected)


def test_temperature_zero_is_the_argmax_even_among_drawing_slots():
    logits = logits_of(4)
    sampling = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(),
    ]
    tokens = np.asarray(PICK(logits, metadata_of(*sampling), no_counts(4), np.zeros(4, np.int32)))
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()
    np.testing.assert_array_equal(np.asarray(pick_greedy(jnp.asarray(logits))), logits.argmax(axis=1))


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 40, V - 1])
def test_logits_that_are_no_numbers_draw_nothing_in_their_row_and_what_they_did_in_the_others(number, place):
    logits = logits_of(6)
    sampling = [SamplingParams(temperature=t, seed=9, top_p=0.9) for t in (0.0, 1.0, 0.7)] * 2
    whole = np.asarray(PICK(logits, metadata_of(*sampling), no_counts(6), np.zeros(6, np.int32)))
    logits[[0, 2], place] = number
    tokens = np.asarray(PICK(logits, metadata_of(*sampling), no_counts(6), np.zeros(6, np.int32)))
    assert tokens[[0, 2]].tolist() == [BROKEN] * 2
    np.testing.assert_array_equal(tokens[[1, 3, 4, 5]], whole[[1, 3, 4, 5]])
    greedy = np.asarray(jax.jit(pick_greedy)(logits))
    assert greedy[[0, 2]].tolist() == [BROKEN] * 2 and (greedy[[1, 3, 4, 5]] >= 0).all()


def test_the_coldest_temperature_is_greedy_and_no_division_by_nothing():
    logits, cold = logits_of(3), [SamplingParams(temperature=t) for t in (5e-324, 1e-40, 1e-9)]
    tokens = np.asarray(PICK(logits, metadata_of(*cold), no_counts(3), np.zeros(3, np.int32)))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**63, 10**100])
def test_a_top_k_over_the_vocabulary_leaves_everything_however_large(top_k):
    logits = logits_of(1)
    kept = np.asarray(support(logits, metadata_of(SamplingParams(top_k=top_k))))
    assert kept[0].all()


def test_logit_bias_lifts_and_bans():
    logits = logits_of(2)
    best = int(logits[0].argmax())
    greedy = SamplingParams(temperature=0.0)
    cases = [replace(greedy, logit_bias=((best, -100.0),)), replace(greedy, logit_bias=((9, 100.0),))]
    tokens = np.asarray(PICK(logits, metadata_of(*cases), no_counts(2), np.zeros(2, np.int32)))
    assert tokens[0] == np.argsort(-logits[0])[1] and tokens[1] == 9


def test_stop_tokens_are_held_back_until_min_tokens_are_out():
    logits = logits_of(1)
    best, second = np.argsort(-logits[0])[:2].tolist()
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(best,))
    metadata = metadata_of(sampling, output_start=10)
    drawn = [int(PICK(logits, metadata, no_counts(1), np.array([position], np.int32))[0]) for position in (10, 11, 12)]
    assert drawn == [second, second, best]
    tokens = jnp.array([best], jnp.int32)
    assert [bool(is_stop(tokens, metadata, jnp.array([p]))[0]) for p in (11, 12)] == [False, True]


def test_a_draw_knows_its_seed_and_position_and_nothing_of_the_batch():
    row, mine = logits_of(1)[0], SamplingParams(seed=1234567890123, top_p=0.9)
    alone = PICK(row[None], metadata_of(mine), no_counts(1), np.array([17], np.int32))
    crowd = logits_of(5, seed=9)
    crowd[3] = row
    others = [SamplingParams(seed=n, temperature=0.3 + n) for n in range(5)]
    others[3] = mine
    positions = np.array([1, 2, 3, 17, 4], np.int32)
    assert PICK(crowd, metadata_of(*others), no_counts(5), positions)[3] == alone[0]


def test_draws_follow_the_softmax():
    logits, draws = np.log(np.array([0.5, 0.3, 0.2], np.float32)), 4000
    rows = np.full((draws, V), -np.inf, np.float32)
    rows[:, :3] = logits
    tokens = np.asarray(
        PICK(
            rows,
            metadata_of(*[SamplingParams(seed=n) for n in range(draws)]),
            no_counts(draws),
            np.zeros(draws, np.int32),
        )
    )
    shares = np.bincount(tokens, minlength=3) / draws
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.03)


def test_logprobs_are_of_the_raw_logits_with_the_likeliest_first():
    logits = logits_of(2)
    chosen, ids, values = token_logprobs(jnp.asarray(logits), jnp.array([3, 4]))
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.asarray(chosen), expected[[0, 1], [3, 4]], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(ids), np.argsort(-logits, axis=1)[:, :20])
    np.testing.assert_allclose(np.asarray(values), -np.sort(-expected, axis=1)[:, :20], rtol=1e-5)


def test_plain_requests_are_those_the_argmax_answers():
    greedy = SamplingParams(temperature=0.0)
    assert is_plain(greedy) and is_plain(replace(greedy, stop_token_ids=(1,)))
    assert not is_plain(replace(greedy, logit_bias=((1, 1.0),)))
    assert not is_plain(replace(greedy, presence_penalty=1.0))
    assert not is_plain(replace(greedy, min_tokens=1, stop_token_ids=(1,)))
    assert not is_plain(SamplingParams())
