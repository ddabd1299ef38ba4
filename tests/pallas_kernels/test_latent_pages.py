"""Pages of one part (latents) through every operation and variant, against the oracle for pages of two."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, pack_kv_pages, paged_attention, prefill_attention, write_kv_pages
from pallas_kernels.pack_kv_pages import tpu as pack_tpu
from pallas_kernels.paged_attention import gpu as decode_gpu
from pallas_kernels.paged_attention import reference as decode_reference
from pallas_kernels.paged_attention import tpu as decode_tpu
from pallas_kernels.prefill_attention import gpu as prefill_gpu
from pallas_kernels.prefill_attention import reference as prefill_reference
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.unpack_kv_pages import tpu as unpack_tpu
from pallas_kernels.write_kv_pages import reference as write_reference
from pallas_kernels.write_kv_pages import tpu as write_tpu
from tests.pallas_kernels.latents import (
    ALL_OF_A_ROW,
    DEEPSEEK_V3,
    DEEPSEEK_V3_TP8,
    ODD,
    SMALL,
    TWO_HEADS,
    LatentShape,
    pool_of_one_part,
    queries,
)
from tests.pallas_kernels.shapes import assert_close, by_arrays, decode_oracle, prefill_oracle, rest_slow, stored_pool
from tests.pallas_kernels.test_pack_kv_pages import (
    FROM,
    PACK,
    PACK_REFERENCE,
    TO,
    UNPACK,
    UNPACK_REFERENCE,
    WIRE_ERROR,
    same,
)
from tests.pallas_kernels.tpu_modes import EAGER, FAST, LATE, RACE

BASIC = {"window": None, "soft_cap": None}
DECODE = {
    "reference": by_arrays(decode_reference.paged_attention),
    "tpu": by_arrays(decode_tpu.paged_attention, interpret=FAST, cores=2),
    "tpu-late": by_arrays(decode_tpu.paged_attention, interpret=LATE, cores=2, block_pages=2),
    "tpu-eager": by_arrays(decode_tpu.paged_attention, interpret=EAGER, block_pages=2),
    "gpu": by_arrays(decode_gpu.paged_attention, interpret=True),
}
PREFILL = {
    "reference": by_arrays(prefill_reference.prefill_attention),
    "tpu": by_arrays(prefill_tpu.prefill_attention, interpret=FAST),
    "tpu-late": by_arrays(prefill_tpu.prefill_attention, interpret=LATE, cores=2, block_pages=2, block_rows=16),
    "tpu-eager": by_arrays(prefill_tpu.prefill_attention, interpret=EAGER, block_pages=2, block_rows=16),
    "gpu": by_arrays(prefill_gpu.prefill_attention, interpret=True),
}
SINKS = {"window": 20, "soft_cap": 3.0, "sinks": True, "scale": 0.2}
# (variant, shape, dtype of the queries, dtype of the pool, options): the suite's first, then the slow ones
ROWS = [
    ("xla", SMALL, "float32", "float32", {}),
    ("xla", TWO_HEADS, "float32", "int8", SINKS),
    ("tpu-late", SMALL, "float32", "float32", {}),
    ("gpu", ODD, "float32", "bfloat16", {}),
    ("reference", SMALL, "float32", "float32", SINKS),
    ("xla", DEEPSEEK_V3_TP8, "bfloat16", "bfloat16", {"scale": 0.1352}),
    ("xla", ALL_OF_A_ROW, "float32", "float8_e4m3fn", {}),
    ("tpu", DEEPSEEK_V3_TP8, "bfloat16", "bfloat16", {"scale": 0.1352}),
    ("tpu", DEEPSEEK_V3, "bfloat16", "float8_e4m3fn", {"scale": 0.1352}),
    ("tpu", TWO_HEADS, "float32", "int8", SINKS),
    ("tpu-eager", ODD, "bfloat16", "int8", SINKS),
    ("gpu", DEEPSEEK_V3, "bfloat16", "bfloat16", {"scale": 0.1352}),
    ("gpu", DEEPSEEK_V3_TP8, "bfloat16", "int8", {"scale": 0.1352}),
    ("gpu", TWO_HEADS, "float32", "float8_e4m3fn", SINKS),
    ("gpu", ALL_OF_A_ROW, "float32", "float32", {}),
]


def options_of(options: dict, shape: LatentShape) -> dict:
    sinks = {"sinks": np.linspace(-2, 3, shape.heads).astype(np.float32)} if options.get("sinks") else {}
    return options | sinks


def run(variants: dict, dispatched, name: str, shape: LatentShape, arrays: tuple, options: dict):
    """`dispatched`, or a variant below it, which takes sinks by place and every option by name."""
    if name == "xla":
        return jax.jit(partial(dispatched, value_size=shape.value_size, **options))(*arrays)
    sinks = options.get("sinks")
    named = {"scale": shape.size**-0.5, **BASIC} | {key: value for key, value in options.items() if key != "sinks"}
    return jax.jit(partial(variants[name], value_size=shape.value_size, **named))(*arrays, sinks)


@pytest.mark.parametrize(("name", "shape", "q_dtype", "dtype", "options"), rest_slow(ROWS, 5), ids=str)
def test_decode_attends_to_latents(name, shape, q_dtype, dtype, options, capsys):
    lengths = np.asarray((0, 1, shape.page_size, 0, 3 * shape.page_size + 5, 40), np.int32)
    pool, table, plain = pool_of_one_part(shape, lengths, dtype)
    q, options = jnp.asarray(queries(shape, len(lengths)), q_dtype), options_of(options, shape)
    got = run(DECODE, paged_attention, name, shape, (q, pool, table, lengths), options)
    assert (got.shape, got.dtype) == ((*q.shape[:2], shape.value_size), q.dtype)
    want = decode_oracle(np.asarray(q, np.float32), plain, np.asarray(table), lengths, **options)
    assert_close(got, want[..., : shape.value_size], q_dtype)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "shape", "q_dtype", "dtype", "options"), rest_slow(ROWS, 5), ids=str)
def test_prefill_attends_to_latents(name, shape, q_dtype, dtype, options, capsys):
    rows, held = (0, 1, 17, 0, 1, 9), (0, 1, shape.page_size + 3, 20, 2 * shape.page_size + 1, 9)
    kv_lens, spans = np.asarray(held, np.int32), np.cumsum([0, *rows]).astype(np.int32)
    pool, table, plain = pool_of_one_part(shape, held, dtype)
    q, options = jnp.asarray(queries(shape, int(spans[-1]) + 3), q_dtype), options_of(options, shape)
    got = run(PREFILL, prefill_attention, name, shape, (q, pool, table, kv_lens, spans), options)
    assert (got.shape, got.dtype) == ((*q.shape[:2], shape.value_size), q.dtype)
    want = prefill_oracle(np.asarray(q, np.float32), plain, np.asarray(table), kv_lens, spans, **options)
    assert_close(got, want[..., : shape.value_size], q_dtype)
    assert RACE not in capsys.readouterr().out


WRITE = {
    "xla": write_kv_pages,
    "tpu": partial(write_tpu.write_kv_pages, interpret=FAST),
    "tpu-late": partial(write_tpu.write_kv_pages, interpret=LATE, block_rows=8),
    "tpu-eager": partial(write_tpu.write_kv_pages, interpret=EAGER, block_rows=8),
}


@pytest.mark.parametrize(
    ("name", "shape", "q_dtype", "dtype", "_"), rest_slow([row for row in ROWS if row[0] in WRITE], 3), ids=str
)
def test_a_latent_is_written_as_the_definition_writes_it(name, shape, q_dtype, dtype, _, capsys):
    pool, _, _ = pool_of_one_part(shape, (7 * shape.page_size,), dtype)
    rng = np.random.default_rng(1)
    k = jnp.asarray(rng.standard_normal((30, shape.kv_heads, shape.size)), q_dtype)
    places = rng.permutation(np.arange(shape.page_size, 7 * shape.page_size))[:30].astype(np.int32)
    pages, offsets = places // shape.page_size, places % shape.page_size
    pages[::7] = 0
    got = jax.jit(WRITE[name])(pool, k, None, pages, offsets)
    want = jax.jit(write_reference.write_kv_pages)(pool, k, None, pages, offsets)
    assert same(jax.tree.map(lambda part: part[1:], got), jax.tree.map(lambda part: part[1:], want))
    assert RACE not in capsys.readouterr().out


def make_pools(shape: LatentShape, dtype: str, seed: int = 0) -> list[jax.Array]:
    """Two layers of nine pages, rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((2, 9, shape.kv_heads, 1, shape.page_size, shape.size))
    numbers *= 10.0 ** rng.integers(-6, 6, (*numbers.shape[:-1], 1))
    numbers[:, 4, 0, 0, 0] = 0
    return [jnp.asarray(pool, jnp.float32).astype(dtype) for pool in numbers]


PACKERS = {
    "xla": (PACK, lambda wire: UNPACK),
    "tpu": (
        partial(pack_tpu.pack_kv_pages, interpret=LATE, block_pages=2),
        lambda wire: partial(unpack_tpu.unpack_kv_pages, wire=wire, interpret=LATE, block_pages=2),
    ),
}
WIRES = [
    ("xla", SMALL, "float32", "raw", "float32"),
    ("xla", DEEPSEEK_V3, "bfloat16", "int4", "float32"),
    ("tpu", SMALL, "float32", "int8", "bfloat16"),
    ("xla", ODD, "bfloat16", "fp8", "float32"),
    ("tpu", DEEPSEEK_V3, "bfloat16", "fp8", "bfloat16"),
    ("tpu", ODD, "bfloat16", "int4", "float32"),
]


@pytest.mark.parametrize(("name", "shape", "source", "wire", "dtype"), rest_slow(WIRES, 3), ids=str)
def test_latents_travel_as_the_definition_says_to_the_bit(name, shape, source, wire, dtype):
    (pack, unpack), pools, held = PACKERS[name], make_pools(shape, source), make_pools(shape, dtype, seed=1)
    packed = pack(pools, jnp.asarray(FROM), wire=wire)
    assert packed.values.shape[3] == 1
    assert same(packed, PACK_REFERENCE(pools, FROM, wire=wire))
    written, digests = unpack(wire)(held, packed._replace(digests=None), jnp.asarray(TO))
    wanted, _ = UNPACK_REFERENCE(held, packed, TO, wire=wire)
    assert same(digests, packed.digests)
    assert same([pool[1:] for pool in written], [pool[1:] for pool in wanted])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_latents_travel_with_their_scales(dtype):
    pools = [stored_pool(np.asarray(pool), dtype) for pool in make_pools(SMALL, "float32")]
    held = [stored_pool(np.asarray(pool), dtype) for pool in make_pools(SMALL, "float32", seed=1)]
    packed = PACK(pools, FROM)
    assert packed.scales.shape == (2, len(FROM), 1, SMALL.page_size)
    written, digests = UNPACK(held, packed, TO)
    kept = TO != 0
    assert same(digests, packed.digests)
    sent, arrived = (
        [jax.tree.map(lambda leaf, at=at: leaf[at[kept]], pool) for pool in each]
        for each, at in ((pools, FROM), (written, TO))
    )
    assert same(sent, arrived)


def test_exchanged_tokens_of_a_latent_change_its_digest():
    pools = make_pools(SMALL, "float32")
    exchanged = [pool.at[7, 0, 0, :2].set(pool[7, 0, 0, 1::-1]) for pool in pools]
    one, other = (PACK(each, FROM).digests for each in (pools, exchanged))
    assert np.array_equal(np.asarray(one != other).any(axis=(0, 2)), FROM == 7)


def test_what_a_wire_costs_latents_is_measured():
    lost = WIRE_ERROR(make_pools(SMALL, "float32"), FROM, wire="int8")
    assert np.all((np.asarray(lost) > 0) & (np.asarray(lost) < 0.01))


POOL, TWO = jnp.zeros((3, 1, 1, 16, 40)), jnp.zeros((3, 1, 2, 16, 40))
ROW, INTS = jnp.zeros((2, 1, 40)), jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize(
    ("pool", "value_size", "message"),
    [
        (POOL, None, r"value_size of kv_pages of one part must be in \[1, 40\], got None"),
        (POOL, 41, r"\[1, 40\], got 41"),
        (POOL, 0, r"\[1, 40\], got 0"),
        (TWO, 32, "value_size is for kv_pages of one part, got 32 and 2 parts"),
        (jnp.zeros((3, 1, 3, 16, 40)), 32, r"\[P, Hkv, 2 or 1, page_size, D\], got \(3, 1, 3, 16, 40\)"),
    ],
)
def test_a_value_size_that_does_not_fit_the_pages_is_named(pool, value_size, message):
    with pytest.raises(KernelError, match=message):
        paged_attention(ROW, pool, jnp.zeros((2, 1), jnp.int32), INTS, value_size=value_size)
    with pytest.raises(KernelError, match=message):
        spans = jnp.zeros(3, jnp.int32)
        prefill_attention(ROW, pool, jnp.zeros((2, 1), jnp.int32), INTS, spans, value_size=value_size)


@pytest.mark.parametrize(("pool", "v"), [(POOL, ROW), (TWO, None)])
def test_v_is_given_for_pages_of_two_parts_alone(pool, v):
    with pytest.raises(KernelError, match=f"v must be .* for kv_pages of {pool.shape[2]} parts"):
        write_kv_pages(pool, ROW, v, INTS, INTS)


def test_pools_of_other_parts_are_not_packed_together():
    with pytest.raises(KernelError, match="one shape and dtype"):
        pack_kv_pages([POOL, TWO], INTS)
