"""The grouped product on Hopper GPUs (Pallas Mosaic GPU): a warpgroup loads tiles by TMA, one or two others multiply.

A block is a number of rows of one group times a number of columns of its matrix. As many programs as a GPU has cores
process them in turn, so that the next block's tiles are loaded while one's results are stored. Blocks that the sizes
leave empty cost no time. A block's columns follow each other, so that its rows are read from memory once. A block
begins at its group's first row or a whole number of blocks after it. All numbers of a row are summed in one order by
one instruction: other rows of the chunk do not change its bits. Rows past a group's end are multiplied too, but not
stored: results are stored by copies of 64, 32, ... 1 rows, as many as there are.

Compiled for an H100, no register is spilled: 90 to 122 registers per thread and 216 KiB of shared memory at most, so
that a core has one block. No run has been measured.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.grouped_product import xla
from pallas_kernels.mosaic import ROWS, Chip, plgpu
from pallas_kernels.tuning import tuned_product

STEP = mosaic.TILE  # inputs per step
WIDTHS = 128, 192, 64  # columns of a block, the first that divides a matrix's
CORES = 132  # cores of an H100 and an H200; with fewer, some programs run after others
MOST_STAGES = 8


class Blocks(NamedTuple):
    """The split of the work into blocks."""

    warpgroups: int  # of 64 rows each
    outputs: int  # columns of a block
    stages: int  # steps in flight

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS


def choose_blocks(rows: int, matrices: Array, out_first: bool) -> Blocks:
    """Returns the tuned width, or the first that divides the columns; two warpgroups if the mean group fills more than
    one, and as many steps as fit."""
    groups, outputs = matrices.shape[0], matrices.shape[1 if out_first else 2]
    first = next(each for each in WIDTHS if outputs % each == 0)
    return blocks_of(2 if rows > groups * ROWS else 1, tuned_product(matrices, out_first).get("outputs", first))


def blocks_of(warpgroups: int, width: int) -> Blocks:
    left = mosaic.BLOCK_BYTES - 2 * warpgroups * ROWS * width
    stages = left // (2 * STEP * (warpgroups * ROWS + width))
    return Blocks(warpgroups, width, min(stages, MOST_STAGES))


@partial(jax.jit, static_argnames=("out_first", "blocks", "interpret", "cores"))
def grouped_product(
    x: Array,
    matrices: Array,
    sizes: Array,
    *,
    out_first: bool,
    blocks: Blocks | None = None,
    interpret: Any = None,
    cores: int = CORES,
) -> Array:
    """Computes `pallas_kernels.grouped_product` for arguments of `mosaic.multiplies`; interpret: the interpreter's
    parameters."""
    rows, outputs = x.shape[0], matrices.shape[1 if out_first else 2]
    blocks = blocks or choose_blocks(rows, matrices, out_first)
    group, start, stop = list_blocks(sizes, rows, blocks.rows)
    made = plgpu.kernel(
        partial(multiply_blocks, blocks=blocks, out_first=out_first, chip=mosaic.chip_of(interpret)),
        out_type=jax.ShapeDtypeStruct((rows, outputs), x.dtype, manual_axis_type=jax.typeof(matrices).manual_axis_type),
        grid=(cores,),
        grid_names=("cores",),
        num_threads=blocks.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch(blocks, out_first),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
    )(
        jnp.pad(x, ((0, blocks.rows + -rows % mosaic.BOX), (0, 0))),  # read by a block past the last row
        matrices,
        jnp.stack([group, start, stop], axis=1),
        jnp.sum(stop > start, dtype=jnp.int32)[None],
    )
    return jnp.where(xla.grouped(x, sizes), mosaic.varying_as(matrices, made), 0)  # no block writes the rest


def list_blocks(sizes: Array, rows: int, block: int) -> tuple[Array, Array, Array]:
    """Returns i32[blocks] each: the group of a block, its first row, and the end of its group's rows; 0 for unused
    blocks. There are as many as any sizes need for `rows` rows: every group may begin a block of its own."""
    count = pl.cdiv(rows, block) + min(len(sizes), rows)
    blocks, ends = pl.cdiv(sizes, block), jnp.cumsum(sizes)
    last = jnp.cumsum(blocks)
    index = jnp.arange(max(count, 1))
    group = jnp.minimum(jnp.sum(last[None, :] <= index[:, None], axis=1), len(sizes) - 1)
    start = ends[group] - sizes[group] + (index - last[group] + blocks[group]) * block
    there = index < last[-1]
    group, start, stop = (jnp.where(there, each, 0).astype(jnp.int32) for each in (group, start, ends[group]))
    return group, start, stop


def scratch(blocks: Blocks, out_first: bool) -> list[Any]:
    """Returns the scratch shapes: tiles of rows and of a matrix, their barriers, and the results."""
    tile = (blocks.outputs, STEP) if out_first else (STEP, blocks.outputs)
    return [
        mosaic.swizzled(blocks.stages, blocks.warpgroups, ROWS, STEP),
        mosaic.swizzled(blocks.stages, *tile),
        plgpu.Barrier(num_arrivals=blocks.warpgroups + 1, num_barriers=blocks.stages),
        plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.stages),
        plgpu.SMEM((blocks.warpgroups, ROWS, blocks.outputs), jnp.bfloat16),
    ]


class Ring(NamedTuple):
    """The steps of successive blocks, each in the buffers that were free the longest."""

    rows: Any  # bf16 [stages, warpgroups, ROWS, STEP]
    tiles: Any  # tiles of a matrix
    arrived: Any  # one barrier per stage, awaited by multiplying warpgroups
    done: Any  # awaited by the loading warpgroup

    def stage(self, step: Array) -> Array:
        return lax.rem(step, self.rows.shape[0])


def multiply_blocks(
    x_ref, matrices_ref, spans_ref, count_ref, out_ref, *refs, blocks: Blocks, out_first: bool, chip: type[Chip]
):
    """Computes every n-th block, n being the number of programs. `refs` are the scratch."""
    ring, leaving = Ring(*refs[:4]), refs[4]
    core, warpgroup = lax.axis_index("cores"), lax.axis_index("warpgroup")
    columns, steps = out_ref.shape[1] // blocks.outputs, x_ref.shape[1] // STEP
    cores = lax.axis_size("cores")
    mine = lax.div(count_ref[0] * columns - core + cores - 1, cores)

    def place(index: Array) -> tuple[Array, Array, Array, Array]:
        """Returns the group, first row, end of the group's rows, and first column of a block."""
        work = core + index * cores
        span = spans_ref.at[lax.div(work, columns)]
        return span[0], span[1], span[2], lax.rem(work, columns) * blocks.outputs

    @pl.when(warpgroup == blocks.warpgroups)
    def _():
        @pl.loop(0, mine)
        def _(index):
            group, start, _, column = place(index)
            bring(x_ref, matrices_ref.at[group], (start, column), index * steps, ring, out_first)

        @pl.loop(jnp.maximum(mine * steps - blocks.stages, 0), mine * steps)
        def _(step):
            plgpu.barrier_wait(ring.done.at[ring.stage(step)])

    @pl.when(warpgroup < blocks.warpgroups)
    def _():
        @pl.loop(0, mine)
        def _(index):
            _, start, stop, column = place(index)
            found = multiply(index * steps, steps, warpgroup, ring, out_first, chip)
            plgpu.wait_smem_to_gmem(0)  # the previous results
            leaving.at[warpgroup][...] = found.astype(jnp.bfloat16)
            plgpu.commit_smem()
            first = start + warpgroup * ROWS
            leave(leaving.at[warpgroup], out_ref.at[:, pl.ds(column, blocks.outputs)], first, stop - first)

        plgpu.wait_smem_to_gmem(0)


def bring(x_ref: Any, matrix_ref: Any, at: tuple[Array, Array], before: Array, ring: Ring, out_first: bool) -> None:
    """Loads the steps of a block, of rows and columns from `at` on."""
    start, column = at
    stages, warpgroups = ring.rows.shape[:2]
    outputs = ring.tiles.shape[1 if out_first else 2]

    @pl.loop(0, x_ref.shape[1] // STEP)
    def _(step):
        buffer = ring.stage(before + step)
        pl.when(before + step >= stages)(partial(plgpu.barrier_wait, ring.done.at[buffer]))
        inputs, columns = pl.ds(step * STEP, STEP), pl.ds(column, outputs)
        tile = matrix_ref.at[columns, inputs] if out_first else matrix_ref.at[inputs, columns]
        plgpu.copy_gmem_to_smem(tile, ring.tiles.at[buffer], ring.arrived.at[buffer])
        for each in range(warpgroups):
            rows = x_ref.at[pl.ds(start + each * ROWS, ROWS), inputs]
            plgpu.copy_gmem_to_smem(rows, ring.rows.at[buffer, each], ring.arrived.at[buffer])


def multiply(before: Array, steps: int, warpgroup: Array, ring: Ring, out_first: bool, chip: type[Chip]) -> Array:
    """Returns f32 [ROWS, outputs], the sum of a block's steps."""

    def pair(step):
        buffer = ring.stage(before + step)
        plgpu.barrier_wait(ring.arrived.at[buffer])
        return ring.rows.at[buffer, warpgroup], ring.tiles.at[buffer]

    def done(step):
        plgpu.barrier_arrive(ring.done.at[ring.stage(before + step)])

    shape = ROWS, ring.tiles.shape[1 if out_first else 2]
    return chip.sum_of_products(shape, steps, pair, done, turned=out_first)


def leave(rows: Any, out_ref: Any, first: Array, count: Array) -> None:
    """Stores the first `count` rows to rows from `first` on."""
    count = jnp.clip(count, 0, ROWS)
    size = ROWS
    while size:
        at = count & -(2 * size)  # rows that longer copies stored

        @pl.when(count & size != 0)
        def _(size=size, at=at):
            plgpu.copy_smem_to_gmem(rows.at[pl.ds(at, size)], out_ref.at[pl.ds(first + at, size)])

        size //= 2
