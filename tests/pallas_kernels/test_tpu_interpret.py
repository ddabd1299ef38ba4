"""The TPU kernels, interpreted: copies that land late, races, work on two cores. Shapes: test_conformance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu as attention_tpu
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.tpu_blocks import deal, next_with_work
from pallas_kernels.write_kv_pages import reference as write_reference
from pallas_kernels.write_kv_pages import tpu as write_tpu
from tests.pallas_kernels import test_prefill_attention as prefill
from tests.pallas_kernels.shapes import by_arrays, rest_slow, stored_pool
from tests.pallas_kernels.test_paged_attention import FAVOURITE, OPTIONS, SINKS, check, check_drafts, inputs
from tests.pallas_kernels.test_write_kv_pages import rows
from tests.pallas_kernels.tpu_modes import EAGER, FAST, LATE, RACE

SHORT = (0, 40, 0, 17, 100, 0)  # with empty slots first, between and last


def smaller(arrays, dtype: str):
    """The arrays of an operation with its pool in `dtype`."""
    return arrays[0], stored_pool(np.asarray(arrays[1]), dtype), *arrays[2:]


def attend(q, kv_pages, page_table, lengths, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": FAST} | options
    return by_arrays(attention_tpu.paged_attention)(q, kv_pages, page_table, lengths, sinks, **options)


def attend_packed(q, kv_pages, page_table, kv_lens, cu_q_lens, *, sinks=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "window": None, "soft_cap": None, "interpret": FAST} | options
    return by_arrays(prefill_tpu.prefill_attention)(q, kv_pages, page_table, kv_lens, cu_q_lens, sinks, **options)


@pytest.mark.parametrize("options", rest_slow([OPTIONS[7], OPTIONS[1], OPTIONS[5]]), ids="-".join)
def test_attention_takes_every_option(options):
    check(attend, inputs(FAVOURITE), **options)


@pytest.mark.parametrize(
    ("options", "mode", "cores"),
    rest_slow([({"window": 20}, FAST, 2), ({}, LATE, 1), ({"sinks": SINKS}, EAGER, 2)]),
    ids=["window", "late", "eager-sinks-2"],
)
def test_a_slot_s_pages_are_read_once_for_all_its_rows_to_the_same_bits(options, mode, cores, capsys):
    together, apart = check_drafts(partial(attend, interpret=mode, cores=cores, block_pages=2), **options)
    np.testing.assert_array_equal(together, apart)
    assert RACE not in capsys.readouterr().out


@pytest.mark.slow
def test_f32_queries_read_a_bf16_pool():
    q, pool, table, lengths = inputs(FAVOURITE, SHORT, dtype="bfloat16")
    check(attend, (q.astype(jnp.float32), pool, table, lengths))


@pytest.mark.slow
def test_slots_whose_table_does_not_fit_go_a_few_at_a_time():
    def attend_wide(q, pool, table, lengths):
        width = attention_tpu.TABLE_BYTES // 16  # four slots fill the table's room
        return attend(q, pool, jnp.pad(table, ((0, 0), (0, width - table.shape[1]))), lengths, block_pages=4)

    check(attend_wide, inputs(FAVOURITE, SHORT))


@pytest.mark.parametrize(
    ("mode", "dtype", "cores"),
    rest_slow([(EAGER, "float32", 2), (LATE, "float32", 1), (LATE, "int8", 2), (EAGER, "float8_e4m3fn", 1)], 2),
    ids=["eager-2", "late", "late-int8-2", "eager-fp8"],
)
def test_attention_awaits_every_page_it_reads(mode, dtype, cores, capsys):
    attend_late = partial(attend, interpret=mode, block_pages=2, cores=cores)
    arrays = smaller(inputs(FAVOURITE, SHORT), dtype)
    check(lambda *arrays, window: attend_late(*arrays, window=window), arrays, window=60)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("part", rest_slow([0, 1]), ids=["values", "scales"])
def test_a_page_that_the_pool_has_not_raises(part):
    q, pool, table, lengths = smaller(inputs(FAVOURITE, (40, 17)), "int8")
    few = [leaf[:3] if at == part else leaf for at, leaf in enumerate(pool)]
    with pytest.raises(Exception, match=r"(?i)out.of.bound"):
        jax.block_until_ready(attend(q, QuantizedPages(*few), table + 2, lengths, interpret=LATE))
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("lengths", [(), (5,), (0, 0), (9, 1, 1, 1, 9, 9, 1), tuple(range(20, 1, -1))], ids=str)
def test_work_is_dealt_to_two_cores_by_its_weight(lengths):
    work = jnp.asarray([*lengths, *[0] * (len(lengths) % 2)], jnp.int32)
    order = np.asarray(deal(work, 2))
    assert sorted(order) == list(range(len(work)))
    ours, theirs = (int(np.asarray(work)[half].sum()) for half in np.split(order, 2))
    assert abs(ours - theirs) <= max(lengths, default=0)
    assert np.array_equal(deal(work, 1), np.arange(len(work)))


def test_the_next_item_with_work_is_found_on_each_core_by_itself():
    following = next_with_work(jnp.asarray([0, 3, 0, 7, 0, 0], jnp.int32), 2)
    assert following.tolist() == [1, 1, 3, 3, 0, 3, 3, 3]


def test_no_tokens_anywhere_give_zeros():
    q, pool, table, _ = inputs(FAVOURITE, (40, 40))
    sinks = jnp.ones(q.shape[1])
    assert not np.asarray(attend(q, pool, table, jnp.zeros(2, jnp.int32), interpret=LATE, sinks=sinks)).any()


@pytest.mark.slow
def test_packed_chunks_take_every_option():
    prefill.check(attend_packed, prefill.inputs(FAVOURITE), **OPTIONS[7])


@pytest.mark.parametrize(
    ("mode", "dtype", "cores", "window"),
    rest_slow([(LATE, "float32", 2, 25), (LATE, "float8_e4m3fn", 1, None), (EAGER, "int8", 2, None)]),
    ids=["late-2", "late-fp8", "eager-int8-2"],
)
def test_packed_chunks_await_every_page_they_read(mode, dtype, cores, window, capsys):
    packed = [(0, 0), (17, 17), (0, 40), (1, 65), (5, 38)]
    attend_late = partial(attend_packed, interpret=mode, block_pages=2, block_rows=16, cores=cores)
    prefill.check(attend_late, smaller(prefill.inputs(FAVOURITE, packed), dtype), window=window)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "dtype"),
    rest_slow([(EAGER, "bfloat16"), (LATE, "bfloat16"), (LATE, "int8"), (EAGER, "float8_e4m3fn")]),
    ids=["eager", "late", "late-int8", "eager-fp8"],
)
def test_blocks_that_share_a_group_are_written_one_after_the_other(mode, dtype, capsys):
    k, v, pages, offsets = rows(FAVOURITE, 43)
    pages[::7] = 0
    pool = np.random.default_rng(4).standard_normal((10, FAVOURITE.kv_heads, 2, FAVOURITE.page_size, 64))
    pool = stored_pool(pool, dtype)
    got = write_tpu.write_kv_pages(pool, k, v, pages, offsets, block_rows=8, interpret=mode)
    want = jax.jit(write_reference.write_kv_pages)(pool, k, v, pages, offsets)
    for part, wanted, before in zip(*map(jax.tree.leaves, (got, want, pool)), strict=True):
        assert np.array_equal(np.asarray(part[1:], np.float32), np.asarray(wanted[1:], np.float32))
        assert np.array_equal(np.asarray(part[0], np.float32), np.asarray(before[0], np.float32))
    assert RACE not in capsys.readouterr().out


def test_rows_that_all_go_to_the_null_page_change_nothing():
    pool, none = jnp.ones((3, 2, 2, 16, 64)), jnp.zeros(5, jnp.int32)
    got = write_tpu.write_kv_pages(pool, *[jnp.zeros((5, 2, 64))] * 2, none, none, interpret=LATE)
    assert np.array_equal(np.asarray(got), np.asarray(pool))
