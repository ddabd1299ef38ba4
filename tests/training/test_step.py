"""The training step: it learns, and its rate ends where it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.model.network import forward
from jdisagg.training.data import make_tokenizer
from jdisagg.training.run import TrainSettings
from jdisagg.training.step import OptimiserSettings, make_optimiser, make_step, new_network, token_losses

LINES = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return add(a, a)\n"


def test_a_tiny_model_overfits_a_few_lines(settings: TrainSettings) -> None:
    tokenizer = make_tokenizer([LINES], 320)
    tokens = jnp.asarray([[0, *tokenizer.encode(LINES).ids]], jnp.int32)
    network = new_network(settings.model, seed=0)
    optimiser = make_optimiser(OptimiserSettings(3e-2, 5, 40, weight_decay=0.0), 80)
    step = make_step(network, optimiser)
    leaves, state, losses = network.leaves, optimiser.init(network.leaves), []
    for _ in range(80):
        leaves, state, loss, _ = step(leaves, state, tokens)
        losses.append(float(loss))
    assert losses[0] > 5 and losses[-1] < 0.05
    predicted = jnp.argmax(jax.jit(lambda parts: forward(network.merge(parts), tokens[:, :-1]))(leaves), axis=-1)
    assert tokenizer.decode(predicted[0].tolist()) == LINES


def test_token_losses_are_those_of_the_full_forward(settings: TrainSettings) -> None:
    network = new_network(settings.model, seed=0)
    tokens = jax.random.randint(jax.random.key(1), (2, 41), 0, settings.model.vocab_size)
    logits = jax.jit(lambda leaves: forward(network.merge(leaves), tokens[:, :-1]))(network.leaves)
    losses = jax.jit(lambda leaves: token_losses(network.merge(leaves), tokens))(network.leaves)
    wanted = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    assert jnp.abs(losses - wanted).max() < 1e-4


def test_the_rate_has_fallen_to_zero_at_the_end(settings: TrainSettings) -> None:
    leaves = [jnp.ones((2, 2))]
    optimiser = make_optimiser(OptimiserSettings(0.1, 2, 3, weight_decay=0.0), 8)
    state, moves = optimiser.init(leaves), []
    for _ in range(9):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update([jnp.ones((2, 2))], state, leaves)
        moves.append(-float(np.ravel(jax.tree.leaves(updates)[0])[0]))
    expected = [0, 0.05, 0.1, 0.1, 0.1, 0.1, 0.2 / 3, 0.1 / 3, 0]
    assert moves == pytest.approx(expected, abs=1e-4)


def test_a_schedule_longer_than_the_run_is_a_named_error() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps \+ decay_steps = 12 is more than the run's 8 steps"):
        make_optimiser(OptimiserSettings(0.1, 2, 10), 8)
