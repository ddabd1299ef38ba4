"""Packing and unpacking KV: the same bytes at other pages, errors as promised, and a digest that nothing slips past."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels import (
    KernelError,
    PackedPages,
    QuantizedPages,
    digest_pages,
    pack_kv_pages,
    unpack_kv_pages,
    wire_error,
)
from pallas_kernels.pack_kv_pages import reference
from pallas_kernels.quantized import quantize_pages
from pallas_kernels.unpack_kv_pages import reference as unpack_reference
from pallas_kernels.wire_format import WIRES, column_weights, row_weights
from tests.pallas_kernels.shapes import Shape, rest_slow

LAYERS, PAGES = 2, 9
FROM, TO = np.array([4, 0, 7, 2, 1], np.int32), np.array([3, 0, 8, 1, 5], np.int32)
SMALL, FAVOURITE = Shape(8, 2, 1, 4), Shape(64, 4, 2, 16)


# Compiled once for each kind of call: outside jit every call would be traced and compiled anew.
PACK = jax.jit(pack_kv_pages, static_argnames=("wire", "digests"))
UNPACK = jax.jit(unpack_kv_pages, static_argnames="digests")
PACK_REFERENCE = jax.jit(reference.pack_kv_pages, static_argnames="wire")
UNPACK_REFERENCE = jax.jit(unpack_reference.unpack_kv_pages, static_argnames="wire")
WIRE_ERROR = jax.jit(wire_error, static_argnames="wire")


def make_pools(shape: Shape, dtype="float32", seed=0, layers=LAYERS) -> list[jax.Array]:
    """Rows of very different sizes, one of them zeros and one of numbers near the least."""
    rng = np.random.default_rng(seed)
    rows = (PAGES, shape.kv_heads, 2, shape.page_size)
    pools = rng.standard_normal((layers, *rows, shape.head_dim)) * 10.0 ** rng.integers(-6, 6, (layers, *rows, 1))
    pools[:, 4, 0, 0, 0], pools[:, 4, 0, 1, 0] = 0, 1e-37
    return [jnp.asarray(pool, jnp.float32).astype(dtype) for pool in pools]


def same(one, other) -> bool:
    """Equal to the bit, in trees of arrays."""
    ones, others = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(ones) == len(others)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(ones, others, strict=True)]
    assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def check_pack(pack, shape, dtype, wire, page_ids=FROM) -> PackedPages:
    """`pack` is the reference to the bit; what it gave."""
    pools = make_pools(shape, dtype)
    got = pack(pools, jnp.asarray(page_ids), wire=wire)
    assert same(got, PACK_REFERENCE(pools, page_ids, wire=wire))
    return got


def check_unpack(unpack, shape, dtype, wire, source="float32", page_ids=TO) -> None:
    """`unpack` is the reference to the bit but for the null page, and sees the digests that left."""
    packed = PACK_REFERENCE(make_pools(shape, source), FROM, wire=wire)
    pools = make_pools(shape, dtype, seed=1)
    wanted = UNPACK_REFERENCE(pools, packed, page_ids, wire=wire)
    written, digests = unpack(pools, packed, jnp.asarray(page_ids))
    assert same(digests, packed.digests)
    assert same(digests, wanted[1])
    assert same([pool[1:] for pool in written], [pool[1:] for pool in wanted[0]])


# (shape, dtype of the source, wire, dtype of the destination): every head size, page size and wire
CASES = [
    (Shape(64, 4, 2, 16), "float32", "raw", "float32"),
    (Shape(64, 4, 3, 32), "float32", "int8", "bfloat16"),
    (Shape(80, 2, 4, 16), "bfloat16", "int4", "float32"),
    (Shape(96, 8, 1, 32), "float32", "fp8", "float32"),
    (Shape(128, 8, 4, 16), "bfloat16", "raw", "bfloat16"),
    (Shape(128, 1, 1, 128), "bfloat16", "fp8", "bfloat16"),
    (Shape(128, 2, 8, 64), "float32", "int4", "float32"),
    (Shape(256, 2, 2, 64), "bfloat16", "int8", "bfloat16"),
    (SMALL, "float32", "raw", "bfloat16"),
]


@pytest.mark.parametrize(("shape", "source", "wire", "dtype"), rest_slow(CASES, 4), ids=str)
def test_what_runs_here_is_the_definition_to_the_bit(shape, source, wire, dtype):
    check_pack(PACK, shape, source, wire)
    check_unpack(UNPACK, shape, dtype, wire, source)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_raw_pages_keep_every_bit_at_other_ids(dtype):
    bits = {"float32": jnp.uint32, "bfloat16": jnp.uint16}[dtype]
    rng = np.random.default_rng(2)  # not only finite numbers: any bits
    pools = [
        lax.bitcast_convert_type(jnp.asarray(rng.integers(0, 2**32, (PAGES, 2, 2, 16, 64)), bits), jnp.dtype(dtype))
        for _ in range(LAYERS)
    ]
    packed = PACK(pools, FROM)
    written, digests = UNPACK(make_pools(Shape(64, 2, 1, 16), dtype), packed, TO)
    kept = TO != 0
    arrived, sent = ([np.asarray(pool)[ids[kept]] for pool in each] for each, ids in ((written, TO), (pools, FROM)))
    assert same(arrived, sent)
    assert same(digests, packed.digests)


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["int8", "fp8", "int4"])
def test_quantised_numbers_are_off_by_no_more_than_promised(wire, source):
    pools = make_pools(FAVOURITE, source)
    packed = PACK(pools, FROM, wire=wire)
    written, _ = UNPACK(make_pools(FAVOURITE, seed=1), packed, TO)
    kept = TO != 0
    sent = np.stack([np.asarray(pool, np.float64)[FROM[kept]] for pool in pools])
    got = np.stack([np.asarray(pool, np.float64)[TO[kept]] for pool in written])
    top = np.abs(sent).max(-1, keepdims=True)
    bounds = {"int8": top / 254, "int4": top / 14, "fp8": np.maximum(np.abs(sent) / 16, top / 2**18)}
    assert (np.abs(got - sent) <= bounds[wire] * (1 + 1e-5) + 2.0**-100).all()


def test_a_narrow_wire_has_a_fraction_of_the_bytes():
    pools = make_pools(Shape(128, 8, 4, 16), "bfloat16")
    sizes = {wire: sum(part.nbytes for part in PACK(pools, FROM, wire=wire)[:2] if part is not None)
             for wire in WIRES}  # fmt: skip
    of_scales = sizes["raw"] / (2 * 128) * 4
    assert sizes["int8"] == sizes["fp8"] == sizes["raw"] / 2 + of_scales
    assert sizes["int4"] == sizes["raw"] / 4 + of_scales


@pytest.mark.parametrize("wire", WIRES)
def test_a_digest_does_not_know_where_its_page_lies_nor_how_heads_and_layers_are_cut(wire):
    pools = make_pools(Shape(64, 4, 1, 16))
    whole = PACK(pools, FROM, wire=wire).digests
    assert whole is not None
    moved = [pool[::-1] for pool in pools]
    order = np.array([3, 1, 0, 4, 2])
    again = PACK(moved[::-1], PAGES - 1 - FROM[order], wire=wire).digests
    assert again is not None
    assert same(again, whole[::-1, order])
    halves = [PACK([pool[:, cut] for pool in pools[1:]], FROM, wire=wire).digests for cut in np.s_[:2, 2:]]
    assert same(jnp.concatenate([half for half in halves if half is not None], axis=2), whole[1:])


@pytest.mark.parametrize("wire", ["raw", "int4"])
def test_heads_may_be_sharded(wire):
    shape = Shape(64, 4, 1, 16)
    heads, whole, later = PartitionSpec(None, "tp"), PartitionSpec(), PartitionSpec(None, None, "tp")
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    pack, unpack = partial(pack_kv_pages, wire=wire), unpack_kv_pages
    pack = jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=(heads, whole), out_specs=later))
    unpack = jax.jit(jax.shard_map(unpack, mesh=mesh, in_specs=(heads, later, whole), out_specs=(heads, later)))
    packed = check_pack(lambda pools, ids, wire: pack(pools, ids), shape, "float32", wire)
    assert len(packed.values.sharding.device_set) == 2
    check_unpack(unpack, shape, "float32", wire)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WIRES), st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.data())
def test_a_flipped_bit_anywhere_is_always_seen(wire, dtype, in_scales, data):
    pools = make_pools(SMALL, dtype)
    packed = PACK(pools, FROM, wire=wire)
    field = "scales" if in_scales and packed.scales is not None else "values"
    sent = np.array(getattr(packed, field))
    raw = sent.reshape(-1).view(np.uint8)
    bit = data.draw(st.integers(0, raw.size * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    seen = (
        np.asarray(UNPACK(pools, packed._replace(**{field: jnp.asarray(sent)}, digests=None), TO)[1]) != packed.digests
    )
    assert seen.sum() == 1
    place = np.unravel_index(bit // 8 // sent.itemsize, sent.shape)
    assert seen[place[:3]]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(WIRES), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 7), st.integers(0, 7))
def test_exchanged_rows_of_a_page_are_seen(wire, dtype, one, other):
    pools = make_pools(SMALL, dtype)
    packed = PACK(pools, FROM, wire=wire)
    order = np.arange(8)
    order[[one, other]] = order[[other, one]]
    rows = packed.values.reshape(*packed.values.shape[:3], 8, -1)[:, :, :, order].reshape(packed.values.shape)
    scales = None if packed.scales is None else packed.scales[..., order]
    got = UNPACK(pools, PackedPages(rows, scales, None), TO)[1]
    moved = np.asarray(rows != packed.values).any((3, 4, 5))
    assert (np.asarray(got != packed.digests) == moved).all()


@pytest.mark.parametrize("shape", [SMALL, FAVOURITE, Shape(80, 3, 1, 6)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["raw", "int4"])
def test_what_landed_has_the_digests_it_left_with(shape, dtype, wire):
    pools = make_pools(shape, dtype)
    packed = PACK(pools, FROM, wire=wire)
    for parts in (slice(None), slice(1)):  # K and V, or pages of one part as latents have
        values = packed.values[:, :, :, parts]
        scales = None if packed.scales is None else packed.scales[..., : values.shape[3] * shape.page_size]
        folded = jax.jit(digest_pages)(values, scales)
        assert same(folded, reference.digest_pages(values, scales))
    assert same(jax.jit(digest_pages)(packed.values, packed.scales), packed.digests)


def test_weights_are_odd_and_no_two_words_of_a_page_exchange_unseen():
    for weights in (row_weights(128), column_weights(256)):
        assert (weights & 1).all()
        apart = (weights[:, None] - weights)[~np.eye(len(weights), dtype=bool)]
        assert (apart & 0xFFFFFF).all(), "words of a byte that differ could exchange unseen"


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pools_travel_as_they_are_and_land_in_pools_of_either_kind(dtype):
    shape = Shape(64, 2, 1, 16)
    pools = [quantize_pages(pool, jnp.dtype(dtype)) for pool in make_pools(shape)]
    packed = PACK(pools, FROM)
    assert same(packed.digests, reference.digest_pages(packed.values, packed.scales))
    empty = [QuantizedPages(*map(jnp.zeros_like, pool)) for pool in pools]
    written, digests = UNPACK(empty, packed, TO)
    assert same(digests, packed.digests)
    floats, _ = UNPACK(make_pools(shape, seed=1), packed, TO)
    for source, pool, numbers in zip(pools, written, floats, strict=True):
        sent, got = (QuantizedPages(each.values[ids], each.scales[ids]) for each, ids in ((source, FROM), (pool, TO)))
        assert same(sent, got)
        scales = sent.scales.reshape(*sent.values.shape[:4], 1)
        assert same(numbers[TO], sent.values.astype(jnp.float32) * scales)


@pytest.mark.parametrize(("wire", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_a_quantised_wire_lands_in_quantised_pools_without_a_second_rounding(wire, dtype):
    pools = make_pools(Shape(64, 2, 1, 16))
    packed = PACK(pools, FROM, wire=wire)
    empty = [QuantizedPages(*map(jnp.zeros_like, quantize_pages(pool, jnp.dtype(dtype)))) for pool in pools]
    written, digests = UNPACK(empty, packed, TO)
    assert same(digests, packed.digests)
    assert packed.scales is not None
    assert same(jnp.stack([pool.scales[TO] for pool in written]), packed.scales)
    values = np.stack([np.asarray(pool.values[TO]) for pool in written])
    assert np.array_equal(values.view(np.uint8), np.asarray(packed.values).view(np.uint8))


def test_digests_may_be_left_out():
    pools = make_pools(SMALL)
    for wire in WIRES:
        packed = PACK(pools, FROM, wire=wire, digests=False)
        assert packed.digests is None
        assert same(packed[:2], PACK(pools, FROM, wire=wire)[:2])
        written, digests = UNPACK(pools, packed, TO, digests=False)
        assert digests is None
        assert same(written, UNPACK(pools, packed, TO)[0])


def test_wire_error_is_what_a_round_trip_loses():
    pools = make_pools(FAVOURITE)
    kept = TO != 0
    for wire, bound in {"raw": 0.0, "int8": 0.02, "fp8": 0.05, "int4": 0.2}.items():
        written, _ = UNPACK(pools, PACK(pools, FROM, wire=wire), TO)
        got = np.asarray(WIRE_ERROR(pools, FROM, wire=wire))
        for layer, (sent, received) in enumerate(zip(pools, written, strict=True)):
            x, y = np.asarray(sent[FROM[kept]], np.float64), np.asarray(received[TO[kept]], np.float64)
            assert got[layer] == pytest.approx(np.sqrt(((x - y) ** 2).sum() / (x**2).sum()), rel=1e-4, abs=0)
        assert (got <= bound).all()
    assert not np.asarray(WIRE_ERROR([jnp.zeros_like(pools[0])], FROM, wire="int8")).any()


def test_donated_pools_stay_in_place():
    pools = [jnp.zeros((256, 4, 2, 16, 64)) for _ in range(LAYERS)]
    packed, ids = PACK(pools, FROM, wire="int8"), jnp.asarray(TO)
    compiled = jax.jit(unpack_kv_pages, donate_argnums=0).lower(pools, packed, ids).compile()
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    after, _ = compiled(pools, packed, ids)
    assert [pool.unsafe_buffer_pointer() for pool in after] == addresses
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**20, "a pool is copied"


def test_a_bad_argument_is_named_with_both_values():
    pools, floats, ids, to = make_pools(SMALL), jnp.zeros(5), jnp.asarray(FROM), jnp.asarray(TO)
    packed = pack_kv_pages(pools, ids, wire="int8")
    bad = [
        (lambda: pack_kv_pages([], ids), "at least one layer, got none"),
        (lambda: pack_kv_pages(pools, ids, wire="int2"), r"wire must be one of \(.*\), got 'int2'"),
        (lambda: pack_kv_pages(pools, floats), "page_ids must be int32, got float32"),
        (lambda: pack_kv_pages(pools, ids[:0]), "at least one page, got none"),
        (lambda: pack_kv_pages([pools[0], pools[1].astype("bfloat16")], ids), "float32.* and .*bfloat16"),
        (lambda: pack_kv_pages([pool[..., :7] for pool in pools], ids, wire="int4"), "even head size, got 7"),
        (lambda: pack_kv_pages([quantize_pages(pools[0], jnp.dtype("int8"))], ids, wire="fp8"), "'raw', got 'fp8'"),
        (lambda: unpack_kv_pages([], packed, to), "at least one layer, got none"),
        (lambda: unpack_kv_pages(pools, packed, to[:4]), r"must be \(2, 4, 2, 2, 4, 8\) .*got \(2, 5, 2, 2, 4, 8\)"),
        (lambda: unpack_kv_pages(pools, packed._replace(scales=None), to), "without scales .*got int8"),
        (lambda: unpack_kv_pages(pools, packed._replace(scales=floats), to), r"scales must be .*got \(5,\)"),
        (lambda: unpack_kv_pages([quantize_pages(pool, jnp.dtype("float8_e4m3fn")) for pool in pools], packed, to),
         "for float8_e4m3fn pools must be one of .*got int8"),
    ]  # fmt: skip
    for call, message in bad:
        with pytest.raises(KernelError, match=message):
            call()
