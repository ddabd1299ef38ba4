"""The training step: a pure jitted function over a flat list of leaves, with weights and optimiser state donated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.latent_attention import LatentQueries
from jdisagg.model.network import Stage, attending

# Causal attention for training on long sequences: blocks of queries, one KV head at a time, with a custom backward
# pass.
#
# FlashAttention's algorithm (Dao 2022, section 3: the backward pass recomputes the weights from the log-sum-exp) for a
# CPU: each product is a 2-D matrix product that fits the cache, and blocks above the diagonal are never computed. On
# one core forward + backward takes 0.37, 0.37 and 0.10 of `dense_attend`'s time at 256, 512 and 2048 tokens.

Residuals = tuple[Array, Array, Array, Array, Array]
BLOCK = 128  # query tokens per block; forward + backward takes 0.84 of the time that 256 takes at 2048 tokens


def blocked_attend(
    layer: int, q: Array | LatentQueries, k: Array, v: Array | None, sinks: Array | None = None
) -> Array:
    """Computes plain causal attention: q [B, T, Hq, D], k and v [B, T, Hkv, D] -> [B, T, Hq, D]; an `Attend` of the
    network."""
    assert not isinstance(q, LatentQueries) and v is not None and sinks is None, layer  # no such model is trained
    size, length, heads, depth = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(size, length, kv_heads, heads // kv_heads, depth).transpose(0, 2, 3, 1, 4)
    mixed = _attend(
        grouped.reshape(size * kv_heads, heads // kv_heads, length, depth),
        k.transpose(0, 2, 1, 3).reshape(size * kv_heads, length, depth),
        v.transpose(0, 2, 1, 3).reshape(size * kv_heads, length, depth),
    )
    mixed = mixed.reshape(size, kv_heads, heads // kv_heads, length, depth)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape)


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array) -> Array:
    """Computes attention of q f32[N, G, T, D] (G query heads per KV head) over k and v f32[N, T, D] -> f32[N, G, T,
    D]."""
    return _attend_forward(q, k, v)[0]


def _attend_forward(q: Array, k: Array, v: Array) -> tuple[Array, Residuals]:
    def one_head(head: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, k, v = head
        blocks = [_block_forward(q[:, span], k[: span.stop], v[: span.stop], span.start) for span in _spans(q)]
        return jnp.concatenate([out for out, _ in blocks], 1), jnp.concatenate([lse for _, lse in blocks], 1)

    out, lse = jax.lax.map(one_head, (q, k, v))
    return out, (q, k, v, out, lse)


def _attend_backward(residuals: Residuals, d_out: Array) -> tuple[Array, Array, Array]:
    def one_head(head: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, k, v, out, lse, d_out = head
        d_q, d_k, d_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
        for span in _spans(q):
            rows = (q[:, span], out[:, span], lse[:, span], d_out[:, span])
            block = _block_backward(*rows, k[: span.stop], v[: span.stop], span.start)
            d_q.append(block[0])
            d_k, d_v = d_k.at[: span.stop].add(block[1]), d_v.at[: span.stop].add(block[2])
        return jnp.concatenate(d_q, 1), d_k, d_v

    return jax.lax.map(one_head, (*residuals, d_out))


_attend.defvjp(_attend_forward, _attend_backward)


def _spans(q: Array) -> list[slice]:
    return [slice(start, min(start + BLOCK, q.shape[1])) for start in range(0, q.shape[1], BLOCK)]


def _scores(q: Array, k: Array, start: int) -> Array:
    """Returns scores [G, R, S] of q [G, R, D] at positions `start`.. and k [S, D] at positions 0..; later keys get
    -1e30."""
    groups, rows, depth = q.shape
    scores = (q.reshape(groups * rows, depth) @ k.T).reshape(groups, rows, k.shape[0]) * depth**-0.5
    seen = start + jnp.arange(rows)[:, None] >= jnp.arange(k.shape[0])[None, :]
    return jnp.where(seen[None], scores, -1e30)


def _block_forward(q: Array, k: Array, v: Array, start: int) -> tuple[Array, Array]:
    """Returns the block's output [G, R, D] and the log-sum-exp of its scores [G, R, 1]."""
    scores = _scores(q, k, start)
    highest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    out = (weights.reshape(-1, k.shape[0]) @ v).reshape(q.shape) / total
    return out, highest + jnp.log(total)


def _block_backward(
    q: Array, out: Array, lse: Array, d_out: Array, k: Array, v: Array, start: int
) -> tuple[Array, Array, Array]:
    rows, depth = q.shape[0] * q.shape[1], q.shape[2]
    weights = jnp.exp(_scores(q, k, start) - lse)
    flat_d_out = d_out.reshape(rows, depth)
    d_v = weights.reshape(rows, -1).T @ flat_d_out
    d_weights = (flat_d_out @ v.T).reshape(weights.shape)
    d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdims=True)) * depth**-0.5
    flat_d_scores = d_scores.reshape(rows, -1)
    return (flat_d_scores @ k).reshape(q.shape), flat_d_scores.T @ q.reshape(rows, depth), d_v


Leaves = list[Array]
TrainStep = Callable[[Leaves, optax.OptState, Array], tuple[Leaves, optax.OptState, Array, Array]]


@dataclass(frozen=True, slots=True)
class OptimiserSettings:
    """AdamW (Loshchilov and Hutter 2019); the rate warms up, stays, then falls linearly to zero (Hu 2024, "WSD"). While
    the rate is constant, the end of a run may still be moved: only its last `decay_steps` depend on it."""

    learning_rate: float
    warmup_steps: int
    decay_steps: int
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model split into leaves and structure: `merge` rebuilds it from leaves inside a traced function."""

    leaves: Leaves
    merge: Callable[[Leaves], Stage]


def new_network(config: ModelConfig, seed: int) -> SplitModel:
    """Returns the whole model in f32 with seeded random weights."""
    return split(Stage(config, range(config.num_layers), rngs=nnx.Rngs(seed)))


def split(model: Stage) -> SplitModel:
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return SplitModel(leaves, lambda parts: nnx.merge(graph, jax.tree.unflatten(tree, parts)))


def logits_of(model: Stage, tokens: Array) -> Array:
    """Returns logits f32[B, T, V] of tokens i32[B, T]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model.run_layers(model.embed_tokens(tokens), positions, attending(blocked_attend)))


def token_losses(model: Stage, tokens: Array) -> Array:
    """Returns the loss f32[B, T] in nats of each next token in i32[B, T + 1]."""
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
            mask=lambda leaves: jax.tree.map(lambda leaf: leaf.ndim > 1, leaves),  # norms have no weight decay
        ),
    )


def make_step(network: SplitModel, optimiser: optax.GradientTransformation) -> TrainStep:
    """Returns a jitted (leaves, state, i32[B, T + 1]) -> (leaves, state, mean loss in nats, gradient norm) that donates
    leaves and state."""

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
