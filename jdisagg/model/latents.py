"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries over latents, absorbed or expanded.

What is kept of a token is one row, its latent (R numbers) and a rotated key that all heads share. A head's key is made
of the latent by N rows of `up`, its value by V rows. So a query may attend in two ways, with the same result:

* *absorbed*: the head's query is multiplied by the rows that make keys, attends to the rows as they are, and what it
  mixes is multiplied by the rows that make values. A pair of query and key costs 2 (2 R + rotated), a token's query
  2 R (N + V), and nothing is ever made of the tokens that are held.
* *expanded*: keys and values of all heads are made of every row, for 2 R (N + V) each. A pair then costs
  2 (N + rotated + V), less than a third of the other in DeepSeek-V3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class LatentQueries(NamedTuple):
    """Queries of some rows, and what keys and values are made by."""

    nope: Array  # [..., H, N], of what is not rotated
    rope: Array  # [..., H, rotated]
    up: Array  # [H, N + V, R]: rows that make a head's key, then those that make its value

    def of(self, rows: slice) -> "LatentQueries":
        """Some of the rows."""
        return LatentQueries(self.nope[rows], self.rope[rows], self.up)

    @property
    def key_size(self) -> int:
        """Numbers of a key that was made of a latent."""
        return self.nope.shape[-1] + self.rope.shape[-1]

    @property
    def value_size(self) -> int:
        """Numbers of a value."""
        return self.up.shape[1] - self.nope.shape[-1]

    @property
    def whole(self) -> Array:
        """[..., H, N + rotated], for keys that were made of latents."""
        return jnp.concatenate([self.nope, self.rope], axis=-1)

    @property
    def absorbed(self) -> Array:
        """[..., H, R + rotated], for rows as they are kept."""
        keys = self.up[:, : self.nope.shape[-1]]
        return jnp.concatenate([jnp.einsum("...hn,hnr->...hr", self.nope, keys), self.rope], axis=-1)

    def values_of(self, mixed: Array) -> Array:
        """Mixtures of latents [..., H, R] -> of values [..., H, V]."""
        return jnp.einsum("...hr,hvr->...hv", mixed, self.up[:, self.nope.shape[-1] :])

    def expanded(self, rows: Array) -> tuple[Array, Array]:
        """Rows as they are kept [..., R + rotated] -> keys [..., H, N + rotated] and values [..., H, V]."""
        rank, split = self.up.shape[2], self.nope.shape[-1]
        made = jnp.einsum("...r,hmr->...hm", rows[..., :rank], self.up)
        shared = jnp.broadcast_to(rows[..., None, rank:], (*made.shape[:-1], rows.shape[-1] - rank))
        return jnp.concatenate([made[..., :split], shared], axis=-1), made[..., split:]


def halves_of(x: Array) -> Array:
    """[..., D] whose pairs are neighbours -> first numbers of all pairs, then second ones, as `rotate` takes them."""
    return jax.lax.reshape(jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2), x.shape)
