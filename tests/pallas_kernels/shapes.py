"""One table of shapes for every operation and variant, the pools made from it, and the float64 definition they meet.

The oracle here is a loop over single query rows in numpy, written apart from the library's own reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels.arguments import OPTIONS, PagedAttentionArgs, PrefillAttentionArgs
from pallas_kernels.quantized import LARGEST, QuantizedPages, dequantize, quantize_pages

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


@dataclass(frozen=True)
class Case:
    """A row of the table that every variant of every operation meets."""

    head_dim: int
    kv_heads: int
    groups: int
    page_size: int
    dtypes: tuple[str, str]  # of the queries and of the pool
    option: str

    @property
    def shape(self) -> Shape:
        return Shape(self.head_dim, self.kv_heads, self.groups, self.page_size)

    @property
    def options(self) -> dict[str, Any]:
        sinks = np.linspace(-2, 3, self.kv_heads * self.groups).astype(np.float32)
        each = {"window": 50, "soft_cap": 2.0, "sinks": sinks}
        return each if self.option == "all" else {key: each[key] for key in each if key == self.option}

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        """Tokens held by each slot: none, one, those about the bounds of pages and of tiles of pages."""
        page = self.page_size
        return 0, 1, page - 1, page, page + 1, 0, 2 * page, 3 * page + 5, 129

    @property
    def packed(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens held) of each sequence: nothing, fresh, after a cached prefix, no rows at all."""
        page = self.page_size
        return (0, 0), (1, 1), (17, page + 1), (0, page), (1, 2 * page + 1), (20, 20), (16, 2 * page), (0, 0)

    def __str__(self) -> str:
        numbers = f"{self.head_dim}-{self.kv_heads}-{self.groups}-{self.page_size}"
        return f"{numbers}-{'-'.join(self.dtypes)}-{self.option}"


COLUMNS = {
    "head_dim": (64, 80, 96, 128, 256),
    "kv_heads": (1, 2, 4, 8),
    "groups": (1, 2, 4, 8),
    "page_size": (16, 32, 64, 128),
    "dtypes": (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "int8"),
        ("float32", "int8"),
        ("float32", "float8_e4m3fn"),
    ),
    "option": ("none", "window", "soft_cap", "sinks", "all"),
}


def pairs_of(case: Case) -> set[tuple]:
    """Every two columns with their values."""
    return {(a, getattr(case, a), b, getattr(case, b)) for a, b in combinations(COLUMNS, 2)}


def pairwise_cases(seed: int = 0, drawn: int = 60) -> list[Case]:
    """Cases in which every two values of two columns meet: each the best of a few drawn rows, until none is missing."""
    rng = np.random.default_rng(seed)
    columns = [(name, COLUMNS[name]) for name in COLUMNS]
    missing = {(a, x, b, y) for (a, xs), (b, ys) in combinations(columns, 2) for x in xs for y in ys}
    cases = []
    while missing:
        seen = min(missing, key=repr)
        fixed = {seen[0]: seen[1], seen[2]: seen[3]}
        rows = [
            Case(**{name: fixed.get(name, values[rng.integers(len(values))]) for name, values in columns})
            for _ in range(drawn)
        ]
        cases.append(max(rows, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(cases[-1])
    return cases


CASES = pairwise_cases()


def value_cover(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, in which every value of a column is met that all have: always the one with most new."""

    def values(case: Case) -> set[tuple]:
        return {(name, getattr(case, name)) for name in COLUMNS}

    missing, chosen = set[tuple]().union(*map(values, cases)), list[Case]()
    while missing:
        chosen.append(max(cases, key=lambda case: len(values(case) & missing)))
        missing -= values(chosen[-1])
    return chosen


def rest_slow(cases: Sequence[Any], kept: int = 1) -> list[Any]:
    """The parameters of a test, of which all but the first `kept` are left to .ci/run."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.slow] if at >= kept else []) for at, row in enumerate(rows)]


def stored_pool(pool: np.ndarray, dtype: str) -> Array | QuantizedPages:
    """The float pool as the library holds it in `dtype`."""
    return quantize_pages(jnp.asarray(pool), jnp.dtype(dtype)) if dtype in LARGEST else jnp.asarray(pool, dtype)


def plain_pool(kv_pages: Array | QuantizedPages) -> np.ndarray:
    """f32, the very numbers that a pool stands for."""
    return np.asarray(dequantize(kv_pages) if isinstance(kv_pages, QuantizedPages) else kv_pages, np.float32)


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


def by_arrays(kernel: Callable[..., Array], **fixed: Any) -> Callable[..., Any]:
    """An attention kernel called by arrays and options, as the public functions are, instead of an argument object."""

    def attend(q: Any, kv_pages: Any, page_table: Any, *rest: Any, **options: Any) -> Array:
        named = {"scale": q.shape[-1] ** -0.5} | options
        of_args = {name: named.pop(name) for name in ("sinks", *OPTIONS) if name in named}
        made = PagedAttentionArgs if kernel.__name__ == "paged_attention" else PrefillAttentionArgs
        return kernel(made(q, kv_pages, page_table, *rest, **of_args), **fixed, **named)

    return attend


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
