"""What the host guesses is what the device would have guessed."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.engine.spec.drafting import NO_GUESS, guessed
from jdisagg.engine.spec.grammar_masks import guess_after

LONGEST, DRAFTS = 24, 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST))
def test_what_the_host_guesses_is_what_the_device_would_have(tokens: list[int]):
    history = np.zeros((1, LONGEST), np.int32)
    history[0, : len(tokens)] = tokens
    state = jnp.asarray([[tokens[-1]], [len(tokens) - 1], [0], [1]], jnp.int32)
    found = np.asarray(guessed(jnp.asarray(history), state, DRAFTS))[0].tolist()
    assert guess_after(tokens, DRAFTS) == [token for token in found if token != NO_GUESS]
