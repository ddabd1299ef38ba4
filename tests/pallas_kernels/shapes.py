"""One table of shapes for every operation and variant, the pools made from it, and the float64 definition they meet.

The oracle here is a loop over single query rows in numpy, written apart from the library's own reference.
"""

from dataclasses import dataclass

import numpy as np

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
# Largest error over the largest magnitude of V (about 5): what a rounding of the result, once, and f32 sums allow.
BOUND = {"float32": 4e-6, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Shape:
    head_dim: int
    kv_heads: int
    groups: int
    page_size: int


SHAPES = [
    Shape(64, 4, 2, 16),
    Shape(64, 4, 3, 32),
    Shape(64, 1, 8, 64),
    Shape(80, 2, 4, 16),
    Shape(96, 8, 1, 32),
    Shape(128, 8, 4, 16),
    Shape(128, 1, 1, 128),
    Shape(128, 2, 8, 64),
]


def make_pool(shape: Shape, lengths, seed: int = 0, spare: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """f32 pool whose null and unused pages hold large numbers, and a table i32[rows, W] that scatters the pages."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // shape.page_size) for length in lengths]
    order = iter(rng.permutation(np.arange(1, sum(needed) + 1)))
    table = np.zeros((len(lengths), max(*needed, 1) + spare), np.int32)
    for row, pages in enumerate(needed):
        table[row, :pages] = [next(order) for _ in range(pages)]
    pool = rng.standard_normal((sum(needed) + 3, shape.kv_heads, 2, shape.page_size, shape.head_dim))
    pool[[0, -1, -2]] = 1e3
    return pool.astype(np.float32), table


def make_queries(shape: Shape, rows: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, shape.kv_heads * shape.groups, shape.head_dim)).astype(np.float32)


def attend_row(q, pool, pages, visible, *, scale=None, window=None, soft_cap=None, sinks=None) -> np.ndarray:
    """One query row [Hq, D] over the first `visible` tokens of `pages`, in float64."""
    heads, size = q.shape
    if visible == 0:
        return np.zeros((heads, size))
    groups = heads // pool.shape[1]
    held = np.asarray(pool, np.float64)[pages].transpose(1, 2, 0, 3, 4).reshape(pool.shape[1], 2, -1, size)
    start = 0 if window is None else max(visible - window, 0)
    held = held[:, :, start:visible].repeat(groups, axis=0)
    logits = np.einsum("hd,hsd->hs", np.asarray(q, np.float64), held[:, 0]) * (scale or size**-0.5)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    weights = np.exp(logits)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
    return np.einsum("hs,hsd->hd", weights, held[:, 1]) / total[:, None]


def decode_oracle(q, pool, table, lengths, **options) -> np.ndarray:
    return np.stack([attend_row(q[b], pool, table[b], lengths[b], **options) for b in range(len(lengths))])


def prefill_oracle(q, pool, table, kv_lens, cu_q_lens, **options) -> np.ndarray:
    out = np.zeros(q.shape)
    for s, kv_len in enumerate(kv_lens):
        for t in range(cu_q_lens[s], cu_q_lens[s + 1]):
            out[t] = attend_row(q[t], pool, table[s], kv_len - cu_q_lens[s + 1] + t + 1, **options)
    return out


def assert_close(got, want, dtype: str) -> None:
    assert np.isfinite(np.asarray(got, np.float64)).all()
    worst = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
    assert worst <= BOUND[dtype] * 5, f"largest error {worst} in {dtype}"
