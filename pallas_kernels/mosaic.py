"""Shared code of the kernels for Hopper GPUs (Pallas Mosaic GPU): tiles that a wgmma reads, and its products.

The interpreter of jax 0.10 supports neither register layouts nor transposed operands: `InterpretedChip` replaces them
there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.quantized import QuantizedPages, stored


def mosaic_gpu() -> Any:
    """Returns Pallas' module; None if absl, which it needs, is not installed: then Triton or XLA runs."""
    try:
        return import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return None


plgpu = mosaic_gpu()
ROWS = 64  # rows of a wgmma
TILE = 64  # fewest tokens: a wgmma sums over a whole swizzle
BOX = 8  # rows of shared memory that a swizzle permutes together: copies are multiples of it
SWIZZLE_BYTES = 128
COPY_BYTES = 16  # fewest bytes of a TMA copy
SHARED_BYTES = 128  # copies to shared memory are multiples of it
MOST_OF_A_COPY = 256  # largest dimension of a copy
LINE = 128  # numbers side by side where pages are copied whole
WORDS = 4  # adjacent words per thread
BLOCK_BYTES = 220 << 10  # shared memory of a block, without barriers
ROOM_BYTES = 64 << 10  # shared memory for a head's page, so that a core fits at least three


def fits(q: Array, kv_pages: Array | QuantizedPages) -> bool:
    """Returns True if attention by this code is possible: bf16, separate K and V, whole swizzles in a row and a page,
    few enough heads. Rows of 256 would need 24 bytes more of shared memory than a block may have."""
    return not isinstance(kv_pages, QuantizedPages) and kv_pages.dtype == jnp.bfloat16 and _tiled(q, kv_pages)


def fits_widened(q: Array, kv_pages: Array | QuantizedPages) -> bool:
    """Returns True if `fits`, or if the pages hold 8-bit codes and a page's scales fill a copy."""
    if not isinstance(kv_pages, QuantizedPages):
        return fits(q, kv_pages)
    return _tiled(q, kv_pages.values) and 4 * kv_pages.values.shape[3] % SHARED_BYTES == 0


def fits_latents(q: Array, kv_pages: Array | QuantizedPages, value_size: int) -> bool:
    """Returns True if decode attention over pages of one part is possible: bf16, whole swizzles in a row and in each
    half of its V, and shared memory for rows of queries and two tiles."""
    if plgpu is None or isinstance(kv_pages, QuantizedPages) or not q.dtype == kv_pages.dtype == jnp.bfloat16:
        return False
    *_, page_size, size = kv_pages.shape
    halves = value_size % SWIZZLE_BYTES == 0 and value_size <= 2 * MOST_OF_A_COPY
    whole = size % (SWIZZLE_BYTES // 2) == 0 and page_size % BOX == 0 and page_size & page_size - 1 == 0
    return halves and whole and 2 * size * (ROWS + 2 * TILE) <= BLOCK_BYTES


def fits_latent_chunks(q: Array, kv_pages: Array | QuantizedPages, value_size: int) -> bool:
    """Returns True if prefill attention is possible too: a token's query heads are whole boxes of adjacent rows."""
    one = not isinstance(kv_pages, QuantizedPages) and kv_pages.shape[1] == 1
    return one and q.shape[1] % BOX == 0 and fits_latents(q, kv_pages, value_size)


def multiplies(x: Array, matrices: Array) -> bool:
    """Returns True if this code multiplies rows by their groups' matrices: bf16, matrices of whole tiles. The only
    condition on rows is that there are some: if their number chose the code, it would change the bits of a row."""
    whole = all(side % TILE == 0 for side in matrices.shape[1:])
    return plgpu is not None and x.shape[0] > 0 and x.dtype == matrices.dtype == jnp.bfloat16 and whole


def _tiled(q: Array, pool: Array) -> bool:
    if plgpu is None or q.dtype != jnp.bfloat16:
        return False
    _, kv_heads, parts, page_size, size = pool.shape
    whole = size % (SWIZZLE_BYTES // 2) == 0 and size <= 128 and page_size % BOX == 0 and page_size & page_size - 1 == 0
    return parts == 2 and whole and q.shape[1] // kv_heads <= ROWS


def swizzled(*shape: int) -> Any:
    """Returns the transforms of bf16 shared memory in the layout that a wgmma reads."""
    turned = plgpu.TilingTransform((BOX, SWIZZLE_BYTES // 2)), plgpu.SwizzleTransform(SWIZZLE_BYTES)
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=turned)


def swizzled_bytes(*shape: int) -> Any:
    """Returns the transforms of 8-bit codes in shared memory, laid out so that threads read adjacent codes."""
    wide = min(shape[-1], SWIZZLE_BYTES)
    return plgpu.SMEM(shape, jnp.int8, transforms=(plgpu.TilingTransform((BOX, wide)), plgpu.SwizzleTransform(wide)))


def varying_as(like: Array, array: Array) -> Array:
    """Marks `array` as varying over shards as `like` does; within a `shard_map` a Mosaic GPU kernel does not mark its
    results."""
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else array


class Chip:
    """The products as a Hopper GPU computes them."""

    @staticmethod
    def lay(array: Array, layout: Any) -> Array:
        return plgpu.layout_cast(array, layout)

    @staticmethod
    def load(place: Any, layout: Any) -> Array:
        """Loads memory that is not swizzled into a wgmma's registers."""
        return plgpu.load(place, (), layout=layout, optimized=False)

    @staticmethod
    def codes(place: Any) -> Array:
        """Loads [tokens, D] of `swizzled_bytes` into registers whose layout is a wgmma's after widening."""
        return plgpu.load(place, (), layout=plgpu.Layout.WGMMA_UPCAST_2X)

    @staticmethod
    def words(place: Any) -> Array:
        """Loads integers [lines, LINE] of any memory as i32, spread evenly over the threads."""
        found = plgpu.load(place, (), layout=plgpu.Layout.WG_STRIDED(place.shape, WORDS), optimized=False)
        return found.astype(jnp.int32)

    @staticmethod
    def logits(queries: Any, keys: Any) -> Array:
        """Multiplies [rows, D] by [tokens, D], both in shared memory."""

        def multiply(sums):
            plgpu.wgmma(sums, queries, plgpu.transpose_ref(keys, (1, 0)))
            return sums[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((queries.shape[0], keys.shape[0]), jnp.float32))

    @staticmethod
    def mixture(mixed: Array, weights: Array, values: Any) -> Array:
        """Adds to `mixed` the product of [rows, tokens] in registers and [tokens, D] in shared memory."""

        def multiply(sums):
            plgpu.wgmma(sums, weights, values)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(mixed))

    @staticmethod
    def sum_of_products(
        shape: tuple[int, int], steps: int, pair: Callable[..., Any], done: Callable[..., None], *, turned: bool
    ) -> Array:
        """Sums pair(step) over the steps, in shared memory: [rows, inputs] by [inputs, outputs], or [outputs, inputs]
        if `turned`. done(step) is called when both were read, while the next product runs."""

        def multiply(sums):
            @pl.loop(0, steps)
            def _(step):
                left, right = pair(step)
                plgpu.wgmma(sums, left, plgpu.transpose_ref(right, (1, 0)) if turned else right)
                plgpu.wgmma_wait(1)
                pl.when(step > 0)(lambda: done(step - 1))

            found = sums[...]
            done(steps - 1)
            return found

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


class InterpretedChip(Chip):
    """The products of `Chip` for the interpreter."""

    @staticmethod
    def lay(array: Array, layout: Any) -> Array:
        return array

    @staticmethod
    def load(place: Any, layout: Any) -> Array:
        return place[...]

    @staticmethod
    def codes(place: Any) -> Array:
        return place[...]

    @staticmethod
    def words(place: Any) -> Array:
        return place[...].astype(jnp.int32)

    @staticmethod
    def logits(queries: Any, keys: Any) -> Array:
        return jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)

    @staticmethod
    def mixture(mixed: Array, weights: Array, values: Any) -> Array:
        return mixed + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

    @staticmethod
    def sum_of_products(
        shape: tuple[int, int], steps: int, pair: Callable[..., Any], done: Callable[..., None], *, turned: bool
    ) -> Array:
        def multiply(step, sums):
            left, right = pair(step)
            added = jnp.dot(left[...], right[...].T if turned else right[...], preferred_element_type=jnp.float32)
            pl.when(step > 0)(lambda: done(step - 1))
            return sums + added

        sums = lax.fori_loop(0, steps, multiply, jnp.zeros(shape, jnp.float32))
        done(steps - 1)
        return sums


def chip_of(interpret: Any) -> type[Chip]:
    return InterpretedChip if interpret else Chip


def places(chip: type[Chip], shape: tuple[int, ...], axis: int) -> Array:
    """Returns i32 [rows, tokens]: the row number, or the token number, of each element of a tile of logits."""
    return chip.lay(lax.broadcasted_iota(jnp.int32, shape, axis), plgpu.Layout.WGMMA)


def per_token(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts [tokens] to [rows, tokens]."""
    return lax.broadcast_in_dim(array, shape, [1])


def per_row(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts [rows] to [rows, numbers]."""
    return lax.broadcast_in_dim(array, shape, [0])


def copies(rows: Array, kv_pages: Array | QuantizedPages) -> bool:
    """Returns True if a TMA copies rows of any dtype into this pool: rows of at least 16 bytes, no dimension above 256,
    and a token's rows a multiple of SHARED_BYTES."""
    del rows
    if plgpu is None:
        return False
    pool = stored(kv_pages)
    _, kv_heads, parts, _, size = pool.shape
    row = size * pool.dtype.itemsize
    whole = row % COPY_BYTES == 0 and kv_heads * parts * row % SHARED_BYTES == 0
    return whole and max(pool.shape[1:]) <= MOST_OF_A_COPY


def carries(rows: Array, pool: Array) -> bool:
    """Returns True if whole pages are copied between this pool and packed rows: no conversion, and a head's page
    fits."""
    if plgpu is None or rows.dtype != pool.dtype:
        return False
    numbers = prod(pool.shape[2:])
    short = numbers % LINE == 0 and numbers // LINE <= MOST_OF_A_COPY
    return short and numbers * pool.dtype.itemsize <= ROOM_BYTES


def in_place(
    body: Callable[..., None],
    given: Sequence[Array],
    held: Sequence[Array],
    *,
    grid: dict[str, int],
    scratch: Sequence[Any],
    name: str,
    interpret: Any,
) -> list[Array]:
    """Returns `held` after `body(refs of given, refs of held, *scratch)` ran at every grid point, updated in place if
    the caller's jit donates it."""
    refs = [jax.new_ref(array, memory_space=plgpu.GMEM) for array in held]

    def whole(*arguments: Any) -> None:
        pl.run_scoped(partial(body, arguments[: len(given)], arguments[len(given) :]), *scratch)

    pl.kernel(
        whole,
        out_type=(),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or False,
        name=name,
    )(*given, *refs)
    return [jax.freeze(ref) for ref in refs]
