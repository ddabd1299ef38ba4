"""Chunks over latent pages: absorbed and expanded give the same, and the device takes the cheaper way."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.model_config import AttentionOptions
from jdisagg.engine.attention import (
    LEAST_ROWS,
    absorbed_prefill,
    expanded_prefill,
    expansion_pays,
    most_pages,
    prefill_latents,
)
from jdisagg.model.latent_attention import LatentQueries

RANK, ROTATED, NOPE, VALUE, HEADS, PAGE = 32, 8, 12, 10, 4, 16
OPTIONS = AttentionOptions(0.3, None, None, RANK)
MIXED = ((0, 0), (40, 40), (17, 60), (0, 33), (1, 90), (20, 20))  # rows, tokens held


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def case(sequences: tuple[tuple[int, int], ...], spare: int = 3):
    """Queries of all rows and `spare` of padding, a pool whose other pages hold large numbers, and the spans."""
    rows, held = zip(*sequences, strict=True)
    pages = [-(-tokens // PAGE) for tokens in held]
    table = np.zeros((len(rows), max(pages) + 2), np.int32)
    order = iter(1 + np.random.default_rng(0).permutation(sum(pages)))
    for sequence, count in enumerate(pages):
        table[sequence, :count] = [next(order) for _ in range(count)]
    pool = np.array(drawn(sum(pages) + 2, 1, 1, PAGE, RANK + ROTATED))
    pool[0] = pool[-1] = 1e3
    total = sum(rows) + spare
    queries = LatentQueries(drawn(total, HEADS, NOPE), drawn(total, HEADS, ROTATED), drawn(HEADS, NOPE + VALUE, RANK))
    spans = (
        jnp.asarray(table),
        jnp.asarray(held, jnp.int32),
        jnp.cumulative_sum(jnp.asarray(rows), include_initial=True),
    )
    return queries, jnp.asarray(pool), *spans


def test_expanded_and_absorbed_chunks_are_the_same():
    arguments = case(MIXED)
    absorbed = jax.jit(partial(absorbed_prefill, options=OPTIONS))(*arguments)
    expanded = jax.jit(partial(expanded_prefill, options=OPTIONS, most=16))(*arguments)
    assert absorbed.shape == (*arguments[0].nope.shape[:2], VALUE)
    assert np.abs(np.asarray(absorbed - expanded)).max() <= 1e-4 * np.abs(np.asarray(absorbed)).max()
    assert not np.asarray(expanded[-3:]).any()


@pytest.mark.parametrize("sequences", [MIXED, ((64, 64),), ((2, 300), (70, 71)), ((80, 600),)], ids=str)
def test_a_chunk_is_the_same_whichever_way_is_taken(sequences):
    queries, *rest = case(sequences)
    want = jax.jit(partial(absorbed_prefill, options=OPTIONS))(queries, *rest)
    got = jax.jit(partial(prefill_latents, options=OPTIONS))(queries, *rest)
    assert np.abs(np.asarray(got - want)).max() <= 1e-4 * np.abs(np.asarray(want)).max()


@pytest.mark.parametrize(
    ("sequences", "pays"),
    [
        (((512, 512),), True),  # a prompt of its own
        (((64, 64),) * 8, True),
        (((16, 16),) * 8, False),  # short ones in pages of 64 tokens: whole pages are expanded
        (((300, 2000),), True),  # many rows behind a prefix
        (((4, 2000),), False),  # few rows behind a long one
        (((512, 60_000),), False),  # more tokens than there is room for
    ],
    ids=str,
)
def test_what_is_cheaper_is_told_by_tokens_held_and_new(sequences, pays):
    rank, rotated, nope, value = 512, 64, 128, 128
    rows, held = zip(*sequences, strict=True)
    total = sum(rows)
    up = jax.ShapeDtypeStruct((16, nope + value, rank), jnp.bfloat16)
    queries: LatentQueries = LatentQueries(
        *(jax.ShapeDtypeStruct((total, 16, size), jnp.bfloat16) for size in (nope, rotated)),
        up,  # type: ignore[arg-type]
    )
    spans = jnp.cumulative_sum(jnp.asarray(rows), include_initial=True)
    most = 4 * 512 // 64
    assert bool(expansion_pays(queries, 64, most, jnp.asarray(held), spans)) == pays


def test_small_chunks_have_one_way_and_large_ones_room_for_a_few_tokens_a_row():
    queries, pool, table, *_ = case(((LEAST_ROWS - 1, 300),), spare=0)
    assert most_pages(queries, pool, table) == 0
    queries, pool, table, *_ = case(((128, 600),), spare=0)
    assert most_pages(queries, pool, table) == 4 * 128 // PAGE
