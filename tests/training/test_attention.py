"""Blocked attention against the network's plain one."""

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from jdisagg.core.model_config import AttentionOptions
from jdisagg.model.network import Attend, dense_attend
from jdisagg.training.step import blocked_attend


@pytest.mark.parametrize("length", [5, 300])
def test_blocked_attention_and_its_gradients_equal_the_plain_one(length: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (
        jax.random.normal(key, (2, length, heads, 8)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    )

    def weighed(attend: Attend, q: Array, k: Array, v: Array) -> Array:
        return (attend(0, q, k, v, None) * weight).sum()

    plain = dense_attend(lambda layer: AttentionOptions(8**-0.5, None, None))
    both = jax.jit(jax.value_and_grad(weighed, argnums=(1, 2, 3)), static_argnums=0)
    (got_sum, got), (wanted_sum, wanted) = both(blocked_attend, q, k, v), both(plain, q, k, v)
    assert jnp.abs(got_sum - wanted_sum) < 1e-2
    for one, other in zip(got, wanted, strict=True):
        assert jnp.abs(one - other).max() < 1e-4
