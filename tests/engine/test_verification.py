"""Rows of a draft count what stands before each of them: guesses too, while none of them has been drawn."""

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.core.request import SamplingParams
from jdisagg.engine.decode import MASKED
from jdisagg.engine.sampling import SamplingRows, TokenCounters, penalised
from jdisagg.engine.spec.drafting import counted_drafts, penalised_ahead

SLOTS, ROWS, VOCAB = 3, 4, 7


def scene() -> tuple[TokenCounters, SamplingRows]:
    random = np.random.default_rng(2)
    rows = SamplingRows(SLOTS)
    for slot in range(SLOTS):
        asked = SamplingParams(presence_penalty=0.3 * slot, frequency_penalty=0.7, repetition_penalty=1 + slot / 2)
        rows.set(slot, asked, 0)
    prompt, output = random.random((SLOTS, VOCAB)) < 0.3, random.integers(0, 2, (SLOTS, VOCAB))
    return TokenCounters(jnp.asarray(prompt), jnp.asarray(output, jnp.int32)), rows


def test_each_row_is_penalised_as_if_all_that_its_slot_is_fed_before_it_had_been_drawn():
    counts, rows = scene()
    metadata, fed = rows.on(jax.device_put), np.random.default_rng(3).integers(0, VOCAB, (SLOTS, ROWS))
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(SLOTS * ROWS, VOCAB)), jnp.float32)
    wide = jnp.zeros((4, SLOTS * ROWS), jnp.int32).at[0].set(jnp.asarray(fed.reshape(-1)))
    found = np.asarray(penalised_ahead(logits, wide, metadata, counts)).reshape(SLOTS, ROWS, VOCAB)
    for row in range(ROWS):
        output = np.array(counts.output)
        for slot in range(SLOTS):
            for guess in fed[slot, 1 : row + 1]:  # the first is the token that was drawn last, and is counted
                output[slot, guess] += 1
        own = logits.reshape(SLOTS, ROWS, VOCAB)[:, row]
        expected = penalised(own, metadata, TokenCounters(counts.prompt, jnp.asarray(output)))
        assert np.array_equal(found[:, row], np.asarray(expected))


def test_all_that_was_drawn_of_a_draft_is_counted_and_nothing_behind_it():
    counts, _ = scene()
    told = jnp.asarray([[1, 2, 2, MASKED, 3], [5, MASKED, MASKED, MASKED, 3], [MASKED] * 4 + [0]], jnp.int32)
    more = np.asarray(counted_drafts(counts, told).output) - np.asarray(counts.output)
    assert more.tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0] * 7]
