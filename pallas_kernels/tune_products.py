"""Tunes experts' grouped products on a GPU: Mosaic GPU's kernel in blocks of each width, or XLA.

A choice depends only on the matrices, not on the number of rows, so that a row's bits do not depend on other rows.
Candidates are timed over all numbers of rows at once.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import mosaic
from pallas_kernels.grouped_product import hopper, xla
from pallas_kernels.grouped_product import on_gpu as grouped_on_gpu
from pallas_kernels.tuning import MOSAIC, ProductKey, product_key

MODELS = {  # experts, hidden and inner sizes, experts per token
    "qwen3_30b_a3b": "128x2048x768x8",
    "gpt_oss_20b": "32x2880x2880x4",
    "mixtral_8x7b": "8x4096x14336x2",
}
EXPERTS = ",".join(MODELS)
SHAPE = "EXPERTSxHIDDENxINNERxASKED"
MOST_TIMES = 16


class ProductTuningJob(NamedTuple):
    """A tuning job: the matrices of a layer's experts, in one direction."""

    operation: str
    groups: int
    inputs: int
    outputs: int
    dtype: str
    rows: tuple[int, ...]  # of each product

    def key(self) -> ProductKey:
        return product_key(self.matrices, out_first=False)

    @property
    def matrices(self) -> Any:
        return jax.ShapeDtypeStruct((self.groups, self.inputs, self.outputs), jnp.dtype(self.dtype))


def products_of(models: list[str], tokens: list[int], pairs: list[str]) -> list[ProductTuningJob]:
    """Returns the up and down products of every model, in the dtypes of queries; a token has one row per expert it is
    sent to."""
    made, dtypes = [], sorted({pair.split("/")[0] for pair in pairs})
    for model in filter(None, models):
        groups, hidden, inner, asked = map(int, MODELS.get(model, model).split("x"))
        rows = tuple(sorted(count * asked for count in tokens))
        for inputs, outputs in ((hidden, 2 * inner), (inner, hidden)):
            made += [ProductTuningJob("grouped_product", groups, inputs, outputs, dtype, rows) for dtype in dtypes]
    return made


def choices(work: ProductTuningJob) -> Iterator[dict[str, int]]:
    """Yields the choices to try; {} is the rule."""
    yield {}
    yield {MOSAIC: 0}
    if mosaic.multiplies(jax.ShapeDtypeStruct((1, work.inputs), work.matrices.dtype), work.matrices):  # type: ignore
        yield from ({MOSAIC: 1, "outputs": width} for width in hopper.WIDTHS if work.outputs % width == 0)


def arrays_of(work: ProductTuningJob) -> tuple[Array, ...]:
    """Returns the matrices, then for every number of rows the rows and the group sizes, dealt at random."""
    rng = np.random.default_rng(0)
    made = [jnp.ones(work.matrices.shape, work.dtype)]
    for rows in work.rows:
        dealt = np.bincount(rng.integers(0, work.groups, rows), minlength=work.groups)
        made += [jnp.asarray(rng.standard_normal((rows, work.inputs)), work.dtype), jnp.asarray(dealt, jnp.int32)]
    return tuple(made)


def multiplier(choice: dict[str, int]) -> Callable[..., list[Array]]:
    """Returns a function that runs the products of `arrays_of`. Products of fewer rows run more often, up to
    MOST_TIMES, so that steps count as much as chunks."""

    def product(x: Array, matrices: Array, sizes: Array) -> Array:
        if not choice:
            return grouped_on_gpu(x, matrices, sizes, out_first=False)
        if not choice[MOSAIC]:
            return xla.product_by_blocks(x, matrices, sizes, out_first=False)
        warpgroups = hopper.choose_blocks(len(x), matrices, out_first=False).warpgroups
        blocks = hopper.blocks_of(warpgroups, choice["outputs"])
        return hopper.grouped_product(x, matrices, sizes, out_first=False, blocks=blocks)

    program = jax.jit(product)

    def multiplied(matrices: Array, *pairs: Array) -> list[Array]:
        each = list(zip(pairs[::2], pairs[1::2], strict=True))
        most = max(len(x) for x, _ in each)
        return [program(x, matrices, sizes) for x, sizes in each for _ in range(min(most // len(x), MOST_TIMES))]

    return multiplied
