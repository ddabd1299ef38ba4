"""`debug=True`: numbers that no operation may be given are refused with both values, at once and under jit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, check_call, paged_attention, prefill_attention, write_kv_pages

POOL = jnp.zeros((10, 2, 2, 16, 64))
TABLE = jnp.asarray([[1, 2], [3, 4]], jnp.int32)
ROWS = jnp.zeros((6, 2, 64))


def ints(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def decode(table=TABLE, lengths=None):
    return paged_attention, (ROWS[:2], POOL, table, ints(5, 32) if lengths is None else lengths)


def prefill(kv_lens=None, spans=None, table=TABLE):
    kv_lens = ints(5, 32) if kv_lens is None else kv_lens
    return prefill_attention, (ROWS, POOL, table, kv_lens, ints(0, 3, 5) if spans is None else spans)


def write(pages=None, offsets=None):
    pages = ints(0, 1, 9) if pages is None else pages
    return write_kv_pages, (POOL, ROWS[:3], ROWS[:3], pages, ints(0, 1, 15) if offsets is None else offsets)


REFUSED = [
    (decode(table=TABLE.at[1, 1].set(10)), r"page_table\[1, 1\] is 10, outside the pages of the pool \[0, 10\)"),
    (decode(table=TABLE.at[0, 1].set(-1)), r"page_table\[0, 1\] is -1"),
    (decode(lengths=ints(5, 33)), r"lengths\[1\] is 33 tokens, outside \[0, 32\]: the table holds 2 pages of 16"),
    (decode(lengths=ints(-1, 3)), r"lengths\[0\] is -1 tokens"),
    (prefill(kv_lens=ints(40, 32)), r"kv_lens\[0\] is 40 tokens"),
    (prefill(spans=ints(1, 3, 5)), r"cu_q_lens\[0\] is 1, not 0"),
    (prefill(spans=ints(0, 5, 3)), r"cu_q_lens falls from 5 at 1 to 3"),
    (prefill(spans=ints(0, 3, 7)), r"cu_q_lens ends at 7, q has 6 rows"),
    (prefill(kv_lens=ints(2, 32)), r"sequence 0 owns 3 rows of q, and kv_lens\[0\] is 2 tokens"),
    (write(pages=ints(0, 1, 10)), r"page_ids\[2\] is 10, outside the pages of the pool \[0, 10\)"),
    (write(offsets=ints(0, 16, 1)), r"offsets\[1\] is 16, outside the tokens of a page \[0, 16\)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_contents_that_do_not_fit_are_refused_with_both_values(call, message):
    operation, arguments = call
    with pytest.raises(KernelError, match=message):
        operation(*arguments, debug=True)


@pytest.mark.parametrize(("call", "message"), REFUSED[::4], ids=[message[:24] for _, message in REFUSED[::4]])
def test_they_are_refused_under_jit_as_well(call, message):
    operation, arguments = call
    program = jax.jit(partial(operation, debug=True))
    with pytest.raises(KernelError, match=message):
        check_call(program)(*arguments)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(program(*arguments))


@pytest.mark.parametrize("call", [decode(), prefill(), write()], ids=["decode", "prefill", "write"])
def test_good_contents_give_what_they_give_without(call):
    operation, arguments = call
    want = np.asarray(operation(*arguments))
    assert np.array_equal(np.asarray(operation(*arguments, debug=True)), want)
    assert np.array_equal(np.asarray(check_call(jax.jit(partial(operation, debug=True)))(*arguments)), want)


def test_other_errors_of_a_checked_call_stay_what_they_are():
    with pytest.raises(ValueError, match="mine") as caught:
        check_call(lambda: (_ for _ in ()).throw(ValueError("mine")))()
    assert not isinstance(caught.value, KernelError)
