"""Which layers travel quantised: by what is seen, and on a mesh over processes by what its leader has seen."""

import jax
import jax.numpy as jnp

from jdisagg.kv.shipping import ErrorMonitor

FIRST, SECOND = range(0, 2), range(2, 4)


def lost(error: float) -> list[jax.Array]:
    return [jax.block_until_ready(jnp.full((2, 1, 1), error, jnp.float32))]


def test_layers_that_lost_more_than_the_bound_go_raw_from_then_on():
    monitor = ErrorMonitor(0.05)
    monitor.watch(FIRST, lost(0.2))
    monitor.watch(SECOND, lost(0.01))
    assert not monitor.allows(FIRST) and monitor.allows(SECOND)


def test_a_leader_decides_once_a_part_and_members_do_as_it_says():
    """However soon each process's own errors are there to be read, all pack alike."""
    leader, member, raw = ErrorMonitor(0.05), ErrorMonitor(0.05), list[list[int]]()
    for _ in range(2):
        raw = leader.lead()
        member.follow(raw)
        leader.watch(FIRST, lost(0.2))  # there before the next question, and not asked for in this part
        member.watch(SECOND, lost(0.9))
        for layers in (FIRST, SECOND):
            assert leader.allows(layers) == member.allows(layers)
    assert raw == [[0, 2]] and not member.allows(FIRST) and member.allows(SECOND)
    member.follow([])
    assert member.allows(FIRST)
