"""The format of KV in transfer: the layout of a packed page, and arithmetic that all implementations share bit by bit.

A row is one token's K or V of one head. Quantised rows are symmetric, each with its own f32 scale (as KIVI's per-token
values, Liu et al. 2024, section 3). The functions on numbers below are elementwise, in f32 and 32-bit integers, without
conversions whose rounding depends on the hardware, so kernels call them directly. There is one division, a row's
factor: if it is not rounded exactly, a code may be the next one. Digests cover the transferred bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.checks import FLOATS, check_ints, check_pool, require
from pallas_kernels.quantized import QuantizedPages

WIRES = ("raw", "int8", "fp8", "int4")
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}  # largest number that a code represents
STORED = {"int8": jnp.int8, "fp8": jnp.uint8, "int4": jnp.uint8}  # fp8 is sent as bits: old chips lack it
CODES = {  # dtypes that may hold a wire's codes, or those of a quantised pool
    "int8": ("int8",),
    "fp8": ("uint8", "float8_e4m3fn"),
    "float8_e4m3fn": ("uint8", "float8_e4m3fn"),
    "int4": ("uint8",),
}
TINY = 2.0**-100  # lower bound of a row's largest magnitude: no intermediate is subnormal or infinite
ROUNDER = 1.5 * 2.0**23  # added to a small number, the sum's last bits are that number as an integer, ties to even
HALF_ROUNDER = 2.0**14  # the same for multiples of 2**-9, the distance of fp8's subnormal numbers

Pool = Array | QuantizedPages


class PackedPages(NamedTuple):
    """N pages of L layers, contiguous; the bytes do not depend on the pages and devices of either end."""

    values: Array  # [L, N, Hkv, C, page_size, D'], D' = D, or D / 2 for int4; the pool's dtype, int8 or uint8
    scales: Array | None  # f32 [L, N, Hkv, C * page_size], K's and then V's; None for raw float pages
    digests: Array | None  # u32 [L, N, Hkv], see `pack_kv_pages.reference.digest_pages`; None: not computed


def check_pools(pools: Sequence[Pool], page_ids: Array, wire: str) -> None:
    """Raises unless there is a pool, all have one shape and dtype, `page_ids` is i32[N], and the wire can carry
    them."""
    require(wire in WIRES, f"wire must be one of {WIRES}, got {wire!r}")
    require(len(pools) > 0, "pools must hold at least one layer, got none")
    kinds = [kind_of(pool) for pool in pools]
    check_pool(pools[0])
    other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
    require(other == kinds[0], f"pools must be of one shape and dtype, got {kinds[0]} and {other}")
    (*_, size), dtype = kinds[0]
    fits = wire == "raw" or dtype in FLOATS
    require(fits, f"a pool of {dtype} is quantised already: wire must be 'raw', got {wire!r}")
    require(wire != "int4" or size % 2 == 0, f"wire 'int4' needs an even head size, got {size}")
    check_ints("page_ids", page_ids, page_ids.shape[:1])
    require(page_ids.size > 0, "page_ids must name at least one page, got none")


def check_packed(pools: Sequence[Pool], packed: PackedPages, page_ids: Array) -> str:
    """Raises unless `packed` has a page for each id, of a kind that these pools can take; returns the wire it came
    over."""
    values, scales, _ = packed
    require(len(pools) > 0, "pools must hold at least one layer, got none")
    wire = wire_of(pools[0], packed)
    check_pools(pools, page_ids, wire)
    shape, stored = kind_of(pools[0])
    want = (len(pools), page_ids.shape[0], *shape[1:4], packed_size(shape[4], wire))
    require(values.shape == want, f"packed values must be {want} for these pools, got {values.shape}")
    given = values.dtype.name
    if wire == "raw" and stored in FLOATS:
        require(given in FLOATS, f"packed values without scales must be one of {FLOATS}, got {given}")
        return wire
    accepted = CODES.get(stored if wire == "raw" else wire, ())
    require(given in accepted, f"packed values for {stored} pools must be one of {accepted} here, got {given}")
    rows, got = (*want[:3], want[3] * want[4]), None if scales is None else scales.shape
    require(got == rows, f"packed scales must be {rows}, got {got}")
    return wire


def wire_of(pool: Pool, packed: PackedPages) -> str:
    """Returns how to read `packed` for this pool: "raw" if its numbers are stored in the pool unchanged."""
    if packed.scales is None or isinstance(pool, QuantizedPages):
        return "raw"
    if packed.values.dtype == jnp.int8:
        return "int8"
    return "fp8" if packed.values.shape[-1] == pool.shape[-1] else "int4"


def kind_of(pool: Pool) -> tuple[tuple[int, ...], str]:
    values = pool.values if isinstance(pool, QuantizedPages) else pool
    return values.shape, values.dtype.name


def packed_size(size: int, wire: str) -> int:
    """Returns D' for rows of D numbers."""
    return size // 2 if wire == "int4" else size


def odd_weights(count: int, seed: int) -> np.ndarray:
    """Returns u32[count], all odd: the finaliser of MurmurHash3 (Appleby 2011) over the positions."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return (x ^ (x >> np.uint32(16))) | np.uint32(1)


def row_weights(rows: int) -> np.ndarray:
    """Returns u32[rows] for a page of one head: the weights of K's rows and then of V's."""
    return odd_weights(rows, 0x2545F491)


def column_weights(size: int) -> np.ndarray:
    """Returns u32[size + 1], the weights of the words of a row, its scale last."""
    return odd_weights(size + 1, 0x9E3779B9)


def page_weights(rows: int, size: int) -> np.ndarray:
    """Returns u32[rows, size], the weights of the words of a page of one head, without its scales."""
    return row_weights(rows)[:, None] * column_weights(size)[:-1]


def scale_weights(rows: int, size: int) -> np.ndarray:
    """Returns u32[rows], the weights of the scales of a page of one head whose rows have `size` words."""
    return row_weights(rows) * column_weights(size)[-1]


def over(weights: np.ndarray, words: Array) -> np.ndarray:
    """Adds leading dimensions of 1 to `weights`, up to the dimensions of `words`."""
    return weights.reshape((1,) * (words.ndim - weights.ndim) + weights.shape)


def words_of(array: Array) -> Array:
    """Returns u32 of the array's shape, one word per element, different if the bits differ. High bits are folded into
    the low ones: f32 numbers that were once bf16 end in zeros, and a product keeps its factor's trailing zeros."""
    bits = bits_of(array).astype(jnp.uint32)
    return bits ^ (bits >> 16) if array.dtype.itemsize == 4 else bits


def fold_scales(scales: Array, size: int) -> Array:
    """Returns the part of a digest that scales f32 [..., C * page_size] of rows of `size` words add, u32 [...]."""
    weights = scale_weights(scales.shape[-1], size)
    return jnp.sum(words_of(scales) * over(weights, scales), axis=-1, dtype=jnp.uint32)


def bits_of(array: Array) -> Array:
    """Returns the same bits as unsigned integers."""
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{array.dtype.itemsize * 8}"))


def floats_of(array: Array, dtype: jnp.dtype) -> Array:
    """Converts numbers of `dtype`, or their bits, to f32."""
    return lax.bitcast_convert_type(array, dtype).astype(jnp.float32)


def quantise(rows: Array, wire: str) -> tuple[Array, Array]:
    """Quantises f32 [..., D] to codes i32 [..., D'] and scales f32 [...]."""
    scales, factors = scale_of(jnp.max(jnp.abs(rows), axis=-1), wire)
    codes = [encode(part, factors[..., None], wire) for part in jnp.split(rows, 2 if wire == "int4" else 1, axis=-1)]
    return join_nibbles(*codes) if wire == "int4" else codes[0], scales


def dequantise(codes: Array, scales: Array, wire: str) -> Array:
    """Converts codes i32 [..., D'] and scales f32 [...] to f32 [..., D]."""
    if wire == "int4":
        return jnp.concatenate(cut_nibbles(codes), axis=-1).astype(jnp.float32) * scales[..., None]
    return (decode_e4m3(codes) if wire == "fp8" else codes.astype(jnp.float32)) * scales[..., None]


def scale_of(top: Array, wire: str) -> tuple[Array, Array]:
    """Returns (a row's scale, the factor of its numbers) for the row's largest magnitude, f32."""
    top = jnp.maximum(top, TINY)
    return top * np.float32(1 / LARGEST[wire]), LARGEST[wire] / top


def encode(numbers: Array, factor: Array, wire: str) -> Array:
    """Converts f32 numbers and their rows' factors to i32 codes: -127..127, 0..255 (e4m3 bits) or -7..7."""
    # The clip also keeps a compiler from fusing the product with the rounder's sum, which would round differently.
    scaled = jnp.clip(numbers * factor, -LARGEST[wire], LARGEST[wire])
    return encode_e4m3(scaled) if wire == "fp8" else rounded(scaled)


def rounded(numbers: Array) -> Array:
    """Rounds f32 of magnitudes under 2**22 to i32, ties to even."""
    bits = lax.bitcast_convert_type(numbers + np.float32(ROUNDER), jnp.int32)
    return bits - np.float32(ROUNDER).view(np.int32)


def encode_e4m3(numbers: Array) -> Array:
    """Converts f32 within +-448 to i32 in 0..255, the bits of float8_e4m3fn, ties to even."""
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    raised = lax.bitcast_convert_type(size, jnp.float32) + np.float32(HALF_ROUNDER)
    small = lax.bitcast_convert_type(raised, jnp.int32) - np.float32(HALF_ROUNDER).view(np.int32)
    return jnp.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


def decode_e4m3(codes: Array) -> Array:
    """Converts i32 in 0..255, bits of float8_e4m3fn, to f32."""
    size = codes & 0x7F
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    number = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(codes >= 0x80, -number, number)


def join_nibbles(first: Array, second: Array) -> Array:
    """Joins i32 codes in -7..7 to i32 in 0..255, the first in the low nibble."""
    return (first & 0xF) | ((second & 0xF) << 4)


def cut_nibbles(codes: Array) -> tuple[Array, Array]:
    """Splits i32 in 0..255 into two i32 in -8..7."""
    return (codes << 28) >> 28, (codes << 24) >> 28
