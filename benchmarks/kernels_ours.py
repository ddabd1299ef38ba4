"""A case made into programs: our operation on pools of random numbers, and the floor that it is held against."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels_cases import Case
from benchmarks.kernels_floors import (
    Contest,
    Held,
    Sizes,
    chained,
    copy_floor,
    layers_for,
    matmul_floor,
    random_block,
    renewed,
)
from benchmarks.kernels_timing import Contestant
from pallas_kernels import QuantizedPages, paged_attention, prefill_attention, quantize_pages, write_kv_pages
from pallas_kernels.pack_kv_pages import pack_kv_pages
from pallas_kernels.unpack_kv_pages import unpack_kv_pages

QUANTISED_AS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SCALE_BYTES = 4
WIRE_BITS = {"int8": 8, "fp8": 8, "int4": 4}


def copy_pages(pools: list[Array], into: np.ndarray, ids: np.ndarray) -> None:
    """The pages of one layer after another into a buffer that is mapped already, page by page."""
    for pool in pools:
        np.take(np.asarray(pool), ids, axis=0, out=into, mode="clip")


# ---------------------------------------------------------------- inputs


def make_pool(pages: int, case: Case, dtype: Any, seed: int) -> Array:
    """[pages, Hkv, 2 or 1, page_size, D]: a random block over and over, for a large one takes long to draw."""
    heads, block = case.heads, min(pages, 64)
    drawn = random_block((block, heads.kv, parts_of(case), case.page_size, heads.size), dtype, seed)
    return repeated(drawn, pages)


def make_quantised(pages: int, case: Case, seed: int) -> QuantizedPages:
    """The same in codes, with scales."""
    drawn = quantize_pages(make_pool(min(pages, 64), case, jnp.float32, seed), QUANTISED_AS[case.pool])
    return QuantizedPages(repeated(drawn.values, pages), repeated(drawn.scales, pages))


def repeated(block: Array, pages: int) -> Array:
    times = (-(-pages // block.shape[0]), *(1,) * (block.ndim - 1))
    return jax.jit(lambda x: jnp.tile(x, times)[:pages])(block)


def parts_of(case: Case) -> int:
    """Of a page: K and V, or latents that are both."""
    return 1 if case.value_size else 2


def page_bytes(case: Case, dtype: Any) -> int:
    rows = case.heads.kv * parts_of(case) * case.page_size
    if case.pool:
        return rows * (case.heads.size + SCALE_BYTES)
    return rows * case.heads.size * jnp.dtype(dtype).itemsize


def make_held(case: Case, sizes: Sizes) -> Held:
    needed = [-(-tokens // case.page_size) for tokens in case.held]
    order = iter(np.random.default_rng(0).permutation(np.arange(1, sum(needed) + 1)))
    table = np.zeros((len(needed), max(needed)), np.int32)
    for row, pages in enumerate(needed):
        table[row, :pages] = [next(order) for _ in range(pages)]
    pages = sum(needed) + 1
    seeds = range(layers_for(pages * page_bytes(case, sizes.dtype)))
    pools: list[Any] = [
        make_quantised(pages, case, seed) if case.pool else make_pool(pages, case, sizes.dtype, seed) for seed in seeds
    ]
    rows = sum(case.rows) + case.padding if case.rows else len(case.held) * case.drafted
    queries = random_block((rows, case.heads.query, case.heads.size), sizes.dtype)
    return Held(pools, jnp.asarray(table), jnp.asarray(seen_tokens(case), jnp.int32), queries)


def seen_tokens(case: Case) -> list[int]:
    """By each row of a decode step; of a chunk, held by each sequence."""
    return [tokens - case.drafted + 1 + row for tokens in case.held for row in range(case.drafted)]


def asked_next(q: Array, answer: Array) -> Array:
    """An answer as the next operation's queries: latents answer with fewer numbers than they are asked with."""
    left = q.shape[-1] - answer.shape[-1]
    return jnp.concatenate([answer, q[..., -left:]], axis=-1) if left else answer


# ---------------------------------------------------------------- contests


def decode_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    held, value_size = make_held(case, sizes), case.value_size or None

    def attend(q: Array, pool: Any) -> Array:
        return asked_next(q, paged_attention(q, pool, held.table, held.lengths, value_size=value_size))

    ours = chained(attend, held.queries, held.pools)
    if platform == "cpu" and not case.pool:  # a laptop's floor is the very copy that reading in place avoids
        ids = np.asarray(held.table)[np.asarray(held.table) > 0]
        into = np.zeros((len(ids), *held.pools[0].shape[1:]), sizes.dtype)
        run = partial(copy_pages, held.pools, into, ids)
        return Contest(case, ours, Contestant("copy of its pages", run, len(held.pools)), 1.0, held)
    read = sum(case.held) * page_bytes(case, sizes.dtype) // case.page_size + 2 * held.queries.nbytes
    return Contest(case, ours, *copy_floor(sizes, read), held)


def prefill_flops(case: Case) -> float:
    """Products with K and with V, of 2 D each, for each query head and each key that a row sees."""
    seen = sum(rows * held - rows * (rows - 1) / 2 for rows, held in zip(case.rows, case.held, strict=True))
    return 2.0 * (case.heads.size + (case.value_size or case.heads.size)) * case.heads.query * seen


def prefill_contest(case: Case, sizes: Sizes, platform: str) -> Contest:
    del platform
    held = make_held(case, sizes)
    starts = jnp.asarray(np.cumsum([0, *case.rows]), jnp.int32)
    value_size = case.value_size or None

    def attend(q: Array, pool: Any) -> Array:
        return asked_next(q, prefill_attention(q, pool, held.table, held.lengths, starts, value_size=value_size))

    ours = chained(attend, held.queries, held.pools)
    return Contest(case, ours, *matmul_floor(sizes, prefill_flops(case)), held)


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
