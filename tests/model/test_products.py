"""Products in every form of a matrix, against the same matrix [in, out] in f32 and against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model.network import scored
from jdisagg.model.products import FEW_ROWS, MatrixForm, product

INPUTS, OUTPUTS = 96, 160


def matrix() -> np.ndarray:
    """[in, out]."""
    return np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS), np.float32)


def tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, INPUTS), np.float32)


@pytest.mark.parametrize("rows", [1, 2, 8, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("out_first", [False, True])
def test_a_product_is_the_same_however_its_matrix_lies(out_first: bool, rows: int):
    kernel, x = matrix(), tokens(rows)
    y = jax.jit(lambda x, kernel: product(x, kernel, None, MatrixForm(out_first)))(x, kernel.T if out_first else kernel)
    np.testing.assert_allclose(y, x @ kernel, atol=1e-4)


def test_rows_may_have_any_leading_dimensions():
    x = tokens(24).reshape(2, 3, 4, INPUTS)
    y = product(jnp.asarray(x), jnp.asarray(matrix().T), None, MatrixForm(True))
    assert y.shape == (2, 3, 4, OUTPUTS)
    np.testing.assert_allclose(y, x @ matrix(), atol=1e-4)


@pytest.mark.parametrize("name", ["matrix", "head"])
def test_a_row_has_the_same_bits_whatever_is_multiplied_beside_it(name: str):
    """Of decode alone (2 to 16 rows), beside chunks, and of chunks in every bucket: answers are the same in company."""
    forms = {"matrix": lambda x, rows: product(x, rows, None, MatrixForm(True)), "head": scored}
    program, x, rows = jax.jit(forms[name]), tokens(520), jnp.asarray(matrix().T)
    found = {
        count: np.asarray(program(x[:count], rows))[:2].tobytes() for count in (2, 4, 8, 12, 16, 72, 128, 136, 520)
    }
    assert set(found.values()) == {found[8]}, {count: bits == found[8] for count, bits in found.items()}
