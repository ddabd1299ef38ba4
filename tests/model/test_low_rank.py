"""The products of adapters: a row has the same bits in whatever slot its own lies, and beside whatever others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.model.low_rank import NONE, LowRank, room_for

INSIDE, OUT, ROWS = 96, 160, 24


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
    a, b = np.zeros((2, room.rank, INSIDE), "f4"), np.zeros((2, OUT, room.rank), "f4")
    a[:, :rank], b[:, :, :rank] = draw.normal(size=(2, rank, INSIDE)), draw.normal(size=(2, OUT, rank))
    x, found = draw.normal(size=(rows, INSIDE)).astype("f4"), set[bytes]()

    @jax.jit
    def run(a: jax.Array, b: jax.Array, x: jax.Array, own: jax.Array) -> jax.Array:
        adapted = LowRank(a, [*b])
        adapted.rows = own
        return adapted(x, as_products=True)

    for slot in range(adapters):
        held_a = draw.normal(size=(2, room.slots, room.rank, INSIDE)).astype("f4")
        held_b = draw.normal(size=(2, OUT, room.slots, room.rank)).astype("f4")
        held_a[:, slot], held_b[:, :, slot] = a, b
        own = draw.integers(NONE, adapters, rows).astype(np.int32)
        own[0] = slot
        y = np.asarray(run(held_a, held_b, x, own))[0]
        expected = np.concatenate([x[0] @ one.T @ other.T for one, other in zip(a, b, strict=True)])
        np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
        found.add(y.tobytes())
    assert len(found) == 1
