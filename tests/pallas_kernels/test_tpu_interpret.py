"""The TPU kernels, interpreted on the CPU: numbers for the shapes, then copies that land late, then races."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import tpu as attention_tpu
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.write_kv_pages import tpu as write_tpu
from tests.pallas_kernels import test_prefill_attention as prefill
from tests.pallas_kernels.shapes import Shape
from tests.pallas_kernels.test_paged_attention import FAVOURITE, OPTIONS, check, inputs
from tests.pallas_kernels.test_write_kv_pages import rows
from tests.pallas_kernels.tpu_modes import EAGER, FAST, LATE, RACE

# Every head size, page size and group count, each once or twice; the first two need several blocks for 300 tokens.
CASES = [
    (Shape(128, 8, 4, 16), "float32"),
    (Shape(64, 4, 3, 32), "float32"),
    (Shape(80, 2, 8, 16), "bfloat16"),
    (Shape(96, 1, 1, 128), "bfloat16"),
    (Shape(256, 2, 2, 64), "bfloat16"),
]
SHORT = (0, 40, 0, 17, 100, 0)  # with empty slots first, between and last


def attend(q, kv_pages, page_table, lengths, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": FAST} | options
    return attention_tpu.paged_attention(q, kv_pages, page_table, lengths, sinks, **options)


def attend_packed(q, kv_pages, page_table, kv_lens, cu_q_lens, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": FAST} | options
    return prefill_tpu.prefill_attention(q, kv_pages, page_table, kv_lens, cu_q_lens, sinks, **options)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_attention_meets_the_oracle(shape, dtype):
    check(attend, inputs(shape, dtype=dtype), dtype)


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[5], OPTIONS[7]], ids="-".join)
def test_attention_takes_every_option(options):
    check(attend, inputs(FAVOURITE), **options)


def test_f32_queries_read_a_bf16_pool():
    q, pool, table, lengths = inputs(FAVOURITE, SHORT, dtype="bfloat16")
    check(attend, (q.astype(jnp.float32), pool, table, lengths))


def test_slots_whose_table_does_not_fit_go_a_few_at_a_time():
    def attend_wide(q, pool, table, lengths):
        width = attention_tpu.TABLE_BYTES // 16  # four slots fill the table's room
        return attend(q, pool, jnp.pad(table, ((0, 0), (0, width - table.shape[1]))), lengths, block_pages=4)

    check(attend_wide, inputs(FAVOURITE, SHORT))


@pytest.mark.parametrize("mode", [LATE, EAGER], ids=["late", "eager"])
def test_attention_awaits_every_page_it_reads(mode, capsys):
    attend_late = partial(attend, interpret=mode, block_pages=2)
    check(lambda *arrays, window: attend_late(*arrays, window=window), inputs(FAVOURITE, SHORT), window=60)
    assert RACE not in capsys.readouterr().out


def test_no_tokens_anywhere_give_zeros():
    q, pool, table, _ = inputs(FAVOURITE, (40, 40))
    sinks = jnp.ones(q.shape[1])
    assert not np.asarray(attend(q, pool, table, jnp.zeros(2, jnp.int32), interpret=LATE, sinks=sinks)).any()


@pytest.mark.parametrize(("shape", "dtype"), CASES[2:3], ids=str)
def test_packed_chunks_meet_the_oracle(shape, dtype):
    prefill.check(attend_packed, prefill.inputs(shape, dtype=dtype), dtype)


def test_packed_chunks_take_every_option():
    prefill.check(attend_packed, prefill.inputs(FAVOURITE), **OPTIONS[7])


@pytest.mark.parametrize(("mode", "options"), [(LATE, {"window": 25}), (EAGER, {})], ids=["late", "eager"])
def test_packed_chunks_await_every_page_they_read(mode, options, capsys):
    packed = [(0, 0), (17, 17), (0, 40), (1, 65), (20, 70)]
    attend_late = partial(attend_packed, interpret=mode, block_pages=2, block_rows=16)
    prefill.check(attend_late, prefill.inputs(FAVOURITE, packed), **options)
    assert RACE not in capsys.readouterr().out


def check_write(shape, dtype, tokens, mode, block_rows=None):
    k, v, pages, offsets = rows(shape, tokens)
    pages[::7] = 0
    pool = np.random.default_rng(4).standard_normal((10, shape.kv_heads, 2, shape.page_size, shape.head_dim))
    got = write_tpu.write_kv_pages(
        jnp.asarray(pool, dtype), k, v, pages, offsets, block_rows=block_rows, interpret=mode
    )
    assert got.dtype == dtype
    want = np.array(jnp.asarray(pool, dtype))
    for row, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        if page:
            want[page, :, :, offset] = np.stack([k[row], v[row]], axis=1).astype(want.dtype)
    assert np.array_equal(np.asarray(got), want)


@pytest.mark.parametrize(("shape", "dtype"), [*CASES[1:4], (Shape(16, 2, 1, 4), "bfloat16")], ids=str)
def test_every_row_lands_in_its_place_and_nothing_else_changes(shape, dtype):
    check_write(shape, dtype, 30, FAST)


@pytest.mark.parametrize("mode", [LATE, EAGER], ids=["late", "eager"])
def test_blocks_that_share_a_group_are_written_one_after_the_other(mode, capsys):
    check_write(FAVOURITE, "bfloat16", 43, mode, block_rows=8)
    assert RACE not in capsys.readouterr().out


def test_rows_that_all_go_to_the_null_page_change_nothing():
    pool, none = jnp.ones((3, 2, 2, 16, 64)), jnp.zeros(5, jnp.int32)
    got = write_tpu.write_kv_pages(pool, *[jnp.zeros((5, 2, 64))] * 2, none, none, interpret=LATE)
    assert np.array_equal(np.asarray(got), np.asarray(pool))
