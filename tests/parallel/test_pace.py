"""The limit on multi-device programs in flight."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdisagg.parallel.pace import LAUNCHES, LaunchCounter
from jdisagg.parallel.submesh import AXIS, WHOLE, StageMesh


def test_no_more_than_the_limit_are_left_undrained():
    pace = LaunchCounter(limit=3)
    for value in range(10):
        pace.launched(jnp.full(4, value))
        assert pace.in_flight <= 3


def test_programs_of_several_devices_pass_the_pace_and_others_do_not():
    many, one = StageMesh(jax.devices()[:2]), StageMesh(jax.devices()[2:3])
    before = LAUNCHES.in_flight
    total = many.program(lambda x: jax.lax.psum(x, AXIS), PartitionSpec(AXIS), WHOLE)
    result = total(jax.device_put(np.arange(4.0), many.sharding(PartitionSpec(AXIS))))
    np.testing.assert_array_equal(np.asarray(result), [2.0, 4.0])
    assert LAUNCHES.in_flight == min(before + 1, LAUNCHES.limit)
    one.program(lambda x: x + 1)(one.put(np.zeros(3)))
    assert LAUNCHES.in_flight == min(before + 1, LAUNCHES.limit)


def test_hundreds_of_collective_programs_without_a_wait_do_not_starve_each_other():
    submesh = StageMesh(jax.devices()[:4])
    step = submesh.program(lambda x: jax.lax.psum(x, AXIS) / 4, WHOLE, WHOLE)
    x = submesh.put(np.ones((64, 64), np.float32))
    for _ in range(200):
        x = step(x)
    assert float(x[0, 0]) == 1.0


def test_arrays_reach_every_shard_and_hop_between_places():
    first, second, single = StageMesh(jax.devices()[:2]), StageMesh(jax.devices()[4:6]), StageMesh(jax.devices()[7:])
    x = first.put(np.arange(6.0))
    moved = second.transfer(x)
    assert moved.devices() == set(second.devices) and second.transfer(moved) is moved
    spread = first.spread(single.put(np.arange(3)))
    assert spread.devices() == set(first.devices)
    np.testing.assert_array_equal(np.asarray(spread), np.arange(3))
    assert single.spread(x.addressable_data(1)).devices() == {jax.devices()[7]}


def test_a_program_counts_what_it_was_compiled_for():
    program = StageMesh(jax.devices()[:1]).program(lambda x: x * 2)
    for size in (3, 3, 5):
        program(jnp.zeros(size))
    assert program.num_compiled == 2
