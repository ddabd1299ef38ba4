"""Whole transfers between meshes that differ in everything at once: byte for byte, and no program too many."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.layout.reshard import plan_transfer, prove
from jdisagg.core.worker_config import Digests
from jdisagg.kv.pools import StagePages
from jdisagg.kv.shipping import ErrorMonitor, TransferPrograms, check_landed, insert_landed, shapes_of, ship_pages
from jdisagg.parallel.submesh import StageMesh
from tests.kv.test_shipping import fill, held_by

HEADS, D, TOKENS = 4, 4, 90  # the last page of either end is filled in part

# (heads, TP a -> PP b x TP c: layers of the source's and the destination's stages, their page sizes and dtypes), chosen
# so that each pair of TPs, each ratio of pages and both casts meet uneven stages and replicated heads somewhere
CASES = [
    (4, 1, [4], 4, [1, 4], (8, 8), ("float32", "float32")),
    (4, 4, [4], 1, [1, 2, 4], (8, 16), ("float32", "float32")),
    (2, 4, [1, 4], 2, [3, 4], (16, 8), ("float32", "float32")),  # each head on two shards
    (2, 8, [4], 4, [1, 4], (32, 8), ("float32", "bfloat16")),
    (1, 2, [4], 4, [2, 4], (8, 32), ("bfloat16", "float32")),  # one head, everywhere
    (8, 8, [4], 2, [1, 2, 3, 4], (8, 24), ("float32", "float32")),
    (6, 3, [2, 4], 2, [3, 4], (24, 16), ("float32", "float32")),
    (6, 2, [4], 6, [4], (16, 24), ("bfloat16", "bfloat16")),
    (3, 2, [4], 4, [1, 4], (8, 16), ("float32", "float32")),  # padding at both ends
    (7, 4, [4], 2, [2, 4], (16, 8), ("float32", "bfloat16")),  # padding that travels behind a head
    (3, 8, [4], 2, [3, 4], (8, 8), ("bfloat16", "float32")),  # heads twice and padding
]


def stages_of(layout: KVLayout, stops: list[int], tp: int, *, last: bool) -> list[StagePages]:
    """Stages that end at `stops`; on the last devices where `last`, going round where there are too few."""
    pages, devices = -(-TOKENS // layout.page_size) + 3, jax.devices()[::-1] if last else jax.devices()
    made, start = [], 0
    for index, stop in enumerate(stops):
        first = index * tp % (9 - tp)
        made.append(StagePages(layout, range(start, stop), pages, StageMesh(devices[first : first + tp])))
        start = stop
    return made


def programs_of(
    stages: list[StagePages], digests: Digests = Digests.FULL, bound: float = 0.05
) -> dict[StageMesh, TransferPrograms]:
    return {stage.submesh: TransferPrograms(stage.submesh, digests, bound) for stage in stages}


def numbers(layout: KVLayout, seed: int) -> np.ndarray:
    shape = (layout.num_layers, -(-TOKENS // layout.page_size) + 4, layout.num_kv_heads, 2, layout.page_size, D)
    return np.asarray(jnp.asarray(np.random.default_rng(seed).normal(size=shape), layout.dtype))


def pages_in_disorder(layout: KVLayout, seed: int) -> list[int]:
    """Pages of the sequence, first token first."""
    count = layout.pages_for(TOKENS)
    return (1 + np.random.default_rng(seed).permutation(count + 3)[:count]).tolist()


def sequence(content: np.ndarray, pages: list[int]) -> np.ndarray:
    """[L, heads, 2, TOKENS, D] of pages [L, P, heads, 2, page_size, D]."""
    rows = content[:, pages].transpose(0, 2, 3, 1, 4, 5)
    return rows.reshape(*rows.shape[:3], -1, rows.shape[-1])[:, :, :, :TOKENS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_of_every_head_and_layer_is_where_it_belongs(case):
    heads, a, source_stops, c, destination_stops, sizes, dtypes = case
    ours, theirs = (KVLayout(4, heads, D, size, dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    source = stages_of(ours, source_stops, a, last=False)
    destination = stages_of(theirs, destination_stops, c, last=True)
    sent, there = numbers(ours, 0), numbers(theirs, 1)
    fill(source, sent)
    fill(destination, there)
    from_, to = pages_in_disorder(ours, 2), pages_in_disorder(theirs, 3)
    programs = programs_of(destination)
    landed, packed = ship_pages(source, programs_of(source), destination, from_, to)
    plan = plan_transfer(shapes_of(source), shapes_of(destination), heads, (len(from_), len(to)))
    prove(replace(plan, moves=tuple(each.move for each in packed)))
    assert all(np.asarray(verdict).all() for verdict in check_landed(destination, programs, landed))
    insert_landed(destination, programs, landed)
    narrow = "bfloat16" if "bfloat16" in dtypes else "float32"
    wanted = np.asarray(jnp.asarray(sequence(sent, from_)).astype(narrow).astype(theirs.dtype))
    found = held_by(destination)
    assert sequence(found, to).tobytes() == wanted.tobytes()
    rest = [page for page in range(1, found.shape[1]) if page not in to]
    assert found[:, rest].tobytes() == there[:, rest].tobytes()


@pytest.mark.parametrize("wire", ["int8", "int4", "fp8"])
def test_padding_is_intact_and_zero_where_it_was_not_sent_whatever_the_wire(wire: str):
    layout = KVLayout(2, 3, D, 8)  # three heads on four shards, the last of which holds none
    source, destination = stages_of(layout, [2], 2, last=False), stages_of(layout, [2], 4, last=True)
    fill(source, np.sign(numbers(layout, 0)))
    fill(destination, numbers(layout, 1))
    programs = programs_of(destination)
    landed, packed = ship_pages(source, programs_of(source), destination, [3, 5], [1, 4], wire=wire)
    assert [len(each.device_arrays) for each in packed] == [3 * 4], "values, scales, digests and errors of three heads"
    assert all(np.asarray(verdict).all() for verdict in check_landed(destination, programs, landed))
    insert_landed(destination, programs, landed)
    for pool in destination[0].pools:
        assert not np.array(pool)[[1, 4], 3].any()
    np.testing.assert_allclose(held_by(destination)[:, [1, 4]], np.sign(numbers(layout, 0))[:, [3, 5]], atol=1e-6)


def test_pages_that_the_destination_holds_already_are_not_written():
    layout = KVLayout(2, HEADS, D, 8)
    source, destination = (stages_of(layout, [2], 1, last=last) for last in (False, True))
    sent, there = numbers(layout, 0), numbers(layout, 1)
    fill(source, sent)
    fill(destination, there)
    programs = programs_of(destination)
    landed, _ = ship_pages(source, programs_of(source), destination, [3, 5, 7], [0, 0, 4])
    insert_landed(destination, programs, landed)
    found = held_by(destination)
    np.testing.assert_array_equal(found[:, 4], sent[:, 7])
    rest = [page for page in range(1, found.shape[1]) if page != 4]
    np.testing.assert_array_equal(found[:, rest], there[:, rest])


@pytest.mark.parametrize("wire", ["raw", "int8"])
def test_no_number_of_tokens_compiles_a_program_that_was_not_declared(wire: str):
    ours, theirs = KVLayout(1, 2, D, 8), KVLayout(1, 2, D, 16)
    source = [StagePages(ours, range(1), 300, StageMesh(jax.devices()[:1]))]
    destination = [StagePages(theirs, range(1), 150, StageMesh(jax.devices()[1:2]))]
    leaving, landing = programs_of(source), programs_of(destination)

    def ship(tokens: int) -> None:
        from_, to = (list(range(1, 1 + layout.pages_for(tokens))) for layout in (ours, theirs))
        landed, _ = ship_pages(source, leaving, destination, from_, to, wire=wire)
        check_landed(destination, landing, landed)
        insert_landed(destination, landing, landed)

    def compiled() -> int:
        ends = [*leaving.values(), *landing.values()]
        return sum(program.num_compiled for end in ends for program in end.programs)

    for groups in (2, 8, 32):
        ship(groups * 16)
    warm = compiled()
    assert warm == 12  # three sizes of what packs, digests, checks and inserts
    for tokens in (1, 7, 16, 17, 40, 129, 300, 513, 1100, 2400):
        ship(tokens)
    assert compiled() == warm


@pytest.mark.parametrize("kind", ["values", "scales", "digests"])
def test_a_bit_that_flips_in_a_compressed_slice_is_seen(kind: str):
    layout = KVLayout(2, HEADS, D, 8)
    source, destination = stages_of(layout, [2], 2, last=False), stages_of(layout, [2], 1, last=True)
    fill(source, numbers(layout, 0))
    (each,), _ = ship_pages(source, programs_of(source), destination, [3, 5, 7], [1, 2, 4], wire="int8")
    programs = programs_of(destination)
    assert all(np.asarray(verdict).all() for verdict in check_landed(destination, programs, [each]))
    chosen = getattr(each.slices, kind)[-1]
    bits = np.array(chosen)
    bits.reshape(-1).view(np.uint8)[bits.nbytes // 2] ^= 1 << 6
    slices = jax.tree.map(lambda array: jax.device_put(bits, array.sharding) if array is chosen else array, each.slices)
    assert not all(
        np.asarray(verdict).all() for verdict in check_landed(destination, programs, [replace(each, slices=slices)])
    )


def test_a_layer_over_the_bound_goes_raw_while_its_neighbours_stay_small():
    """Stages of one layer each; numbers of one size are exact in every wire, those of the second layer are not."""
    layout = KVLayout(3, HEADS, D, 8)
    source, destination = stages_of(layout, [1, 2, 3], 1, last=False), stages_of(layout, [1, 2, 3], 1, last=True)
    content = np.sign(numbers(layout, 0))
    content[1] = numbers(layout, 1)[1]
    fill(source, content)
    leaving, landing, monitor = programs_of(source), programs_of(destination, bound=0.02), ErrorMonitor(0.02)
    landed, packed = ship_pages(source, leaving, destination, [1, 2], [3, 4], wire="int4", monitor=monitor)
    verdicts = [bool(np.asarray(each).all()) for each in check_landed(destination, landing, landed)]
    assert verdicts == [True, False, True], "what lost too much is refused where it lands"
    jax.block_until_ready([each.slices for each in packed])
    again, _ = ship_pages(source, leaving, destination, [1, 2], [3, 4], wire="int4", monitor=monitor)
    assert set(monitor.over) == {range(1, 2)} and monitor.over[range(1, 2)] > 0.02
    assert [bool(each.slices.scales) for each in again] == [True, False, True]
    assert all(np.asarray(each).all() for each in check_landed(destination, landing, again))
    insert_landed(destination, landing, again)
    np.testing.assert_allclose(held_by(destination)[:, [3, 4]], content[:, [1, 2]], atol=1e-6)
