"""A case made into programs: our operation on pools of random numbers, and the floor that it is held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels_cases import Case
from benchmarks.kernels_timing import Contestant
from pallas_kernels import paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.pack_kv_pages import pack_kv_pages
from pallas_kernels.unpack_kv_pages import unpack_kv_pages

OPERATIONS = 8  # of one program, one after the other, each on the next pool
CACHE_BYTES = 256 << 20  # pools together are larger than any cache, where there is more than one operation
WIRE_BITS = {"int8": 8, "fp8": 8, "int4": 4}


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

    pools: list[Array]
    table: Array  # i32[B, W]
    lengths: Array  # i32[B]
    queries: Array  # [rows, Hq, D]


@dataclass(frozen=True)
class Contest:
    """Our operation, its floor, and what of the floor's work one operation is worth."""

    case: Case
    ours: Contestant
    floor: Contestant
    floor_share: float  # floor seconds of one operation = this x seconds of one floor operation
    held: Held | None = None


def contest_of(case: Case, sizes: Sizes, platform: str) -> Contest:
    makers: dict[str, Callable[[Case, Sizes, str], Contest]] = {
        "paged_attention": decode_contest,
        "prefill_attention": prefill_contest,
        "write_kv_pages": write_contest,
        "pack_kv_pages": pack_contest,
        "unpack_kv_pages": unpack_contest,
    }
    return makers[case.operation](case, sizes, platform)


# ---------------------------------------------------------------- floors


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


def copy_pages(pools: list[Array], into: np.ndarray, ids: np.ndarray) -> None:
    """The pages of one layer after another into a buffer that is mapped already, page by page."""
    for pool in pools:
        np.take(np.asarray(pool), ids, axis=0, out=into, mode="clip")


# ---------------------------------------------------------------- inputs


def random_block(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def make_pool(pages: int, case: Case, dtype: Any, seed: int) -> Array:
    """[pages, Hkv, 2, page_size, D]: a random block over and over, for a large one takes long to draw."""
    heads, block = case.heads, min(pages, 64)
    drawn = random_block((block, heads.kv, 2, case.page_size, heads.size), dtype, seed)
    return jax.jit(lambda x: jnp.tile(x, (-(-pages // block), 1, 1, 1, 1))[:pages])(drawn)


def page_bytes(case: Case, dtype: Any) -> int:
    return case.heads.kv * 2 * case.page_size * case.heads.size * jnp.dtype(dtype).itemsize


def make_held(case: Case, sizes: Sizes) -> Held:
    needed = [-(-tokens // case.page_size) for tokens in case.held]
    order = iter(np.random.default_rng(0).permutation(np.arange(1, sum(needed) + 1)))
    table = np.zeros((len(needed), max(needed)), np.int32)
    for row, pages in enumerate(needed):
        table[row, :pages] = [next(order) for _ in range(pages)]
    pages = sum(needed) + 1
    count = min(OPERATIONS, max(1, math.ceil(CACHE_BYTES / (pages * page_bytes(case, sizes.dtype)))))
    pools = [make_pool(pages, case, sizes.dtype, seed) for seed in range(count)]
    rows = sum(case.rows) + case.padding if case.rows else len(case.held)
    queries = random_block((rows, case.heads.query, case.heads.size), sizes.dtype)
    return Held(pools, jnp.asarray(table), jnp.asarray(case.held, jnp.int32), queries)


def chained(attend: Callable[[Array, Any], Array], q: Array, layers: list[Any]) -> Contestant:
    """OPERATIONS calls in one program, each asked with what the one before answered, going round `layers`."""

    @jax.jit
    def program(q: Array, layers: list[Any]) -> Array:
        for index in range(OPERATIONS):
            q = attend(q, layers[index % len(layers)])
        return q

    return Contestant("pallas_kernels", partial(program, q, layers), OPERATIONS)


# ---------------------------------------------------------------- contests


def decode_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    held = make_held(case, sizes)
    ours = chained(lambda q, pool: paged_attention(q, pool, held.table, held.lengths), held.queries, held.pools)
    if platform == "cpu":  # a laptop's floor is the very copy that reading in place avoids
        ids = np.asarray(held.table)[np.asarray(held.table) > 0]
        into = np.zeros((len(ids), *held.pools[0].shape[1:]), sizes.dtype)
        run = partial(copy_pages, held.pools, into, ids)
        return Contest(case, ours, Contestant("copy of its pages", run, len(held.pools)), 1.0, held)
    read = sum(case.held) * page_bytes(case, sizes.dtype) // case.page_size + 2 * held.queries.nbytes
    return Contest(case, ours, *copy_floor(sizes, read), held)


def prefill_flops(case: Case) -> float:
    """Two products of 2 D for each query head and each key that a row sees."""
    seen = sum(rows * held - rows * (rows - 1) / 2 for rows, held in zip(case.rows, case.held, strict=True))
    return 4.0 * case.heads.size * case.heads.query * seen


def prefill_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    del platform
    held = make_held(case, sizes)
    starts = jnp.asarray(np.cumsum([0, *case.rows]), jnp.int32)
    ours = chained(
        lambda q, pool: prefill_attention(q, pool, held.table, held.lengths, starts), held.queries, held.pools
    )
    return Contest(case, ours, *matmul_floor(sizes, prefill_flops(case)), held)


def renewed(name: str, program: Callable[..., Any], held: Any, *rest: Any) -> Contestant:
    """A program that takes arrays and gives them back, updated in place: run after run on its own result."""
    state = {"held": held}

    def run() -> Any:
        state["held"] = program(state["held"], *rest)
        return state["held"]

    return Contestant(name, run)


def scattered_pages(case: Case) -> Array:
    """i32: every second page, shuffled."""
    count = -(-case.tokens // case.page_size)
    return jnp.asarray(1 + 2 * np.random.default_rng(0).permutation(count), jnp.int32)


def make_layers(case: Case, sizes: Sizes) -> list[Array]:
    pages = 2 * -(-case.tokens // case.page_size) + 2
    return [make_pool(pages, case, sizes.dtype, seed) for seed in range(case.layers)]


def write_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    del platform
    rows = random_block((case.tokens, case.heads.kv, case.heads.size), sizes.dtype)
    place = np.random.default_rng(0).permutation(2 * case.tokens)[: case.tokens]
    ids, offsets = (jnp.asarray(part, jnp.int32) for part in (1 + place // case.page_size, place % case.page_size))

    def program(pools: list[Array], rows: Array, ids: Array, offsets: Array) -> list[Array]:
        return [write_kv_pages(pool, rows, rows, ids, offsets) for pool in pools]

    donated = jax.jit(program, donate_argnums=0)
    ours = renewed("pallas_kernels", donated, make_layers(case, sizes), rows, ids, offsets)
    return Contest(case, ours, *copy_floor(sizes, 2 * 2 * rows.nbytes))


def wire_bytes(case: Case, dtype: Any) -> int:
    """Of all pages as they are in the pools, and packed, together: what is read and what is written."""
    plain = case.layers * -(-case.tokens // case.page_size) * page_bytes(case, dtype)
    if case.wire == "raw":
        return 2 * plain
    numbers = plain // jnp.dtype(dtype).itemsize
    return plain + numbers * WIRE_BITS[case.wire] // 8 + 4 * numbers // case.heads.size


def pack_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    del platform
    program = jax.jit(partial(pack_kv_pages, wire=case.wire))
    ours = Contestant("pallas_kernels", partial(program, make_layers(case, sizes), scattered_pages(case)))
    return Contest(case, ours, *copy_floor(sizes, wire_bytes(case, sizes.dtype)))


def unpack_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    del platform
    pools, ids = make_layers(case, sizes), scattered_pages(case)
    packed = jax.jit(partial(pack_kv_pages, wire=case.wire))(pools, ids)
    program = jax.jit(unpack_kv_pages, donate_argnums=0)

    def first(pools: list[Array], packed: Any, ids: Array) -> list[Array]:
        return program(pools, packed, ids)[0]

    return Contest(
        case, renewed("pallas_kernels", first, pools, packed, ids), *copy_floor(sizes, wire_bytes(case, sizes.dtype))
    )
