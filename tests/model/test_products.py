"""Products in every form of a matrix, against the same matrix [in, out] in f32 and against numpy."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model import products
from jdisagg.model.network import scored
from jdisagg.model.products import FEW_ROWS, MatrixFormat, product
from pallas_kernels.platforms import traced_for
from tests.environment import as_users
from tests.model.row_bits import FORMS, INPUTS, OUTPUTS, bits_of

ROOT = Path(__file__).parents[2]


def matrix() -> np.ndarray:
    """[in, out]."""
    return np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS), np.float32)


def tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, INPUTS), np.float32)


@pytest.mark.parametrize("rows", [1, 2, 8, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("out_first", [False, True])
def test_a_product_is_the_same_however_its_matrix_lies(out_first: bool, rows: int):
    kernel, x = matrix(), tokens(rows)
    y = jax.jit(lambda x, kernel: product(x, kernel, None, MatrixFormat(out_first)))(
        x, kernel.T if out_first else kernel
    )
    np.testing.assert_allclose(y, x @ kernel, atol=1e-4)


def test_rows_may_have_any_leading_dimensions():
    x = tokens(24).reshape(2, 3, 4, INPUTS)
    y = product(jnp.asarray(x), jnp.asarray(matrix().T), None, MatrixFormat(True))
    assert y.shape == (2, 3, 4, OUTPUTS)
    np.testing.assert_allclose(y, x @ matrix(), atol=1e-4)


def lowered(platform: str) -> str:
    """A head's scores and a product of the matrix, of rows that fill an even number of tiles."""
    rows, table = jnp.zeros((32, INPUTS)), jnp.zeros((OUTPUTS, INPUTS))

    def both(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scored(x, table), product(x, table, None, MatrixFormat(True))

    with traced_for(platform):
        return jax.jit(both).lower(rows, table).as_text()


def test_what_is_compiled_for_an_accelerator_does_not_ask_what_this_machines_processor_can(monkeypatch):
    made = dict[bool, dict[str, str]]()
    for wide in (False, True):
        monkeypatch.setattr(products, "WIDE_VECTORS", wide)
        made[wide] = {platform: lowered(platform) for platform in ("cpu", "gpu", "tpu")}
    assert made[False].pop("cpu") != made[True].pop("cpu"), "a CPU's programs are its own"
    assert made[False] == made[True]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_whatever_is_multiplied_beside_it(form: str):
    """Of decode alone (2 to 16 rows), beside chunks, and of chunks in every bucket: answers are the same in company."""
    assert_alike(bits_of(form))


def test_a_row_has_the_same_bits_in_any_company_in_what_a_users_process_compiles():
    command = [sys.executable, "-m", "tests.model.row_bits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=as_users(), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(FORMS)
    for bits in found.values():
        assert_alike(bits)


def assert_alike(bits: dict) -> None:
    kinds = list(dict.fromkeys(bits.values()))
    assert len(kinds) == 1, {count: kinds.index(each) for count, each in bits.items()}
