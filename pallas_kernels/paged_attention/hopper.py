"""Decode attention on Hopper GPUs (Pallas Mosaic GPU): pages are loaded by TMA, both products are wgmma.

The work is split as in the Triton kernel: one warpgroup per part of a slot and KV head, and the same kernel joins a
slot's parts. The query heads of a KV head are the first rows of the 64 that a wgmma takes. The other rows hold stale
shared memory and are never stored. A draft's rows follow those of the token before it (`TileSchedule`). A ring of
tiles is in flight: a tile's pages are two copies each, K and V, that arrive at one barrier, and two more for their
scales if they are quantised.

The split of a row's tokens into parts follows from its own length. Rows of a slot with the same split, nearly always
all, are computed over the same tiles together. Rows with another split are computed in another run, in which the other
rows see no token. A tile of which a row sees no token leaves its sums unchanged, bit by bit, so a row has the same bits
with any draft beside it.

In attention over latents all query heads read one row of K, whose beginning is V as well (DeepSeek-V2, section 2.1.2):
heads fill the rows of a wgmma. There is one block per part of a slot and 64 query heads. A third warpgroup loads tiles
of latents by TMA, each once for logits and mixture. The other two mix half of V each, as all of it would take every
register that a thread may have. Both compute all logits. Logits, with 576 numbers against 256, are the greater part of
the products. The products of both together (by the data sheet 3,300 cycles per tile of 64 tokens) end before the next
tile is read (5,100), and neither waits for the other.

Compiled for an H100, no register is spilled and rows of 576 take 216 KiB of shared memory. No run has been measured.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.hopper_attention import (
    FEW_REGISTERS,
    HALVES,
    REGISTERS,
    STAGES,
    Pages,
    PoolTensors,
    TileRing,
    bring,
    mix_half,
)
from pallas_kernels.mosaic import BOX, ROWS, TILE, Chip, per_row, per_token, places, plgpu
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.gpu import MAX_PARTS, PART_NUMBERS, Blocks, blocks_of
from pallas_kernels.quantized import QuantizedPages, stored
from pallas_kernels.triton_attention import LOG2_E, NEVER, AttentionParams
from pallas_kernels.tuning import MOSAIC, tuned
from pallas_kernels.wire_format import decode_e4m3

BLOCKS = 4 * 132  # blocks of a call: four per core of an H100, which runs one at a time


class KVTileRing(NamedTuple):
    """A ring of tiles in shared memory. The last three fields are for codes only."""

    k: Any  # [stages, tile, D]
    v: Any
    arrived: Any  # one barrier per stage
    scales: Any = None  # f32 [stages, 2, tile]
    wide_k: Any = None  # bf16 [tile, D], the current tile
    wide_v: Any = None

    @staticmethod
    def scratch(stages: int, tile: int, page_size: int, size: int, *, codes: bool) -> list[Any]:
        pages = max(1, tile // page_size)
        arrived = plgpu.Barrier(num_arrivals=(4 if codes else 2) * pages, num_barriers=stages)
        if not codes:
            tiles = mosaic.swizzled(stages, tile, size)
            return [tiles, tiles, arrived]
        tiles, wide = mosaic.swizzled_bytes(stages, tile, size), mosaic.swizzled(tile, size)
        return [tiles, tiles, arrived, plgpu.SMEM((stages, 2, tile), jnp.float32), wide, wide]

    def fetch(self, pool: PoolTensors, page: Array, head: Array, offset: Array, seat: Any, page_size: int) -> None:
        """Starts the copy of tokens from `offset` of a page; seat: (stage, first token in the tile, tokens)."""
        stage, at, size = seat
        kv_heads = lax.axis_size("heads")
        row = (page * kv_heads + head) * 2 * page_size + offset
        for which, room in enumerate((self.k, self.v)):
            held = pool.numbers.at[pl.ds(pl.multiple_of(row + which * page_size, BOX), size)]
            plgpu.copy_gmem_to_smem(held, room.at[stage, pl.ds(at, size)], self.arrived.at[stage])
            if pool.scales is not None:
                scales = pool.scales.at[page, head, pl.ds(pl.multiple_of(which * page_size + offset, BOX), size)]
                place = self.scales.at[stage, which, pl.ds(at, size)]
                plgpu.copy_gmem_to_smem(scales, place, self.arrived.at[stage])

    def widen(self, stage: Array, chip: type[Chip], *, e4m3: bool) -> tuple[Any, Any]:
        """Returns K and V of a tile that arrived, in the layout that a wgmma reads."""
        if self.scales is None:
            return self.k.at[stage], self.v.at[stage]
        for room, wide in ((self.k, self.wide_k), (self.v, self.wide_v)):
            codes = chip.codes(room.at[stage])
            numbers = decode_e4m3(codes.astype(jnp.int32) & 0xFF) if e4m3 else codes
            wide[...] = chip.lay(numbers.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        return self.wide_k, self.wide_v

    def scaled(self, array: Array, stage: Array, which: int, chip: type[Chip]) -> Array:
        """Returns [rows, tokens] times the scales of K (0) or V (1)."""
        if self.scales is None:
            return array
        factors = chip.load(self.scales.at[stage, which], plgpu.Layout.WGMMA.reduce(0))
        return array * per_token(factors, array.shape)


def side_by_side(q: Array, kv_heads: int, times: int, rows: int) -> Array:
    """Reorders [slots * times, Hq, D] to [slots, kv_heads, rows, D]: a KV head's query heads, token after token."""
    _, heads, size = q.shape
    grouped = q.reshape(-1, times, kv_heads, heads // kv_heads, size).swapaxes(1, 2)
    grouped = grouped.reshape(-1, kv_heads, times * heads // kv_heads, size)
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - grouped.shape[2]), (0, 0)))


def rows_of(count: int) -> int:
    """Returns the rows needed for `count` rows: whole boxes, or whole wgmmas if one is too few."""
    return pl.cdiv(count, ROWS) * ROWS if count > ROWS else pl.cdiv(count, BOX) * BOX


def visible_rows(lengths: Array, times: int, groups: int, window: int | None, blocks: Blocks) -> Array:
    """Returns i32 [slots, 2, ROWS]: the tokens that each row of a wgmma sees, and the row of its slot with the same
    split. With one row per slot it is zeros and not used."""
    if times == 1:
        return jnp.zeros((1, 2, ROWS), jnp.int32)
    of_slots = lengths.reshape(-1, times)
    _, first, tiles, _ = gpu.cut(of_slots, window, blocks)
    first, tiles = (jnp.broadcast_to(each, of_slots.shape) for each in (first, tiles))
    alike = (first[:, 1:] == first[:, :-1]) & (tiles[:, 1:] == tiles[:, :-1])
    runs = jnp.where(jnp.pad(alike, ((0, 0), (1, 0))), 0, jnp.arange(times))
    told = jnp.stack([of_slots, lax.cummax(runs, axis=1)], axis=1).astype(jnp.int32)
    told = jnp.repeat(told, groups, axis=2)[:, :, :ROWS]
    return jnp.pad(told, ((0, 0), (0, 0), (0, ROWS - told.shape[2])))


class TileSchedule(NamedTuple):
    """The tiles that a part of a slot is computed over, run after run."""

    firsts: list[Any]  # first tile of each run
    ends: list[Any]  # steps until each run's end
    longest: Any  # most tokens of the slot's rows
    start: Any  # the first token that a row sees; None if rows differ

    @staticmethod
    def of(lengths: list[Any], part: Array, window: int | None, blocks: Blocks) -> "TileSchedule":
        cuts = [gpu.cut(length, window, blocks) for length in lengths]
        firsts = [first + part * tiles for _, first, tiles, _ in cuts]
        stops = [
            jnp.minimum(first + tiles, pl.cdiv(length, blocks.tile))
            for first, (_, _, tiles, _), length in zip(firsts, cuts, lengths, strict=True)
        ]
        alike = [jnp.bool_(False)]
        alike += [(one[1] == next_[1]) & (one[2] == next_[2]) for one, next_ in pairwise(cuts)]
        ends, longest, done = [], lengths[0], jnp.int32(0)
        for at in reversed(range(len(lengths) - 1)):
            stops[at] = jnp.where(alike[at + 1], jnp.maximum(stops[at], stops[at + 1]), stops[at])
        for length, first, stop, joined in zip(lengths, firsts, stops, alike, strict=True):
            longest = jnp.maximum(longest, length)
            done = done + jnp.where(joined, 0, jnp.maximum(stop - first, 0))
            ends.append(done)
        return TileSchedule(firsts, ends, longest, cuts[0][0] if len(lengths) == 1 else None)

    @property
    def steps(self) -> Array:
        return self.ends[-1]

    def at(self, step: Array) -> tuple[Array, Array]:
        """Returns the tile of a step, and the row whose run it is."""
        tile, run, begun = self.firsts[0] + step, jnp.int32(0), self.ends[0]
        for index in range(1, len(self.firsts)):
            later = step >= begun
            tile = jnp.where(later, self.firsts[index] + step - begun, tile)
            run, begun = jnp.where(later, index, run), self.ends[index]
        return tile, run

    def seen(self, token: Array, run: Array, told: Any, window: int | None, chip: type[Chip]) -> Array:
        """Returns bool [rows, tokens]: the visible ones. told: i32 [2, ROWS] of `visible_rows`."""
        if len(self.firsts) == 1:
            return (token < self.longest) & (token >= self.start)
        lengths, runs = (chip.load(told.at[which], plgpu.Layout.WGMMA.reduce(1)) for which in range(2))
        seen = (token < per_row(lengths, token.shape)) & (per_row(runs, token.shape) == run)
        return seen if window is None else seen & (token >= per_row(lengths - window, token.shape))


def choose_blocks(q: Array, kv_pages: Array | QuantizedPages) -> Blocks:
    """Returns the tuned choice, or parts as for Triton, of the smallest tiles: three for a head of 128 are 96 KiB."""
    found = tuned("paged_attention", q, kv_pages)
    if found.get(MOSAIC):
        return blocks_of(found)
    parts = gpu.choose_blocks(q, kv_pages, ((0, q.shape[2]),))
    return parts._replace(tile=TILE, warps=4, stages=3)


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def paged_attention(
    args: PagedAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """Computes `pallas_kernels.paged_attention` for arguments of `mosaic.fits_widened` or `mosaic.fits_latents`.
    interpret: the interpreter's parameters."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    if args.value_size is not None:
        return attend_latents(args, blocks=blocks, interpret=interpret)
    interpret = interpret or None
    (slots, heads, size), times = (page_table.shape[0], *q.shape[1:]), q.shape[0] // page_table.shape[0]
    _, kv_heads, _, page_size, _ = stored(kv_pages).shape
    held, kind = PoolTensors.of(kv_pages), stored(kv_pages).dtype.name if isinstance(kv_pages, QuantizedPages) else None
    a_row_each: Any = jax.ShapeDtypeStruct((slots, heads, size), q.dtype)
    blocks = blocks or choose_blocks(a_row_each, kv_pages)
    parts = min(blocks.parts, pl.cdiv(page_table.shape[1] * page_size, blocks.tiles * blocks.tile))
    groups = heads // kv_heads
    if times * groups > ROWS:
        page_table, slots, times = jnp.repeat(page_table, times, axis=0), q.shape[0], 1
    rows = rows_of(times * groups)
    told = visible_rows(lengths, times, groups, args.window, blocks)
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    sums = shape((slots * parts * kv_heads * rows,), jnp.float32)
    rule = AttentionParams(args.scale, args.window, args.soft_cap, ((0, size),), None)
    top, total, mixed = plgpu.kernel(
        partial(attend_part, blocks=blocks, rule=rule, page_size=page_size, chip=mosaic.chip_of(interpret), kind=kind),
        out_type=(sums, sums, shape((sums.shape[0], size), jnp.float32)),
        grid=(slots, kv_heads, parts),
        grid_names=("slots", "heads", "parts"),
        scratch_types=scratch(blocks, page_size, size, codes=kind is not None),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(side_by_side(q, kv_heads, times, rows).reshape(-1, size), page_table, lengths, told, *held.refs)
    found = mosaic.varying_as(q, top), mosaic.varying_as(q, total), mosaic.varying_as(q, mixed)
    partials = [each.reshape(slots, parts, kv_heads * rows, *each.shape[1:]) for each in found]
    return gpu.joined(
        partials, lengths, sinks, q.dtype, blocks, args.window, interpret is not None, (groups, rows, times)
    )


def scratch(blocks: Blocks, page_size: int, size: int, *, codes: bool) -> list[Any]:
    """Returns the scratch shapes: the rows of a KV head, sums, the barrier of the first, and tiles of K and V."""
    return [
        mosaic.swizzled(ROWS, size),
        plgpu.SMEM((ROWS, size), jnp.float32),
        plgpu.SMEM((2, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=1),
        *KVTileRing.scratch(blocks.stages, blocks.tile, page_size, size, codes=codes),
    ]


def attend_part(
    q_ref,
    table_ref,
    lengths_ref,
    told_ref,
    *refs,
    blocks: Blocks,
    rule: AttentionParams,
    page_size: int,
    chip: type[Chip],
    kind: str | None,
):
    """Computes one part of one slot, all query heads of one KV head. `refs` are the pool and its scales, the results,
    and the scratch. kind: dtype of the pool's codes."""
    pool, refs = PoolTensors(refs[0], refs[1] if kind else None), refs[2 if kind else 1 :]
    (top_ref, total_ref, mixed_ref), (q_smem, mixed_smem, sums_smem, q_barrier, *tiles_smem) = refs[:3], refs[3:]
    rooms = KVTileRing(*tiles_smem)
    slot, head, part = (lax.axis_index(name) for name in ("slots", "heads", "parts"))
    kv_heads = lax.axis_size("heads")
    tile, stages, rows = blocks.tile, blocks.stages, q_ref.shape[0] // (lax.axis_size("slots") * kv_heads)
    times = lengths_ref.shape[0] // lax.axis_size("slots")
    walk = TileSchedule.of([lengths_ref[slot * times + at] for at in range(times)], part, rule.window, blocks)
    own = ((slot * lax.axis_size("parts") + part) * kv_heads + head) * rows

    def fetch(step):
        """Starts the copy of K and V of a tile; pages past the end are read as the null page."""
        (index, _), buffer, length = walk.at(step), lax.rem(step, stages), walk.longest
        for at in range(0, tile, page_size):
            token = index * tile + at
            page = jnp.where(token < length, table_ref[slot, lax.div(jnp.minimum(token, length - 1), page_size)], 0)
            seat = buffer, at, min(page_size, tile)
            rooms.fetch(pool, page, head, lax.rem(token, page_size), seat, page_size)

    @pl.when(walk.steps > 0)
    def _():
        for ahead in range(stages - 1):
            pl.when(ahead < walk.steps)(partial(fetch, jnp.int32(ahead)))
        plgpu.copy_gmem_to_smem(
            q_ref.at[pl.ds((slot * kv_heads + head) * rows, rows)], q_smem.at[pl.ds(0, rows)], q_barrier
        )
        plgpu.barrier_wait(q_barrier)

        def step(at, carry):
            top, total, mixed = carry
            (index, run), buffer = walk.at(at), lax.rem(at, stages)
            pl.when(at + stages - 1 < walk.steps)(lambda: fetch(at + stages - 1))
            plgpu.barrier_wait(rooms.arrived.at[buffer])
            keys, values = rooms.widen(buffer, chip, e4m3=kind == "float8_e4m3fn")
            logits = rooms.scaled(chip.logits(q_smem, keys), buffer, 0, chip)
            if rule.soft_cap is None:
                logits = logits * (rule.scale * LOG2_E)
            else:
                logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
            token = places(chip, logits.shape, 1) + index * tile
            logits = jnp.where(walk.seen(token, run, told_ref.at[slot], rule.window, chip), logits, NEVER)
            higher = jnp.maximum(top, logits.max(axis=1))
            share = jnp.exp2(top - higher)
            weights = jnp.exp2(logits - per_row(higher, logits.shape))
            total = total * share + weights.sum(axis=1)

            mixed = mixed * per_row(share, mixed.shape)
            weights = rooms.scaled(weights, buffer, 1, chip)
            return higher, total, chip.mixture(mixed, weights.astype(jnp.bfloat16), values)

        of_rows = plgpu.Layout.WGMMA.reduce(1)
        top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), of_rows)
        total = chip.lay(jnp.zeros((ROWS,), jnp.float32), of_rows)
        mixed = chip.lay(jnp.zeros(mixed_smem.shape, jnp.float32), plgpu.Layout.WGMMA)
        top, total, mixed = lax.fori_loop(0, walk.steps, step, (top, total, mixed))
        mixed_smem[...] = mixed
        sums_smem[0] = top
        sums_smem[1] = total
        plgpu.commit_smem()
        leaving, kept = pl.ds(pl.multiple_of(own, BOX), rows), pl.ds(0, rows)
        plgpu.copy_smem_to_gmem(mixed_smem.at[kept], mixed_ref.at[leaving])
        plgpu.copy_smem_to_gmem(sums_smem.at[0, kept], top_ref.at[leaving])
        plgpu.copy_smem_to_gmem(sums_smem.at[1, kept], total_ref.at[leaving])
        plgpu.wait_smem_to_gmem(0)


def choose_latent_blocks(q: Array, kv_pages: Array, value_size: int) -> Blocks:
    """Returns the tuned choice, or enough parts for every core, of at least four tiles."""
    found = tuned("paged_attention", q, kv_pages)
    if found.get(MOSAIC):
        return blocks_of(found)
    kv_heads = kv_pages.shape[1]
    across = max(1, q.shape[0] * kv_heads * pl.cdiv(q.shape[1] // kv_heads, ROWS))
    parts = max(1, min(MAX_PARTS, BLOCKS // across, PART_NUMBERS // (across * ROWS * value_size)))
    return Blocks(parts, 4, TILE, warps=4, stages=STAGES)


@partial(jax.jit, static_argnames=("blocks", "interpret"))
def attend_latents(
    args: PagedAttentionArgs,
    *,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """Computes `pallas_kernels.paged_attention` for arguments of `mosaic.fits_latents`; interpret: the interpreter's
    parameters."""
    q, kv_pages, page_table, lengths, sinks = args.arrays
    value_size = args.value_size
    assert value_size is not None and not isinstance(kv_pages, QuantizedPages)
    (slots, heads, size), times = (page_table.shape[0], *q.shape[1:]), q.shape[0] // page_table.shape[0]
    _, kv_heads, _, page_size, _ = kv_pages.shape
    a_row_each: Any = jax.ShapeDtypeStruct((slots, heads, size), q.dtype)
    blocks = blocks or choose_latent_blocks(a_row_each, kv_pages, value_size)
    parts = min(blocks.parts, pl.cdiv(page_table.shape[1] * page_size, blocks.tiles * blocks.tile))
    groups = heads // kv_heads
    if times * groups > ROWS:
        page_table, slots, times = jnp.repeat(page_table, times, axis=0), q.shape[0], 1
    rows = rows_of(times * groups)
    row_blocks = pl.cdiv(rows, ROWS)
    told = visible_rows(lengths, times, groups, args.window, blocks)
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    sums = shape((slots * parts * kv_heads * row_blocks, ROWS), jnp.float32)
    rule = AttentionParams(args.scale, args.window, args.soft_cap, ((0, value_size),), None)
    found = plgpu.kernel(
        partial(
            attend_latent_part,
            blocks=blocks,
            rule=rule,
            page_size=page_size,
            rows=min(rows, ROWS),
            chip=mosaic.chip_of(interpret),
        ),
        out_type=(sums, sums, shape((*sums.shape, value_size), jnp.float32)),
        grid=(slots, kv_heads, row_blocks, parts),
        grid_names=("slots", "heads", "row_blocks", "parts"),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        scratch_types=latent_scratch(blocks, page_size, size),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(
        side_by_side(q, kv_heads, times, rows).reshape(-1, size),
        page_table,
        lengths,
        told,
        PoolTensors.of(kv_pages).numbers,
    )
    partials = [
        mosaic.varying_as(q, each).reshape(slots, parts, kv_heads * row_blocks * ROWS, *each.shape[2:])
        for each in found
    ]
    padded = groups, row_blocks * ROWS, times
    return gpu.joined(partials, lengths, sinks, q.dtype, blocks, args.window, bool(interpret), padded)


def latent_scratch(blocks: Blocks, page_size: int, size: int) -> list[Any]:
    """Returns the scratch shapes: rows of queries, their barrier, and a ring of tiles."""
    copies = max(1, blocks.tile // page_size)
    return [
        mosaic.swizzled(ROWS, size),
        plgpu.Barrier(num_arrivals=1),
        mosaic.swizzled(blocks.stages, blocks.tile, size),
        plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages),
        plgpu.Barrier(num_arrivals=HALVES, num_barriers=blocks.stages),
    ]


def attend_latent_part(
    q_ref,
    table_ref,
    lengths_ref,
    told_ref,
    pool_ref,
    top_ref,
    total_ref,
    mixed_ref,
    q_smem,
    q_barrier,
    *ring,
    blocks: Blocks,
    rule: AttentionParams,
    page_size: int,
    rows: int,
    chip: type[Chip],
):
    """Computes one part of one slot, up to 64 query heads of one KV head."""
    names = "slots", "heads", "row_blocks", "parts", "warpgroup"
    slot, head, row_block, part, warpgroup = map(lax.axis_index, names)
    kv_heads, row_blocks = lax.axis_size("heads"), lax.axis_size("row_blocks")
    room, times = TileRing(*ring), lengths_ref.shape[0] // lax.axis_size("slots")
    walk = TileSchedule.of([lengths_ref[slot * times + at] for at in range(times)], part, rule.window, blocks)

    @pl.when((warpgroup == HALVES) & (walk.steps > 0))
    def _():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        mine = (slot * kv_heads + head) * row_blocks + row_block
        held = q_ref.at[pl.ds(pl.multiple_of(mine * rows, BOX), rows)]
        plgpu.copy_gmem_to_smem(held, q_smem.at[pl.ds(0, rows)], q_barrier)
        place = Pages(PoolTensors(pool_ref, None), table_ref, slot, head, walk.longest, page_size, kv_heads, parts=1)
        bring(place, walk.steps, lambda step: walk.at(step)[0], [room], chip, e4m3=False)

    @pl.when((warpgroup < HALVES) & (walk.steps > 0))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        plgpu.barrier_wait(q_barrier)
        own = ((slot * lax.axis_size("parts") + part) * kv_heads + head) * row_blocks + row_block
        half = mixed_ref.shape[2] // HALVES
        top, total, mixed = mix_half(q_smem, room, (walk, told_ref.at[slot]), (warpgroup, half), rule, chip)
        mixed_ref.at[own, :, pl.ds(warpgroup * half, half)][...] = mixed

        @pl.when(warpgroup == 0)
        def _():
            top_ref.at[own][...] = top
            total_ref.at[own][...] = total
