"""One table of shapes, dtypes and options for every variant of the attention operations and of writing pages.

The bound for a dtype, `shapes.BOUND`, is that of the queries: pages of fewer bits are read as what they stand for.
In `shapes.CASES` every two values of two columns meet; .ci/run takes them all. The suite takes of each variant's cases
a few in which every value is met (`shapes.value_cover`), and of the kernels under an interpreter every third of those.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.paged_attention import gpu as decode_gpu
from pallas_kernels.paged_attention import reference as decode_reference
from pallas_kernels.paged_attention import tpu as decode_tpu
from pallas_kernels.prefill_attention import gpu as prefill_gpu
from pallas_kernels.prefill_attention import reference as prefill_reference
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.write_kv_pages import reference as write_reference
from pallas_kernels.write_kv_pages import tpu as write_tpu
from tests.pallas_kernels.shapes import (
    CASES,
    COLUMNS,
    Case,
    assert_close,
    by_arrays,
    decode_oracle,
    make_pool,
    make_queries,
    plain_pool,
    prefill_oracle,
    rest_slow,
    stored_pool,
    value_cover,
)

# What a test costs is its compilation, so XLA takes the whole table for decode, and the other variants take turns.
DECODE = {
    "reference": by_arrays(decode_reference.paged_attention),
    "tpu": by_arrays(decode_tpu.paged_attention, interpret=True, cores=2),
    "gpu": by_arrays(decode_gpu.paged_attention, interpret=True),
}
PREFILL = {
    "reference": by_arrays(prefill_reference.prefill_attention),
    "tpu": by_arrays(prefill_tpu.prefill_attention, interpret=True),
    "gpu": by_arrays(prefill_gpu.prefill_attention, interpret=True),
}
ALL = {"window": None, "soft_cap": None}


def steps(**strides: int) -> list[Any]:
    """Each variant with every n-th case, no two from the same place on; slow unless the suite takes it."""
    rows = []
    for at, (name, n) in enumerate(strides.items()):
        cases = CASES[at % n :: n]
        suite = value_cover(cases)[:: 1 if name == "xla" else 3]
        rows += [pytest.param(name, case, marks=[] if case in suite else [pytest.mark.slow]) for case in cases]
    return rows


def named(options: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """As the variants below the dispatch take them."""
    return {"scale": head_dim**-0.5, **ALL} | {key: value for key, value in options.items() if key != "sinks"}


def drawn(case: Case, lengths, rows: int):
    pool, table = make_pool(case.shape, lengths)
    q = jnp.asarray(make_queries(case.shape, rows), case.dtypes[0])
    return q, stored_pool(pool, case.dtypes[1]), jnp.asarray(table)


def test_every_two_values_meet_in_the_table():
    for name, values in COLUMNS.items():
        for other, others in COLUMNS.items():
            if name < other:
                met = {(getattr(case, name), getattr(case, other)) for case in CASES}
                assert met == {(value, another) for value in values for another in others}


@pytest.mark.parametrize(("variant", "case"), steps(xla=1, tpu=4, gpu=4, reference=8), ids=str)
def test_decode_attention_meets_the_oracle(variant, case):
    lengths = np.asarray(case.decode_lengths, np.int32)
    q, pool, table = drawn(case, lengths, len(lengths))
    if variant == "xla":
        got = jax.jit(partial(paged_attention, **case.options))(q, pool, table, lengths)
    else:
        attend = partial(DECODE[variant], **named(case.options, case.head_dim))
        got = jax.jit(attend)(q, pool, table, lengths, case.options.get("sinks"))
    assert got.dtype == q.dtype
    assert_close(got, decode_oracle(np.asarray(q), plain_pool(pool), table, lengths, **case.options), case.dtypes[0])


@pytest.mark.parametrize(("variant", "case"), steps(gpu=4, xla=2, reference=8, tpu=4), ids=str)
def test_prefill_attention_meets_the_oracle(variant, case):
    kv_lens = np.asarray([held for _, held in case.packed], np.int32)
    spans = np.cumsum([0] + [rows for rows, _ in case.packed]).astype(np.int32)
    q, pool, table = drawn(case, kv_lens, int(spans[-1]) + 3)
    if variant == "xla":
        got = jax.jit(partial(prefill_attention, **case.options))(q, pool, table, kv_lens, spans)
    else:
        attend = partial(PREFILL[variant], **named(case.options, case.head_dim))
        got = jax.jit(attend)(q, pool, table, kv_lens, spans, case.options.get("sinks"))
    assert got.dtype == q.dtype
    want = prefill_oracle(np.asarray(q), plain_pool(pool), table, kv_lens, spans, **case.options)
    assert_close(got, want, case.dtypes[0])


@pytest.mark.parametrize(("variant", "case"), steps(tpu=3, xla=3), ids=str)
def test_writing_matches_the_definition_bit_for_bit(variant, case):
    _, pool, _ = drawn(case, (7 * case.page_size,), 1)
    q_dtype, heads = case.dtypes[0], (30, case.kv_heads, case.head_dim)
    k, v = (jnp.asarray(np.random.default_rng(seed).standard_normal(heads), q_dtype) for seed in (1, 2))
    places = np.random.default_rng(3).permutation(np.arange(case.page_size, 7 * case.page_size))[:30].astype(np.int32)
    pages, offsets = places // case.page_size, places % case.page_size
    pages[::7] = 0
    write = write_kv_pages if variant == "xla" else partial(write_tpu.write_kv_pages, interpret=True)
    got, want = (jax.jit(each)(pool, k, v, pages, offsets) for each in (write, write_reference.write_kv_pages))
    for part, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert part.dtype == wanted.dtype
        assert np.array_equal(np.asarray(part[1:], np.float32), np.asarray(wanted[1:], np.float32))


@pytest.mark.parametrize("variant", rest_slow(["xla", "tpu", "gpu"]))
def test_thousands_of_tokens_beside_few_meet_the_oracle(variant):
    case = Case(64, 2, 2, 32, ("bfloat16", "float8_e4m3fn"), "none")
    lengths = np.asarray((3, 0, 2500, 64), np.int32)
    q, pool, table = drawn(case, lengths, len(lengths))
    if variant == "xla":
        got = jax.jit(paged_attention)(q, pool, table, lengths)
    else:
        got = DECODE[variant](q, pool, table, lengths, None, **named({}, 64))
    assert_close(got, decode_oracle(np.asarray(q), plain_pool(pool), table, lengths), "bfloat16")
