"""What kernels are held against, a copy and a square product, and programs that repeat an operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.kernels_cases import Case
from benchmarks.kernels_timing import Contestant

OPERATIONS = 8  # of one program, one after the other, each on the next pool
CACHE_BYTES = 256 << 20  # pools together are larger than any cache, where there is more than one operation


@dataclass(frozen=True)
class Sizes:
    """How large the floors' own programs are, and the dtype of everything."""

    dtype: Any
    copy_bytes: int
    matmul: int  # rows and columns of square matrices
    copy_in_place: bool

    @staticmethod
    def of(platform: str, tiny: bool) -> Sizes:
        dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
        if tiny:
            return Sizes(dtype, 1 << 16, 64, platform == "cpu")
        return Sizes(dtype, 1 << 28, 1024, True) if platform == "cpu" else Sizes(dtype, 1 << 30, 8192, False)


@dataclass(frozen=True)
class Held:
    """Tokens of sequences in pools whose pages are scattered."""

    pools: list[Any]  # arrays, or QuantizedPages
    table: Array  # i32[B, W]
    lengths: Array  # i32[B], of drafts i32[B * R]
    queries: Array  # [rows, Hq, D]


@dataclass(frozen=True)
class Contest:
    """Our operation, its floor, and what of the floor's work one operation is worth."""

    case: Case
    ours: Contestant
    floor: Contestant
    floor_share: float  # floor seconds of one operation = this x seconds of one floor operation
    held: Held | None = None


def copy_floor(sizes: Sizes, num_bytes: int) -> tuple[Contestant, float]:
    """Reading and writing a large array; the share that `num_bytes`, read and written counted together, are of it.

    In place on a CPU, where a new result would be made of pages that the system has yet to map.
    """
    x = jnp.ones(sizes.copy_bytes // jnp.dtype(sizes.dtype).itemsize, sizes.dtype)
    share = num_bytes / (2 * sizes.copy_bytes)
    if sizes.copy_in_place:
        return renewed("copy", jax.jit(lambda x: -x, donate_argnums=0), x), share
    return Contestant("copy", partial(jax.jit(lambda x: -x), x)), share


def matmul_floor(sizes: Sizes, flops: float) -> tuple[Contestant, float]:
    """A square product in `sizes.dtype`; the share that `flops` are of it."""
    x = random_block((sizes.matmul, sizes.matmul), sizes.dtype)
    return Contestant("matmul", partial(jax.jit(jnp.matmul), x, x)), flops / (2 * sizes.matmul**3)


def random_block(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def layers_for(num_bytes: float) -> int:
    """How many times as much as one operation reads lies there, for no cache to hold it all."""
    return min(OPERATIONS, max(1, math.ceil(CACHE_BYTES / num_bytes)))


def chained(attend: Callable[[Array, Any], Array], q: Array, layers: list[Any]) -> Contestant:
    """OPERATIONS calls in one program, each asked with what the one before answered, going round `layers`."""

    @jax.jit
    def program(q: Array, layers: list[Any]) -> Array:
        for index in range(OPERATIONS):
            q = attend(q, layers[index % len(layers)])
        return q

    return Contestant("pallas_kernels", partial(program, q, layers), OPERATIONS)


def renewed(name: str, program: Callable[..., Any], held: Any, *rest: Any) -> Contestant:
    """A program that takes arrays and gives them back, updated in place: run after run on its own result."""
    state = {"held": held}

    def run() -> Any:
        state["held"] = program(state["held"], *rest)
        return state["held"]

    return Contestant(name, run)
