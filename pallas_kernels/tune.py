"""Measures block sizes on the local device and stores the fastest: `python -m pallas_kernels.tune [--dry_run]`.

Each candidate is compiled, run once, then timed `--repeats` times; its median counts. The rule's own choice is the
first candidate, so a table entry is never slower than none. Candidates that do not compile are skipped. The table is
written after each operation at a size, `{}` if the rule is the fastest. Another call with --missing continues with
those that --limit_s left out.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import tune_products
from pallas_kernels.arguments import PagedAttentionArgs, PrefillAttentionArgs
from pallas_kernels.mosaic import SHARED_BYTES
from pallas_kernels.paged_attention import gpu as decode_gpu
from pallas_kernels.paged_attention import hopper as decode_hopper
from pallas_kernels.paged_attention import on_gpu as decode_on_gpu
from pallas_kernels.paged_attention import tpu as decode_tpu
from pallas_kernels.prefill_attention import gpu as prefill_gpu
from pallas_kernels.prefill_attention import hopper as prefill_hopper
from pallas_kernels.prefill_attention import on_gpu as prefill_on_gpu
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.quantized import LARGEST, QuantizedPages, quantize_pages
from pallas_kernels.tune_moves import MOVES, WRITE, arrays_of, choices, mover
from pallas_kernels.tune_products import ProductTuningJob
from pallas_kernels.tuned import TUNED
from pallas_kernels.tuning import MOSAIC, key_of

DATA = Path(__file__).with_name("tuned.py")
HEADER = DATA.read_text(encoding="utf-8").split("\n\n")[0]
MODELS = {
    "llama3_8b": "128x8x4x32",
    "llama3_70b_tp8": "128x1x8x32",
    "deepseek_v3_tp8": "576x1x16x64x512",
    "small": "64x4x2x32",
}
SHAPES = "llama3_8b,llama3_70b_tp8,deepseek_v3_tp8"
SHAPE = "DxHkvxGxpage, of latents DxHkvxGxpagexvalues"
TINY, TINY_CANDIDATES = "16x2x2x16", 3
Blocks = dict[str, int]


class TuningJob(NamedTuple):
    """A tuning job: an operation at one size."""

    operation: str
    head_dim: int
    kv_heads: int
    groups: int
    page_size: int
    q_dtype: str
    pool_dtype: str
    rows: int  # slots of a decode step, tokens of a chunk
    context: int  # tokens held by each slot
    value_size: int | None = None  # for latents: numbers of a row that are V too


def candidates(platform: str, work: TuningJob | ProductTuningJob) -> Iterator[Blocks]:
    """Yields the block sizes to try; {} is the kernel's own rule."""
    if isinstance(work, ProductTuningJob):
        yield from tune_products.choices(work)
        return
    if work.operation in MOVES:
        yield from choices(work.operation, *arguments_of(work)[:2])
        return
    yield {}
    decode = work.operation == "paged_attention"
    if platform == "gpu":
        latents = work.value_size is not None
        codes = work.pool_dtype in LARGEST and 4 * work.page_size % SHARED_BYTES == 0 and not latents
        mosaic = work.q_dtype == "bfloat16" and (work.pool_dtype == "bfloat16" or codes)
        if decode:
            for parts, tile, warps in product((4, 16, 64, 256), (32, 64, 128), (4, 8)):
                yield {"parts": parts, "tiles": 2, "tile": tile, "warps": warps, "stages": 3}
            for parts, tile, stages in product((4, 16, 64, 256), (64, 128), (2, 3, 4)) if mosaic else ():
                yield {"mosaic": 1, "parts": parts, "tiles": 2, "tile": tile, "warps": 4, "stages": stages}
        else:
            for rows, tile, warps in product((64, 128), (32, 64, 128), (4, 8)):
                yield {"rows": rows, "tile": tile, "warps": warps, "stages": 3}
            tiles, stages_of = ((64,), (2,)) if latents else ((64, 128), (2, 3))
            for tile, stages in product(tiles, stages_of) if mosaic else ():
                yield {"mosaic": 1, "tile": tile, "stages": stages}
        return
    tokens = (128, 256, 512, 1024) if decode else (128, 256, 512)
    for pages in sorted({max(1, count // work.page_size) for count in tokens}):
        yield from (
            {"block_pages": pages, **more} for more in ([{}] if decode else [{"block_rows": n} for n in (64, 128, 256)])
        )


def arguments_of(work: TuningJob | ProductTuningJob) -> tuple[Any, ...]:
    """Returns the arrays of the operation in order, without sinks: slots hold the whole context, a chunk is its last
    rows."""
    if isinstance(work, ProductTuningJob):
        return tune_products.arrays_of(work)
    if work.operation in MOVES:
        return arrays_of(work.operation, work.rows, work.kv_heads, work.page_size, work.head_dim, work.pool_dtype)
    rng = np.random.default_rng(0)
    slots = work.rows if work.operation == "paged_attention" else 1
    width, parts = -(-work.context // work.page_size), 2 if work.value_size is None else 1
    pool: Array | QuantizedPages = jnp.asarray(
        rng.standard_normal((slots * width + 1, work.kv_heads, parts, work.page_size, work.head_dim)), jnp.float32
    )
    if work.pool_dtype in LARGEST:
        pool = quantize_pages(pool, jnp.dtype(work.pool_dtype))
    else:
        pool = pool.astype(work.pool_dtype)
    heads = work.kv_heads * work.groups
    q = jnp.asarray(rng.standard_normal((work.rows, heads, work.head_dim)), work.q_dtype)
    table = jnp.asarray(1 + rng.permutation(slots * width).reshape(slots, width), jnp.int32)
    lengths = jnp.full(slots, work.context, jnp.int32)
    if work.operation == "paged_attention":
        return q, pool, table, lengths, None
    return q, pool, table, lengths, jnp.asarray([0, min(work.rows, work.context)], jnp.int32), None


def shapes_of(work: TuningJob) -> tuple[Any, Any]:
    """Returns the shapes of rows and pool of `arguments_of`, by which a choice is looked up."""
    moved, parts = work.operation in MOVES, 2 if work.value_size is None else 1
    heads = work.kv_heads * (1 if moved else work.groups)
    if not moved:
        dtype = work.q_dtype
    else:
        dtype = "bfloat16" if work.pool_dtype in LARGEST and work.operation == WRITE else work.pool_dtype
    pool = jax.ShapeDtypeStruct((1, work.kv_heads, parts, work.page_size, work.head_dim), jnp.dtype(work.pool_dtype))
    return jax.ShapeDtypeStruct((work.rows, heads, work.head_dim), jnp.dtype(dtype)), pool


def kernel_of(platform: str, work: TuningJob | ProductTuningJob, blocks: Blocks, interpret: bool) -> Callable[..., Any]:
    """Returns the platform's own kernel with the given block sizes."""
    if isinstance(work, ProductTuningJob):
        return tune_products.multiplier(blocks)
    if work.operation in MOVES:
        return mover(work.operation, blocks, interpret)
    decode = work.operation == "paged_attention"
    made = PagedAttentionArgs if decode else PrefillAttentionArgs
    attend = attention_kernel(platform, decode, blocks, interpret)
    return lambda *arrays: attend(made(*arrays, scale=1.0, value_size=work.value_size))


def attention_kernel(platform: str, decode: bool, blocks: Blocks, interpret: bool) -> Callable[[Any], Array]:
    """Returns decode or prefill attention, cut by `blocks`, of one argument object."""
    if platform != "gpu":
        attend = decode_tpu.paged_attention if decode else prefill_tpu.prefill_attention
        return partial(attend, **blocks, interpret=interpret)  # type: ignore[arg-type]
    if not blocks:
        return decode_on_gpu if decode else prefill_on_gpu
    if decode:
        attend = decode_hopper.paged_attention if blocks.get(MOSAIC) else decode_gpu.paged_attention
        return partial(attend, blocks=decode_gpu.blocks_of(blocks), interpret=interpret)
    if blocks.get(MOSAIC):
        cut = prefill_hopper.Blocks(blocks["tile"], blocks["stages"])
        return partial(prefill_hopper.prefill_attention, blocks=cut, interpret=interpret)
    return partial(prefill_gpu.prefill_attention, blocks=prefill_gpu.Blocks(**blocks), interpret=interpret)


def seconds(call: Callable[..., Any], arrays: tuple[Any, ...], repeats: int) -> float | None:
    """Returns the median time of a call, after the one that compiles; None if it does not compile."""
    try:
        jax.block_until_ready(call(*arrays))
    except Exception as error:  # any error of the compiler or the device excludes this candidate only
        print(f"    passed over: {type(error).__name__} {next(iter(str(error).splitlines()), '')[:100]}")
        return None
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tune(
    platform: str, work: TuningJob | ProductTuningJob, repeats: int, interpret: bool, until: float = math.inf
) -> Blocks | None:
    """Returns the fastest candidate; {} if it is the rule's own; None if none ran, or not all by `until`."""
    arrays = arguments_of(work)
    measured = []
    for blocks in islice(candidates(platform, work), TINY_CANDIDATES if interpret else None):
        if time.perf_counter() > until:
            return None
        took = seconds(kernel_of(platform, work, blocks, interpret), arrays, repeats)
        if took is not None:
            print(f"    {took * 1e6:10.1f} us  {blocks or 'the rule'}")
            measured.append((took, blocks))
    return min(measured, key=lambda pair: pair[0])[1] if measured else None


def works_of(
    shapes: list[str], rows: list[int], context: int, dtypes: list[str], *, moves: bool = False
) -> list[TuningJob]:
    """Returns the jobs of every shape with both attentions and, on GPUs, the operations that move pages, for every
    number of rows and pair of dtypes."""
    made = []
    operations = "paged_attention", "prefill_attention", *(MOVES if moves else ())
    for shape, operation, count, pair in product(shapes, operations, rows, dtypes):
        size, kv_heads, groups, page_size, *value_size = map(int, MODELS.get(shape, shape).split("x"))
        queries, pool = pair.split("/")
        if value_size and (operation in MOVES or pool in LARGEST):
            continue  # moved as separate K and V are, and never quantised
        made.append(TuningJob(operation, size, kv_heads, groups, page_size, queries, pool, count, context, *value_size))
    return made


def platform_here(asked: str | None) -> str:
    """Returns tpu, gpu or, if requested, cpu; exits with one line on any other platform."""
    found = jax.default_backend()
    if asked == "cpu" or found in ("tpu", "gpu"):
        return asked or found
    sys.exit(f"no TPU or GPU here: {jax.devices()[0].device_kind} only; --platform=cpu tries the mechanics, tiny")


def write(path: Path, table: dict[tuple[str | int, ...], Blocks]) -> None:
    """Writes the data file, sorted, so that a new measurement is a small change."""
    rows = "".join(f"    {key!r}: {table[key]!r},\n" for key in sorted(table, key=repr))
    body = "{\n" + rows + "}" if rows else "{}"
    path.write_text(f"{HEADER}\n\nTUNED: dict[tuple[str | int, ...], dict[str, int]] = {body}\n", encoding="utf-8")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help=f"of {', '.join(MODELS)} or {SHAPE}")
    parser.add_argument("--rows", default="1,64,1024", help="slots of a decode step and tokens of a chunk")
    parser.add_argument("--dtypes", default="bfloat16/bfloat16,bfloat16/int8", help="of queries / of the pool")
    parser.add_argument("--experts", default=tune_products.EXPERTS, help=f"or {tune_products.SHAPE}; of GPUs")
    parser.add_argument("--context", type=int, default=4096, help="tokens held by each slot")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="cpu: TPU kernels interpreted, tiny")
    parser.add_argument("--dry_run", action="store_true", help="print what would be measured, measure nothing")
    parser.add_argument("--missing", action="store_true", help="only what the table has no choice for")
    parser.add_argument("--limit_s", type=float, default=math.inf, help="seconds after which nothing is begun")
    parser.add_argument("--out", type=Path, default=DATA, help="the data file to write")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    flags = parsed(arguments)
    tiny = flags.platform == "cpu"
    shapes: str = TINY if tiny else flags.shapes
    rows: str = "4" if tiny else flags.rows
    dtypes, context = flags.dtypes.split(",")[: 1 if tiny else None], 40 if tiny else flags.context
    moves = (flags.platform or ("tpu" if flags.dry_run else jax.default_backend())) == "gpu"
    counts = [int(count) for count in rows.split(",")]
    works: list[TuningJob | ProductTuningJob] = [*works_of(shapes.split(","), counts, context, dtypes, moves=moves)]
    if moves:
        works += tune_products.products_of(flags.experts.split(","), counts, dtypes)
    if flags.dry_run:
        for work in works:
            print(*work, sum(1 for _ in candidates(flags.platform or "tpu", work)), "candidates")
        return
    platform, table = platform_here(flags.platform), dict(TUNED)
    keep = not tiny or flags.out != DATA
    left = tune_all(platform, works, table, flags, tiny=tiny, keep=keep)
    if not keep:
        print("not kept: what is measured by interpretation says nothing")
        return
    print(f"{len(table)} choices in {flags.out}")
    if left:
        sys.exit(f"{len(left)} of {len(works)} not measured, --missing goes on with them; the first: {left[0]}")


def tune_all(
    platform: str,
    works: list[TuningJob | ProductTuningJob],
    table: dict[tuple[str | int, ...], Blocks],
    flags: argparse.Namespace,
    *,
    tiny: bool,
    keep: bool,
) -> list[TuningJob | ProductTuningJob]:
    """Measures into `table`, written after each job; returns the jobs that failed or were out of time."""
    left, until = [], time.perf_counter() + flags.limit_s
    for work in works:
        key = tuple(work.key() if isinstance(work, ProductTuningJob) else key_of(work.operation, *shapes_of(work)))
        if flags.missing and key in table:
            continue
        best = None
        if time.perf_counter() < until:
            print(f"{work.operation} {work}", flush=True)
            best = tune(platform, work, 1 if tiny else flags.repeats, interpret=tiny, until=until)
        if best is None:
            left.append(work)
            continue
        table[key] = best
        if keep:
            write(flags.out, table)
    return left


if __name__ == "__main__":
    main()
