"""Pages of one submesh to pages of another, whatever the cuts, by the programs alone (no model)."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.tensor_cut import heads_per_shard, kv_heads_of_shard
from jdisagg.core.worker_config import Digests
from jdisagg.kv.pools import POOL_SPEC, StagePages
from jdisagg.kv.shipping import TransferPrograms, check_landed, insert_landed, ship_pages
from jdisagg.parallel.submesh import StageMesh

LAYERS, PAGES = 3, 24


def stages(
    layout: KVLayout, cut: list[range], submeshes: list[StageMesh]
) -> tuple[list[StagePages], dict[StageMesh, TransferPrograms]]:
    made = [StagePages(layout, run, PAGES, submesh) for run, submesh in zip(cut, submeshes, strict=True)]
    return made, {submesh: TransferPrograms(submesh) for submesh in submeshes}


def places(heads: int, tp: int) -> list[int]:
    """The head in each place of a pool, shard after shard; -1 is padding."""
    runs = [kv_heads_of_shard(heads, tp, shard) for shard in range(tp)]
    return [head for run in runs for head in (*run, *[-1] * (heads_per_shard(heads, tp) - len(run)))]


def fill(pages: list[StagePages], content: np.ndarray) -> None:
    """content [L, P + 1, Hkv, 2, page_size, D] into the pools, heads repeated where shards share them; 9 in padding."""
    for stage in pages:
        held = places(stage.layout.num_kv_heads, stage.submesh.tp)
        padded = np.concatenate([content, np.full_like(content[:, :, :1], 9)], axis=2)
        stage.pools = [
            jax.device_put(padded[layer][:, held], stage.submesh.sharding(POOL_SPEC)) for layer in stage.layers
        ]


def held_by(pages: list[StagePages]) -> np.ndarray:
    """The pools as [L, P + 1, Hkv, 2, page_size, D], each head once; those who share one hold the same."""
    found = []
    for stage in pages:
        heads = stage.layout.num_kv_heads
        held = np.array(places(heads, stage.submesh.tp))
        for pool in map(np.array, stage.pools):
            assert np.isfinite(pool).all()
            copies = [pool[:, held == head] for head in range(heads)]
            assert all((each == each[:, :1]).all() for each in copies)
            found.append(np.concatenate([each[:, :1] for each in copies], axis=1))
    return np.stack(found)


@pytest.mark.parametrize(
    ("heads", "source_tp", "destination_tp"),
    [
        *[(2, 1, 1), (2, 2, 1), (2, 1, 4), (2, 4, 2), (6, 3, 2), (3, 2, 1), (3, 1, 2), (3, 2, 4), (3, 4, 2), (3, 4, 4)],
        *[(3, 5, 2), (3, 2, 3), (7, 4, 2), (1, 3, 2)],
    ],
)
def test_pages_arrive_in_their_places_and_touch_no_other(heads: int, source_tp: int, destination_tp: int):
    layout = KVLayout(LAYERS, heads, 4, page_size=2)
    devices = jax.devices()
    source, programs = stages(layout, [range(0, 1), range(1, 3)], [StageMesh(devices[:source_tp])] * 2)
    split = [range(0, 2), range(2, 3)] if destination_tp < 4 else [range(3)]
    submeshes = [StageMesh(devices[8 - (n + 1) * destination_tp : 8 - n * destination_tp]) for n in range(len(split))]
    destination, other_programs = stages(layout, split, submeshes)
    generator = np.random.default_rng(0)
    shape = (LAYERS, PAGES + 1, layout.num_kv_heads, 2, 2, 4)
    sent, there = (generator.normal(size=shape).astype(np.float32) for _ in range(2))
    fill(source, sent)
    fill(destination, there)
    wanted, into = [5, 3, 20, 11, 1], [2, 9, 4, 24, 17]
    landed, _ = ship_pages(source, programs, destination, wanted, into)
    insert_landed(destination, other_programs, landed)
    found = held_by(destination)
    np.testing.assert_array_equal(found[:, into], sent[:, wanted])
    rest = [page for page in range(1, PAGES + 1) if page not in into]
    np.testing.assert_array_equal(found[:, rest], there[:, rest])


@pytest.mark.parametrize(
    ("heads", "source_tp", "destination_tp"), [(2, 1, 1), (2, 2, 1), (2, 1, 4), (2, 4, 2), (3, 2, 4)]
)
@pytest.mark.parametrize("digests", Digests)
def test_a_bit_that_flips_on_the_way_is_seen(heads: int, source_tp: int, destination_tp: int, digests: Digests):
    layout, devices = KVLayout(LAYERS, heads, 4, page_size=2), jax.devices()
    source, _ = stages(layout, [range(LAYERS)], [StageMesh(devices[:source_tp])])
    destination, programs = stages(layout, [range(LAYERS)], [StageMesh(devices[8 - destination_tp :])])
    shape = (LAYERS, PAGES + 1, layout.num_kv_heads, 2, 2, 4)
    fill(source, np.random.default_rng(1).normal(size=shape).astype(np.float32))
    packers = {stage.submesh: TransferPrograms(stage.submesh, digests) for stage in source}
    (each,), _ = ship_pages(source, packers, destination, [5, 3, 20], [2, 9, 4])
    if digests is Digests.OFF:
        assert not check_landed(destination, programs, [each])
        return
    verdicts = check_landed(destination, programs, [each])
    assert np.asarray(verdicts[0]).shape == (destination_tp,) and np.asarray(verdicts[0]).all()
    (values,) = each.slices.values[:1]
    for position in (0, values.size // 2 if digests is Digests.FULL else 5):
        bits = np.array(values)
        bits.reshape(-1).view(np.uint32)[position] ^= 1 << 11
        others = each.slices.values[1:]
        slices = each.slices._replace(values=[jax.device_put(bits, values.sharding), *others])
        changed = replace(each, slices=slices)
        assert not np.asarray(check_landed(destination, programs, [changed])[0]).all()


def test_a_transfer_over_the_largest_bucket_goes_in_several_moves():
    layout = KVLayout(1, 2, 4, page_size=2)
    pages, programs = stages(layout, [range(1)], [StageMesh(jax.devices()[:1])])
    landed, _ = ship_pages(pages, programs, pages, [1] * 70, [2] * 70)
    assert [len(move.pages) for move in landed] == [64, 16]


def test_pools_of_one_stage_never_share_a_buffer():
    layout = KVLayout(4, 2, 4, page_size=2)
    stage = StagePages(layout, range(4), PAGES, StageMesh(jax.devices()[:2]))
    buffers = {shard.data.unsafe_buffer_pointer() for pool in stage.pools for shard in pool.addressable_shards}
    assert len(buffers) == 8
    assert stage.num_bytes == layout.bytes_per_page * (PAGES + 1)


@pytest.mark.parametrize("wire", ["raw", "int8"])
def test_pages_go_into_a_bf16_pool_without_a_copy_of_it(wire: str):
    layout, submesh, pages = KVLayout(2, 2, 64, 16, dtype="bfloat16"), StageMesh(jax.devices()[:1]), np.arange(1, 5)
    stage = StagePages(layout, range(2), 400, submesh)
    content = np.random.default_rng(0).standard_normal((2, *stage.pools[0].shape)).astype(np.float32)
    fill([stage], content)
    stage.pools = [pool.astype(layout.dtype) for pool in stage.pools]
    programs = TransferPrograms(submesh)
    packed = programs.pack(stage.pools, pages.astype(np.int32), 2, wire, "bfloat16").numbers
    arguments = stage.pools, submesh.put(pages[::-1].astype(np.int32)), packed
    memory: Any = programs.insert_program.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < stage.num_bytes / 8
    before = [np.asarray(pool, np.float32) for pool in stage.pools]
    for old, pool in zip(before, programs.insert_program(*arguments)[0], strict=True):
        new = np.asarray(pool, np.float32)
        np.testing.assert_allclose(new[pages[::-1]], old[pages], rtol=0, atol=0 if wire == "raw" else 0.03)
        assert np.array_equal(np.delete(new, pages, axis=0), np.delete(old, pages, axis=0))
