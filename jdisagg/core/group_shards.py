"""Which process of a group holds which shard, and so which pieces of a transfer go from whom to whom.

A worker's devices are numbered stage by stage, and its processes hold equal runs of them, rank 0 the first. A *holder*
is the rank of the process that a shard is on; a worker in one process has one holder, 0, for everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.reshard import HeadPlan

Holders = tuple[tuple[int, ...], ...]  # [stage][shard]: the rank


def holders_of(shards: Sequence[int], num_devices: int, num_processes: int, stages_share: bool) -> Holders:
    """Of stages with so many shards each, on devices of their own or all on the same ones."""
    per = num_devices // num_processes
    assert per * num_processes == num_devices, (num_devices, num_processes)
    first, found = 0, list[tuple[int, ...]]()
    for number in shards:
        found.append(tuple((first + shard) // per for shard in range(number)))
        first += 0 if stages_share else number
    return tuple(found)


def of_one_process(shards: Sequence[int]) -> Holders:
    return tuple((0,) * number for number in shards)


def senders(heads: HeadPlan, source: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """[destination shard][head slice that is sent]: the rank that sends it, where `source` are a stage's holders."""
    return tuple(tuple(source[each.shard] for each in row if each is not None) for row in heads.slices)


def shards_held(holders: Sequence[int], rank: int) -> list[int]:
    """The shards of a stage that this process holds."""
    return [shard for shard, holder in enumerate(holders) if holder == rank]
