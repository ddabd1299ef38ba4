"""Prefill attention on Hopper GPUs (Pallas Mosaic GPU): two warpgroups multiply, a third brings pages by TMA.

The blocks are those of the Triton code, each of one sequence, those with the most tiles first. A warpgroup has the 64
rows that a wgmma takes: all query heads of a KV head, for as many tokens as have room. Both warpgroups read the same
tiles of K and V; a tile's buffer is filled anew when both said that they are done with it. Rows of queries come and
results go token by token, so that a block may begin and end anywhere in a packed chunk: what lies past its end is
another sequence's, or nobody's.

Compiled for an H100, nothing is spilled; with heads of 128 a block takes 192 KiB of shared memory, so that a core has
one. Nothing is measured yet.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import BOX, ROWS, TILE, Chip, per_row, places, plgpu
from pallas_kernels.paged_attention.gpu import LOG2_E, MOSAIC, NEVER
from pallas_kernels.prefill_attention import xla
from pallas_kernels.tuning import tuned

WARPGROUPS = 2  # that multiply
REGISTERS, FEW_REGISTERS = 232, 40  # a thread, of those that multiply and of those that bring pages


class Blocks(NamedTuple):
    """How the work is cut."""

    tile: int  # KV tokens of a step
    stages: int  # tiles in flight


class Rule(NamedTuple):
    """What is computed, the same for every block."""

    scale: float
    window: int | None
    soft_cap: float | None
    groups: int  # query heads of a KV head

    @property
    def tokens(self) -> int:
        """Whose query heads fill a warpgroup's rows."""
        return ROWS // self.groups


def choose_blocks(q: Array, kv_pages: Array) -> Blocks:
    """The tuned choice, or two tiles in flight: with heads of 128 they are 128 KiB."""
    found = tuned("prefill_attention", q, kv_pages)
    return Blocks(found["tile"], found["stages"]) if found.get(MOSAIC) else Blocks(2 * TILE, 2)


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "value_size", "blocks", "interpret"))
def prefill_attention(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    kv_lens: Array,
    cu_q_lens: Array,
    sinks: Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    value_size: int | None = None,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Array:
    """As `pallas_kernels.prefill_attention`, of what `mosaic.fits`. interpret: parameters of Mosaic's interpreter."""
    assert value_size is None, value_size
    tokens, heads, size = q.shape
    _, kv_heads, _, page_size, _ = kv_pages.shape
    blocks = blocks or choose_blocks(q, kv_pages)
    rule = Rule(scale, window, soft_cap, heads // kv_heads)
    rows = WARPGROUPS * rule.tokens
    work = xla.list_blocks(tokens, kv_lens, cu_q_lens, tile_tokens=blocks.tile, window=window, query_rows=rows)
    end = jnp.minimum(cu_q_lens[work.sequence + 1] - work.start, rows)
    spans = jnp.stack([work.sequence, work.start, work.position, work.first, work.stop, end], axis=1)
    out = plgpu.kernel(
        partial(attend_block, blocks=blocks, rule=rule, page_size=page_size, chip=mosaic.chip_of(interpret)),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type),
        grid=(spans.shape[0], kv_heads),
        grid_names=("blocks", "heads"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch(blocks, page_size, size, rule),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(q, kv_pages.reshape(-1, size), page_table, spans, row_sinks(sinks, kv_heads, rule))
    real = (jnp.arange(tokens) < cu_q_lens[-1])[:, None, None]
    return jnp.where(real, mosaic.varying_as(q, out), 0)  # no block writes the padding


def row_sinks(sinks: Array | None, kv_heads: int, rule: Rule) -> Array:
    """f32 [kv_heads, ROWS] in base 2: where each row's softmax begins."""
    if sinks is None:
        return jnp.full((kv_heads, ROWS), NEVER, jnp.float32)
    own = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2_E, (1, rule.tokens))
    return jnp.pad(own, ((0, 0), (0, ROWS - own.shape[1])), constant_values=NEVER)


def scratch(blocks: Blocks, page_size: int, size: int, rule: Rule) -> list[Any]:
    """Rows as they come and go and as a wgmma reads them, tiles of K and of V, and who waits for what."""
    copies = max(1, blocks.tile // page_size)
    arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages)
    done = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=blocks.stages)
    return [
        plgpu.SMEM((WARPGROUPS, ROWS, size), jnp.bfloat16),
        mosaic.swizzled(WARPGROUPS, ROWS, size),
        mosaic.swizzled(blocks.stages, blocks.tile, size),
        mosaic.swizzled(blocks.stages, blocks.tile, size),
        plgpu.Barrier(num_arrivals=rule.tokens, num_barriers=WARPGROUPS),
        arrived,
        arrived,
        done,
        done,
    ]


def attend_block(
    q_ref,
    pool,
    table_ref,
    spans_ref,
    sinks_ref,
    out_ref,
    rows_smem,
    q_smem,
    k_smem,
    v_smem,
    q_barriers,
    k_barriers,
    v_barriers,
    k_done,
    v_done,
    *,
    blocks: Blocks,
    rule: Rule,
    page_size: int,
    chip: type[Chip],
):
    """One block and KV head."""
    block, head, warpgroup = (lax.axis_index(name) for name in ("blocks", "heads", "warpgroup"))
    sequence, start, position, first, stop, end = (spans_ref[block, at] for at in range(6))
    rooms = (k_smem, k_barriers, k_done), (v_smem, v_barriers, v_done)

    @pl.when((warpgroup == WARPGROUPS) & (stop > first))
    def _():
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        place = Pages(pool, table_ref, sequence, head, position + end, page_size)
        bring(place, (first, stop), rooms, blocks)

    @pl.when((warpgroup < WARPGROUPS) & (stop > first))
    def _():
        plgpu.set_max_registers(REGISTERS, action="increase")
        own = Rows(q_ref, out_ref, rows_smem.at[warpgroup], start + warpgroup * rule.tokens, head * rule.groups)
        own.fetch(q_barriers.at[warpgroup], rule)
        queries = q_smem.at[warpgroup]
        queries[...] = chip.load(rows_smem.at[warpgroup], plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        at = position + warpgroup * rule.tokens
        top, total, mixed = attend_tiles(queries, rooms, (first, stop, at), blocks, rule, chip)
        sinks = chip.load(sinks_ref.at[head], plgpu.Layout.WGMMA.reduce(1))
        higher = jnp.maximum(top, sinks)
        share = jnp.exp2(top - higher)
        total = total * share + jnp.exp2(sinks - higher)
        found = mixed * per_row(share / jnp.where(total > 0, total, 1.0), mixed.shape)
        rows_smem.at[warpgroup][...] = found.astype(jnp.bfloat16)
        plgpu.commit_smem()
        own.leave(end - warpgroup * rule.tokens, rule)


class Rows(NamedTuple):
    """A warpgroup's rows: where in the chunk they are, and where they wait."""

    q_ref: Any
    out_ref: Any
    room: Any
    start: Array
    head: Array

    def fetch(self, barrier: Any, rule: Rule) -> None:
        @pl.loop(0, rule.tokens)
        def _(token):
            there = jnp.minimum(self.start + token, self.q_ref.shape[0] - 1)
            held = self.q_ref.at[there, pl.ds(self.head, rule.groups)]
            plgpu.copy_gmem_to_smem(held, self.room.at[pl.ds(token * rule.groups, rule.groups)], barrier)

        plgpu.barrier_wait(barrier)

    def leave(self, count: Array, rule: Rule) -> None:
        """The first `count` tokens' rows."""

        @pl.loop(0, jnp.clip(count, 0, rule.tokens))
        def _(token):
            place = self.out_ref.at[self.start + token, pl.ds(self.head, rule.groups)]
            plgpu.copy_smem_to_gmem(self.room.at[pl.ds(token * rule.groups, rule.groups)], place)

        plgpu.wait_smem_to_gmem(0)


class Pages(NamedTuple):
    """Where a sequence's K and V of one head lie."""

    pool: Any
    table: Any
    sequence: Array
    head: Array
    visible: Array  # tokens that the block's last row sees
    page_size: int

    def fetch(self, which: int, first: Array, count: int, room: Any, barrier: Any) -> None:
        """`count` tokens of K (0) or V (1); of pages that nobody sees, those of the null page."""
        kv_heads = lax.axis_size("heads")
        size = min(self.page_size, count)
        for at in range(0, count, self.page_size):
            token = first + at
            column = lax.div(jnp.minimum(token, self.visible - 1), self.page_size)
            page = jnp.where(token < self.visible, self.table[self.sequence, column], 0)
            row = ((page * kv_heads + self.head) * 2 + which) * self.page_size + lax.rem(token, self.page_size)
            held = self.pool.at[pl.ds(pl.multiple_of(row, BOX), size)]
            plgpu.copy_gmem_to_smem(held, room.at[pl.ds(at, size)], barrier)


def bring(pages: Pages, span: tuple[Array, Array], rooms: Any, blocks: Blocks) -> None:
    """The third warpgroup: a tile's K and V after another's, each into the buffer that was free the longest."""
    first, stop = span

    def freed(step):
        """Waits until the tile that lay in this step's buffer was read."""
        for _, _, done in rooms:
            plgpu.barrier_wait(done.at[lax.rem(step, blocks.stages)])

    @pl.loop(0, stop - first)
    def _(step):
        buffer = lax.rem(step, blocks.stages)
        for which, (room, arrived, done) in enumerate(rooms):
            pl.when(step >= blocks.stages)(partial(plgpu.barrier_wait, done.at[buffer]))
            pages.fetch(which, (first + step) * blocks.tile, blocks.tile, room.at[buffer], arrived.at[buffer])

    pl.loop(jnp.maximum(stop - first - blocks.stages, 0), stop - first)(freed)


def attend_tiles(queries, rooms, span, blocks: Blocks, rule: Rule, chip: type[Chip]):
    """The greatest logit, total and mixture of a warpgroup's rows after the tiles from first to stop; `at` is its first
    row's place. Sinks are left to the caller: within a `shard_map` that checks they are each shard's own, as nothing
    here is said to be."""
    first, stop, at = span
    (keys, k_arrived, k_done), (values, v_arrived, v_done) = rooms
    shape = ROWS, blocks.tile

    def step(index, carry, *, masked: bool):
        top, total, mixed = carry
        buffer = lax.rem(index - first, blocks.stages)
        plgpu.barrier_wait(k_arrived.at[buffer])
        logits = chip.logits(queries, keys.at[buffer])
        plgpu.barrier_arrive(k_done.at[buffer])
        if rule.soft_cap is None:
            logits = logits * (rule.scale * LOG2_E)
        else:
            logits = jnp.tanh(logits * (rule.scale / rule.soft_cap)) * (rule.soft_cap * LOG2_E)
        if masked:
            position = lax.div(places(chip, shape, 0), rule.groups) + at
            token = places(chip, shape, 1) + index * blocks.tile
            seen = position >= token
            if rule.window is not None:
                seen = seen & (position - token < rule.window)
            logits = jnp.where(seen, logits, NEVER)
        higher = jnp.maximum(top, logits.max(axis=1))
        share = jnp.exp2(top - higher)
        weights = jnp.exp2(logits - per_row(higher, shape))
        total = total * share + weights.sum(axis=1)
        mixed = mixed * per_row(share, mixed.shape)
        plgpu.barrier_wait(v_arrived.at[buffer])
        mixed = chip.mixture(mixed, weights.astype(jnp.bfloat16), values.at[buffer])
        plgpu.barrier_arrive(v_done.at[buffer])
        return higher, total, mixed

    reduced = plgpu.Layout.WGMMA.reduce(1)
    top = chip.lay(jnp.full((ROWS,), NEVER, jnp.float32), reduced)
    total = chip.lay(jnp.zeros((ROWS,), jnp.float32), reduced)
    mixed = chip.lay(jnp.zeros((ROWS, queries.shape[1]), jnp.float32), plgpu.Layout.WGMMA)
    # Tiles that every row sees whole take no masks; a window hides some of any.
    whole = first if rule.window is not None else jnp.clip(lax.div(at + 1, blocks.tile), first, stop)
    carry = lax.fori_loop(first, whole, partial(step, masked=False), (top, total, mixed))
    return lax.fori_loop(whole, stop, partial(step, masked=True), carry)
