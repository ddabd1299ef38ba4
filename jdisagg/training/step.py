"""The training step: one pure jitted function over a flat list of leaves, weights and optimiser state donated."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.network import Stage, attending
from jdisagg.training.attention import blocked_attend

Leaves = list[Array]
TrainStep = Callable[[Leaves, optax.OptState, Array], tuple[Leaves, optax.OptState, Array, Array]]


@dataclass(frozen=True, slots=True)
class OptimiserSettings:
    """AdamW (Loshchilov and Hutter 2019); the rate warms up, stays, then falls linearly to zero (Hu 2024, "WSD").

    While the rate stays, the end of a run may still be moved: only its last `decay_steps` depend on it.
    """

    learning_rate: float
    warmup_steps: int
    decay_steps: int
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Network:
    """A model taken apart once: `merge` puts leaves back into it inside a traced function."""

    leaves: Leaves
    merge: Callable[[Leaves], Stage]


def new_network(config: ModelConfig, seed: int) -> Network:
    """The whole model in f32 with seeded random weights."""
    return split(Stage(config, range(config.num_layers), rngs=nnx.Rngs(seed)))


def split(model: Stage) -> Network:
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Network(leaves, lambda parts: nnx.merge(graph, jax.tree.unflatten(tree, parts)))


def logits_of(model: Stage, tokens: Array) -> Array:
    """f32[B, T, V] of i32[B, T]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model.run_layers(model.embed_tokens(tokens), positions, attending(blocked_attend)))


def token_losses(model: Stage, tokens: Array) -> Array:
    """f32[B, T]: nats of each next token, of i32[B, T + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = logits_of(model, inputs)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def make_optimiser(settings: OptimiserSettings, total_steps: int) -> optax.GradientTransformation:
    stay = total_steps - settings.warmup_steps - settings.decay_steps
    if stay < 0:
        raise ConfigError(
            f"warmup_steps + decay_steps = {total_steps - stay} is more than the run's {total_steps} steps"
        )
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, settings.learning_rate, settings.warmup_steps),
            optax.constant_schedule(settings.learning_rate),
            optax.linear_schedule(settings.learning_rate, 0.0, settings.decay_steps),
        ],
        [settings.warmup_steps, settings.warmup_steps + stay],
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            schedule,
            b1=settings.beta1,
            b2=settings.beta2,
            weight_decay=settings.weight_decay,
            mask=lambda leaves: jax.tree.map(lambda leaf: leaf.ndim > 1, leaves),  # norms are not pulled to zero
        ),
    )


def make_step(network: Network, optimiser: optax.GradientTransformation) -> TrainStep:
    """(leaves, state, i32[B, T + 1]) -> (leaves, state, mean loss in nats, gradient norm); donates the first two."""

    def loss_of(leaves: Leaves, tokens: Array) -> Array:
        return token_losses(network.merge(leaves), tokens).mean()

    def step(leaves: Leaves, state: optax.OptState, tokens: Array) -> tuple[Leaves, optax.OptState, Array, Array]:
        loss, gradients = jax.value_and_grad(loss_of)(leaves, tokens)
        leaves, state = updated(optimiser, leaves, state, gradients)
        return leaves, state, loss, jnp.sqrt(sum(jnp.vdot(part, part) for part in gradients))

    return jax.jit(step, donate_argnums=(0, 1))


def updated(
    optimiser: optax.GradientTransformation, leaves: Leaves, state: optax.OptState, gradients: Leaves
) -> tuple[Leaves, optax.OptState]:
    with jax.numpy_dtype_promotion("standard"):  # optax counts in i32 what it multiplies by f32
        updates, state = optimiser.update(gradients, state, leaves)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(jnp.add, leaves, updates), state
