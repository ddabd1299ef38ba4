"""Chunks of what a draft model has not read of slots, made where tokens are drawn: what was drawn last is known there
alone."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.engine.decode import POSITION


class UnreadChunks(NamedTuple):
    """As `layer_group.Chunks`, and what will have been read then."""

    rows: Array  # i32[3, T]
    spans: Array  # i32[2, S + 1]
    table: Array  # i32[S, W]
    fed: Array  # i32[B]


def unread_chunks(
    history: Array, state: Array, fed: Array, table: Array, picked: Array, places: Array, page_tokens: Array
) -> UnreadChunks:
    """Of some slots, the tokens before the one that is fed next, from the first that was not read.

    history i32[B, S]: tokens by position; fed i32[B]: how many of each slot's were read; table i32[B, W]: its pages;
    picked i32[2, S]: slots, B for none, and how many tokens of each at most, T in all; places i32[T]: 0, 1, 2, ...;
    page_tokens i32[]: of a page.
    """
    slots, most = jnp.minimum(picked[0], history.shape[0] - 1), jnp.where(picked[0] < history.shape[0], picked[1], 0)
    begun = jnp.minimum(fed[slots], state[POSITION][slots])
    number = jnp.minimum(state[POSITION][slots] - begun, most)
    ends = jnp.cumsum(number)
    of = jnp.minimum(jnp.searchsorted(ends, places, side="right"), slots.shape[0] - 1)
    positions, held = begun[of] + places - (ends - number)[of], places < ends[-1]
    positions = jnp.where(held, positions, 0)
    tokens = jnp.where(held, history[slots[of], positions], 0)
    pages = jnp.where(held, table[slots[of], positions // page_tokens], NULL_PAGE)
    reached = begun + number
    spans = jnp.zeros((2, slots.shape[0] + 1), jnp.int32)
    spans = spans.at[0, :-1].set(jnp.where(number > 0, reached, 0)).at[1, 1:].set(ends)
    pages_of = jnp.where(number[:, None] > 0, table[slots], NULL_PAGE)
    after = fed.at[jnp.where(number > 0, slots, history.shape[0])].set(reached, mode="drop")
    rows = jnp.stack([tokens, positions, pages])
    return UnreadChunks(*(each.astype(jnp.int32) for each in (rows, spans, pages_of, after)))


def picks(counts: dict[int, int], sequences: int, slots: int) -> np.ndarray:
    """i32[2, S]: these rows, and how many tokens of each."""
    found = np.full((2, sequences), slots, np.int32)
    found[1] = 0
    found[:, : len(counts)] = [*counts], [*counts.values()]
    return found
