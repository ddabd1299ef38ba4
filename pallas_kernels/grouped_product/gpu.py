"""The grouped product on a GPU (Pallas Triton): one program a block of one group's rows and of outputs.

XLA's own makes masked copies here, of matrices or of rows: 524 MiB of temporaries for 1,024 rows and the experts of
Qwen3-30B-A3B, 3.1 GiB for 16,384. (On a TPU it makes none, whatever the sides of the matrices.) Blocks are of one group
each, so that a program reads one matrix, and only matrices that have rows are read; blocks of one matrix are next to
each other, so that all but the first find it in the cache. Triton's arrays are powers of two, and a tensor core takes
16 rows: the rest is masked, and neither read nor written.

Compiled for an H100; nothing is measured yet.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_product import xla
from pallas_kernels.paged_attention.gpu import precision_of

MIN_ROWS, MAX_ROWS = 16, 128  # the least a tensor core takes; two warp groups of 64 rows, Hopper's matrix instruction
STEP_BYTES = 128  # of a row that one step takes: a line of the cache, or two in f32


class Blocks(NamedTuple):
    """How the work is cut; all powers of two."""

    rows: int
    outputs: int
    step: int  # inputs of one step of a program's loop
    warps: int
    stages: int


@partial(jax.jit, static_argnames=("out_first", "blocks", "interpret"))
def grouped_product(
    x: Array, matrices: Array, sizes: Array, *, out_first: bool, blocks: Blocks | None = None, interpret: bool = False
) -> Array:
    """As `pallas_kernels.grouped_product`."""
    outputs = matrices.shape[1 if out_first else 2]
    blocks = blocks or choose_blocks(x.shape[0], matrices, outputs)
    group, start, stop = list_blocks(sizes, x.shape[0], blocks.rows)
    made = pl.pallas_call(
        partial(multiply_block, blocks=blocks, out_first=out_first, precision=precision_of(matrices.dtype, interpret)),
        out_shape=jax.ShapeDtypeStruct(
            (x.shape[0], outputs), x.dtype, manual_axis_type=jax.typeof(matrices).manual_axis_type
        ),
        grid=(group.shape[0], pl.cdiv(outputs, blocks.outputs)),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="grouped_product",
    )(x.astype(matrices.dtype), matrices, group, start, stop)
    return jnp.where(xla.grouped(x, sizes), made, 0)  # no program writes the rest


def choose_blocks(rows: int, matrices: Array, outputs: int) -> Blocks:
    """Blocks about as long as the mean group: a shorter one reads its matrix again, a longer one computes in vain."""
    mean = pl.next_power_of_2(pl.cdiv(max(rows, 1), matrices.shape[0]))
    block = max(MIN_ROWS, min(MAX_ROWS, mean))
    wide = max(16, min(128, pl.next_power_of_2(outputs)))
    return Blocks(block, wide, STEP_BYTES // matrices.dtype.itemsize, warps=8 if block > 64 else 4, stages=4)


def list_blocks(sizes: Array, rows: int, block: int) -> tuple[Array, Array, Array]:
    """i32[blocks] each: the group of a block, its first row, and where its group's rows end; 0 of those there are not.

    As many as any sizes make of so many rows: every group may begin a block of its own.
    """
    count = pl.cdiv(rows, block) + min(len(sizes), rows)
    blocks, ends = pl.cdiv(sizes, block), jnp.cumsum(sizes)
    last = jnp.cumsum(blocks)
    index = jnp.arange(max(count, 1))
    group = jnp.minimum(jnp.sum(last[None, :] <= index[:, None], axis=1), len(sizes) - 1)
    start = ends[group] - sizes[group] + (index - last[group] + blocks[group]) * block
    there = index < last[-1]
    group, start, stop = (jnp.where(there, each, 0).astype(jnp.int32) for each in (group, start, ends[group]))
    return group, start, stop


def multiply_block(
    x_ref,
    matrices_ref,
    group_ref,
    start_ref,
    stop_ref,
    out_ref,
    *,
    blocks: Blocks,
    out_first: bool,
    precision: lax.DotAlgorithmPreset | lax.Precision | None,
):
    """Up to `blocks.rows` rows of one group, by `blocks.outputs` columns of its matrix."""
    block, column = pl.program_id(0), pl.program_id(1)
    start, stop = start_ref[block], stop_ref[block]
    inputs, width = x_ref.shape[1], out_ref.shape[1]

    @pl.when(start < stop)
    def _():
        group = group_ref[block]
        rows = start + jnp.arange(blocks.rows)
        outputs = column * blocks.outputs + jnp.arange(blocks.outputs)
        real, wanted = (rows < stop)[:, None], outputs < width
        whole = inputs % blocks.step == 0

        def step(index, total):
            taken = index * blocks.step + jnp.arange(blocks.step)
            held = jnp.full(taken.shape, True) if whole else taken < inputs
            left = pltriton.load(x_ref.at[rows[:, None], taken[None, :]], mask=real & held[None, :], other=0.0)
            if out_first:
                at, mask = (outputs[:, None], taken[None, :]), wanted[:, None] & held[None, :]
            else:
                at, mask = (taken[:, None], outputs[None, :]), held[:, None] & wanted[None, :]
            right = pltriton.load(matrices_ref.at[group, *at], mask=mask, other=0.0)
            axes = ((1,), (1 if out_first else 0,)), ((), ())
            return total + lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)

        total = jnp.zeros((blocks.rows, blocks.outputs), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(inputs, blocks.step), step, total)
        pltriton.store(
            out_ref.at[rows[:, None], outputs[None, :]], total.astype(out_ref.dtype), mask=real & wanted[None, :]
        )
