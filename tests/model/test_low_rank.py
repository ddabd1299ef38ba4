"""The products of adapters: a row has the same bits in whatever slot its own lies, and beside whatever others."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model.lora import MISSING, NONE, LowRank, room_for
from tests.model.row_bits import COUNTS

INSIDE, OUT, ROWS = 96, 160, 24


@partial(jax.jit, static_argnums=4)
def added(a: jax.Array, b: jax.Array, x: jax.Array, own: jax.Array, as_products: bool) -> jax.Array:
    adapted = LowRank(a, [*b])
    adapted.rows = own
    return adapted(x, as_products=as_products)


def drawn(rank: int, slots: int, rows: int) -> tuple[np.ndarray, ...]:
    """a and b of two parts, x and the rows' slots."""
    draw = np.random.default_rng(rank)
    shapes = (2, slots, rank, INSIDE), (2, slots, rank, OUT), (rows, INSIDE)
    a, b, x = (draw.normal(size=shape).astype("f4") for shape in shapes)
    return a, b, x, draw.integers(NONE, slots, rows).astype(np.int32)


SIZES = [(3, 5, 4, 8), (3, 4, 4, 4), (1, 1, 4, 4), (2, 4, 4, 4), (8, 8, 8, 8), (5, 16, 5, 16), (3, 20, 4, 20)]


@pytest.mark.parametrize(("adapters", "rank", "slots", "room"), SIZES)
def test_there_is_room_in_whole_vectors_for_as_many_adapters_as_are_asked_for(
    adapters: int, rank: int, slots: int, room: int
):
    found = room_for(adapters, rank, jnp.float32)
    assert (found.slots, found.rank) == (slots, room)
    assert found.slots * found.rank % 16 == 0


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize(("adapters", "rank"), [(3, 5), (3, 4), (2, 1), (4, 16)])
def test_a_row_has_the_same_bits_in_every_slot_and_beside_whatever_others(adapters: int, rank: int, rows: int):
    draw, room = np.random.default_rng(rank), room_for(adapters, rank, jnp.float32)
    a, b = np.zeros((2, room.rank, INSIDE), "f4"), np.zeros((2, room.rank, OUT), "f4")
    a[:, :rank], b[:, :rank] = draw.normal(size=(2, rank, INSIDE)), draw.normal(size=(2, rank, OUT))
    x, found = draw.normal(size=(rows, INSIDE)).astype("f4"), set[bytes]()

    for slot in range(adapters):
        held_a = draw.normal(size=(2, room.slots, room.rank, INSIDE)).astype("f4")
        held_b = draw.normal(size=(2, room.slots, room.rank, OUT)).astype("f4")
        held_a[:, slot], held_b[:, slot] = a, b
        own = draw.integers(NONE, adapters, rows).astype(np.int32)
        own[0] = slot
        y = np.asarray(added(held_a, held_b, x, own, True))[0]
        expected = np.concatenate([x[0] @ one.T @ other for one, other in zip(a, b, strict=True)])
        np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
        found.add(y.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize(("slots", "rank"), [(4, 8), (4, 36), (2, 64)])
def test_a_row_has_the_same_bits_beside_few_and_beside_many_rows(slots: int, rank: int):
    *held, x, own = drawn(rank, slots, max(COUNTS))
    found = {np.asarray(added(*held, x[:count], own[:count], True))[:2].tobytes() for count in COUNTS}
    assert len(found) == 1


@pytest.mark.parametrize(("slots", "rank"), [(4, 8), (4, 36), (2, 64)])
def test_both_ways_add_the_same_and_nothing_to_rows_without_an_adapter(slots: int, rank: int):
    a, b, x, own = drawn(rank, slots, ROWS)
    own[:3] = NONE, MISSING, slots - 1
    one, other = (np.asarray(added(a, b, x, own, way)) for way in (True, False))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    assert not one[0].any()
    assert not added(a, b, x, np.full(ROWS, NONE, np.int32), True).any()
    assert np.isnan(one[1]).all()
