"""Drawing tokens on the device: pure functions over logits f32[B, V] and each slot's knobs.

Two ways to a token. `pick_greedy` is the argmax alone. `pick` does everything, in vLLM's order: penalties, logit bias,
stop tokens held back until `min_tokens`, temperature, min-p, top-k, top-p, then Gumbel noise (the Gumbel-max trick: the
argmax of logits + noise is a draw from their softmax). The noise is a function of the request's seed and the token's
position in its sequence, so a draw does not know what else is in the batch, nor in which slot it runs.

Nothing is sorted. Keeping the k largest, or the smallest set that holds mass p, is keeping all values from some
threshold up; both "how many are at least t" and "how much mass is at least t" only fall as t rises, so the threshold is
found by bisection. The order of f32 is that of its bits read as integers (negative ones flipped), so 32 halvings of the
integers find the exact threshold: the result is the sort-based one, with equal values at the border all kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jdisagg.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS

NUM_TOP = MAX_LOGPROBS
NEVER = -jnp.inf


class Knobs(NamedTuple):
    """What B slots asked for, packed in two host-made arrays so that an admission costs two small transfers."""

    ints: Array  # i32[B, INT_COLUMNS]
    floats: Array  # f32[B, FLOAT_COLUMNS]


# Columns of Knobs.ints, then MAX_STOP_TOKENS stop tokens and MAX_LOGIT_BIAS biased tokens (-1 where unused).
TOP_K, SEED_LOW, SEED_HIGH, FIRST_STOP_POSITION, STOPS = 0, 1, 2, 3, 4
BIASED = STOPS + MAX_STOP_TOKENS
INT_COLUMNS = BIASED + MAX_LOGIT_BIAS
# Columns of Knobs.floats, then the biases.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, BIASES = range(7)
FLOAT_COLUMNS = BIASES + MAX_LOGIT_BIAS


class Counts(NamedTuple):
    """What penalties look at."""

    prompt: Array  # bool[B, V]: in the prompt
    output: Array  # i32[B, V]: times in the output


def pick_greedy(logits: Array) -> Array:
    """f32[B, V] -> i32[B], the first of the largest."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def pick(logits: Array, knobs: Knobs, counts: Counts, positions: Array) -> Array:
    """One token a slot, i32[B]; `positions` i32[B] are the drawn tokens' own places in their sequences."""
    logits = biased(penalised(logits, knobs, counts), knobs)
    logits = without_stops(logits, knobs, positions)
    temperature = knobs.floats[:, TEMPERATURE]
    greedy = temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    kept = jnp.where(supported(scaled, knobs), scaled, NEVER)
    noisy = kept + gumbel(knobs, positions, logits.shape[1])
    return jnp.argmax(jnp.where(greedy[:, None], logits, noisy), axis=-1).astype(jnp.int32)


def penalised(logits: Array, knobs: Knobs, counts: Counts) -> Array:
    """Repetition (Keskar et al. 2019, section 4.1) over prompt and output; presence and frequency over output."""
    repetition, presence, frequency = (knobs.floats[:, c, None] for c in (REPETITION, PRESENCE, FREQUENCY))
    drawn = counts.output > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(drawn | counts.prompt, repeated, logits)
    return logits - frequency * counts.output - presence * drawn


def biased(logits: Array, knobs: Knobs) -> Array:
    """Adds each slot's logit biases; unused entries point past the vocabulary and are dropped."""
    tokens = knobs.ints[:, BIASED:]
    tokens = jnp.where(tokens < 0, logits.shape[1], tokens)
    slots = jnp.arange(logits.shape[0])[:, None]
    return logits.at[slots, tokens].add(knobs.floats[:, BIASES:], mode="drop")


def without_stops(logits: Array, knobs: Knobs, positions: Array) -> Array:
    """Stop tokens are out of reach before the position from which `min_tokens` allows them."""
    early = positions < knobs.ints[:, FIRST_STOP_POSITION]
    stops = knobs.ints[:, STOPS:BIASED]
    stops = jnp.where((stops < 0) | ~early[:, None], logits.shape[1], stops)
    return logits.at[jnp.arange(logits.shape[0])[:, None], stops].set(NEVER, mode="drop")


def is_stop(tokens: Array, knobs: Knobs, positions: Array) -> Array:
    """bool[B]: the token drawn for that position ends its sequence."""
    allowed = positions >= knobs.ints[:, FIRST_STOP_POSITION]
    return allowed & jnp.any(tokens[:, None] == knobs.ints[:, STOPS:BIASED], axis=1)


def supported(scaled: Array, knobs: Knobs) -> Array:
    """bool[B, V]: the tokens that min-p, top-k and top-p leave, of f32[B, V] logits over temperature."""
    top_k, top_p, min_p = knobs.ints[:, TOP_K], knobs.floats[:, TOP_P], knobs.floats[:, MIN_P]
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    keep = weights >= min_p[:, None]
    order = sortable(jnp.where(keep, scaled, NEVER))
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[1]), scaled.shape[1])
    keep &= order >= largest_threshold(lambda t: jnp.sum(order >= t[:, None], axis=1) >= wanted, len(order))[:, None]
    weights = jnp.where(keep, weights, 0.0)
    mass = top_p * jnp.sum(weights, axis=1)
    nucleus = largest_threshold(
        lambda t: jnp.sum(jnp.where(order >= t[:, None], weights, 0.0), axis=1) >= mass, len(order)
    )
    return keep & ((order >= nucleus[:, None]) | (top_p >= 1.0)[:, None])


def sortable(values: Array) -> Array:
    """f32 -> i32 of the same order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def largest_threshold(holds: Callable[[Array], Array], rows: int) -> Array:
    """i32[rows]: for each row the largest t that `holds`; it holds up to some t and from there on does not.

    Where it holds nowhere the smallest integer is returned, which keeps everything.
    """
    lowest, highest = (jnp.full(rows, bound, jnp.int32) for bound in (-(2**31), 2**31 - 1))

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        found = holds(middle) | (low == high)
        return jnp.where(found, middle, low), jnp.where(found, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (lowest, highest))[0]


def gumbel(knobs: Knobs, positions: Array, vocab_size: int) -> Array:
    """f32[B, V] of noise, a function of (seed, position) alone."""
    words = jax.lax.bitcast_convert_type(knobs.ints[:, SEED_LOW : SEED_HIGH + 1], jnp.uint32)[:, ::-1]

    def row(key: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,))

    return jax.vmap(row)(words, positions)


def token_logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Of the raw logits f32[B, V]: the tokens' log-probability f32[B], the likeliest i32[B, 20] and theirs f32[B, 20].

    With fewer than 20 tokens in the vocabulary the lists are as long as it.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    values, ids = jax.lax.top_k(logprobs, min(NUM_TOP, logits.shape[1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return chosen, ids.astype(jnp.int32), values


def counted(counts: Counts, tokens: Array) -> Counts:
    """The counts with one more output token a slot; a token of -1 (masked slot) counts for nothing."""
    vocab = counts.output.shape[1]
    slots, tokens = jnp.arange(len(tokens)), jnp.where(tokens < 0, vocab, tokens)
    return counts._replace(output=counts.output.at[slots, tokens].add(1, mode="drop"))


def with_row(counts: Counts, slot: Array, prompt: Array, output: Array) -> Counts:
    """The counts with one slot's rows replaced: bool[V] and i32[V]."""
    return Counts(counts.prompt.at[slot].set(prompt), counts.output.at[slot].set(output))
