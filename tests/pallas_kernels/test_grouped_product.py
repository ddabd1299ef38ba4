"""The grouped product of every platform against its definition."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import KernelError, grouped_product
from pallas_kernels.grouped_product import reference, xla

VARIANTS: dict[str, Any] = {
    f"{name} of [{'N, K' if out_first else 'K, N'}]": partial(each, out_first=out_first)
    for name, each in (
        ("blocks", xla.product_by_blocks),
        ("ragged", xla.ragged_product),
        ("dispatch", grouped_product),
    )
    for out_first in (False, True)
}
SIZES = [[0], [3], [0, 5, 0, 1], [16, 0], [1, 1, 1, 1, 1], [0, 0, 0], [40, 2, 0, 33]]


def drawn(sizes: list[int], beyond: int, dtype: str, out_first: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(sum(sizes) + beyond)
    x = random.normal(0, 1, (sum(sizes) + beyond, 12))
    matrices = random.normal(0, 1, (len(sizes), 7, 12))
    matrices = matrices if out_first else matrices.swapaxes(1, 2)
    return jnp.asarray(x, dtype), jnp.asarray(matrices, dtype), jnp.asarray(sizes)


def defined(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    return reference.grouped_product(*arrays, out_first=arrays[1].shape[2] == 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beyond", [1, 9])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_gives_what_the_definition_gives(variant: str, sizes: list[int], beyond: int, dtype: str):
    arrays = drawn(sizes, beyond, dtype, "N, K" in variant)
    found = jax.jit(VARIANTS[variant])(*arrays)
    expected = defined(arrays)
    assert found.dtype == expected.dtype
    bound = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=bound)
    assert not np.any(np.asarray(found[sum(sizes) :], np.float32))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_that_is_no_number_makes_no_other_row_so(variant: str):
    x, matrices, sizes = drawn([3, 0, 20], 4, "float32", "N, K" in variant)
    product = jax.jit(VARIANTS[variant])
    sound = np.asarray(product(x, matrices, sizes))
    for row in (1, 10, 25):  # the last is of no group
        found = np.asarray(product(x.at[row].set(jnp.nan), matrices, sizes))
        np.testing.assert_array_equal(np.delete(found, row, 0), np.delete(sound, row, 0))
        assert np.isnan(found[row]).all() == (row < 23)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_blocks_cover_every_row_once_however_rows_are_spread(sizes: list[int]):
    arrays = drawn(sizes, 30 - sum(sizes), "float32")
    np.testing.assert_allclose(BLOCKS(*arrays), defined(arrays), atol=1e-5)


BLOCKS = jax.jit(VARIANTS["blocks of [N, K]"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_rounded_to_the_dtype_of_the_matrices_and_sums_are_not(variant: str):
    x, matrices, sizes = drawn([3, 0, 20], 4, "float32", "N, K" in variant)
    matrices = matrices.astype(jnp.bfloat16)
    found = jax.jit(VARIANTS[variant])(x, matrices, sizes)
    assert found.dtype == jnp.float32
    exact = defined((x.astype(jnp.bfloat16).astype(jnp.float32), matrices.astype(jnp.float32), sizes))
    np.testing.assert_allclose(found, exact, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.zeros((4, 5))}, ["[G, N, 5]", "(2, 3, 6)"]),
        ({"matrices": jnp.zeros((2, 3, 6), jnp.int8)}, ["matrices must be", "int8"]),
        ({"out_first": False}, ["[G, 6, N]", "(2, 3, 6)"]),
        ({"sizes": jnp.zeros(3, jnp.int32)}, ["sizes", "(2,)", "(3,)"]),
        ({"x": jnp.zeros((4, 6), jnp.int32)}, ["int32"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_both_values(change: dict[str, Any], words: list[str]):
    good = {
        "x": jnp.zeros((4, 6)),
        "matrices": jnp.zeros((2, 3, 6)),
        "sizes": jnp.zeros(2, jnp.int32),
        "out_first": True,
    }
    with pytest.raises(KernelError) as refused:
        grouped_product(**{**good, **change})
    assert all(word in str(refused.value) for word in words)
