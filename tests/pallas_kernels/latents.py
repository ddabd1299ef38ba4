"""Pages of one part, as latents are kept: shapes, pools, and what the oracle for two parts makes of them."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.shapes import Shape, make_pool, make_queries, plain_pool, stored_pool


class LatentShape(NamedTuple):
    """A row of `size` numbers, its first `value_size` V as well, read by `heads` query heads."""

    value_size: int
    size: int
    heads: int
    page_size: int
    kv_heads: int = 1

    @property
    def whole(self) -> Shape:
        return Shape(self.size, self.kv_heads, self.heads // self.kv_heads, self.page_size)


DEEPSEEK_V3 = LatentShape(512, 576, 128, 64)
DEEPSEEK_V3_TP8 = LatentShape(512, 576, 16, 64)
SMALL = LatentShape(32, 40, 6, 16)
ODD = LatentShape(48, 80, 20, 32)
ALL_OF_A_ROW = LatentShape(64, 64, 4, 16)
TWO_HEADS = LatentShape(24, 32, 6, 16, kv_heads=2)


def queries(shape: LatentShape, rows: int) -> np.ndarray:
    return make_queries(shape.whole, rows)


def pool_of_one_part(shape: LatentShape, lengths, dtype: str):
    """The pool in `dtype`, a table, and f32 [P, Hkv, 2, page_size, D]: the same as K, and V with zeros at its end."""
    floats, table = make_pool(shape.whole, lengths)
    pool = stored_pool(floats[:, :, :1], dtype)
    keys = plain_pool(pool)
    values = np.where(np.arange(shape.size) < shape.value_size, keys, 0)
    return pool, jnp.asarray(table), np.concatenate([keys, values], axis=2)
