"""The attention kernels against their floors on the device at hand: `python benchmarks/kernels.py --output=FILE.json`.

Decode attention is held against copying the pages it reads, prefill attention against the f32 matmul rate, each pair
interleaved in this run. `best` is the least time of all rounds, what a quiet machine gives; `median` says how noisy
this one was, and `cpu` is the ratio in CPU seconds, which other people's jobs disturb least.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention, prefill_attention

LAYERS = 8
HEAD_DIM = 64
HEADS = [(8, 4), (12, 4)]  # query heads, KV heads
PAGE_SIZES = [16, 32, 64]
DECODE_TOKENS = [128, 512, 2048]
# name: rows of q and tokens held of each sequence, rows of padding
PREFILL = {
    "8 x 128": ([(128, 128)] * 8, 0),
    "8 x 128, 512 held": ([(128, 512)] * 8, 0),
    "1 x 1024": ([(1024, 1024)], 0),
    "256 of 2048": ([(256, 2048)], 0),
    "16 x 32, half padding": ([(32, 32)] * 16, 512),
}


@dataclass
class Row:
    """One measurement: `reached` and `floor` in ms for decode, in GFLOP/s for prefill; `ratio` to the floor."""

    operation: str
    shape: str
    page_size: int
    unit: str
    reached: float
    floor: float
    ratio: float
    cpu_ratio: float  # the same, of the process's CPU seconds
    median: float


def interleave(calls: list[Callable[[], object]], rounds: int) -> np.ndarray:
    """Seconds [calls, (wall, CPU), rounds], the calls taking turns, after one round that compiles."""
    seconds = np.zeros((len(calls), 2, rounds + 1))
    for turn in range(rounds + 1):
        for index, call in enumerate(calls):
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            seconds[index, :, turn] = time.perf_counter() - wall, time.process_time() - cpu
    return seconds[:, :, 1:]


def make_pools(page_size: int, kv_heads: int, held: list[int]) -> tuple[list[jax.Array], jax.Array]:
    """LAYERS pools f32 that hold these lengths, their pages scattered, and the table i32[rows, W]."""
    rng = np.random.default_rng(0)
    needed = [-(-tokens // page_size) for tokens in held]
    order = iter(rng.permutation(np.arange(1, sum(needed) + 1)))
    table = np.zeros((len(held), max(needed)), np.int32)
    for row, pages in enumerate(needed):
        table[row, :pages] = [next(order) for _ in range(pages)]
    shape = (sum(needed) + 1, kv_heads, 2, page_size, HEAD_DIM)
    pools = [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(LAYERS)]
    return pools, jnp.asarray(table)


def copy_pages(pools: list[jax.Array], into: np.ndarray, ids: np.ndarray) -> None:
    """The pages of one layer after another into a buffer that is mapped already, page by page."""
    for pool in pools:
        np.take(np.asarray(pool), ids, axis=0, out=into, mode="clip")


def measure_decode(page_size: int, heads: tuple[int, int], held: list[int], rounds: int) -> Row:
    pools, table = make_pools(page_size, heads[1], held)
    lengths = jnp.asarray(held, jnp.int32)
    q = jnp.ones((len(held), heads[0], HEAD_DIM))

    @jax.jit
    def layers(q: jax.Array, pools: list[jax.Array]) -> jax.Array:
        for pool in pools:
            q = q + paged_attention(q, pool, table, lengths)
        return q

    ids = np.asarray(table)[np.asarray(table) > 0]
    into = np.zeros((len(ids), *pools[0].shape[1:]), np.float32)
    times = interleave([partial(layers, q, pools), partial(copy_pages, pools, into, ids)], rounds) / LAYERS * 1e3
    (best, cpu), (floor, cpu_floor) = times.min(axis=2).tolist()
    shape = f"{heads[0]}/{heads[1]} heads, {len(held)} slots, " + (f"{min(held)}-" * (min(held) < max(held)))
    ratios = best / floor, cpu / cpu_floor
    median = statistics.median(times[0, 0].tolist())
    return Row("paged_attention", f"{shape}{max(held)} tokens", page_size, "ms", best, floor, *ratios, median)


def measure_prefill(page_size: int, heads: tuple[int, int], name: str, rounds: int) -> Row:
    packed, padding = PREFILL[name]
    pools, table = make_pools(page_size, heads[1], [held for _, held in packed])
    cu_q_lens = np.cumsum([0] + [rows for rows, _ in packed]).astype(np.int32)
    q = jnp.ones((int(cu_q_lens[-1]) + padding, heads[0], HEAD_DIM))
    packing = (table, jnp.asarray([held for _, held in packed], jnp.int32), jnp.asarray(cu_q_lens))

    @jax.jit
    def layers(q: jax.Array, pools: list[jax.Array]) -> jax.Array:
        for pool in pools:
            q = q + prefill_attention(q, pool, *packing)
        return q

    square = jnp.ones((1024, 1024))
    product = jax.jit(lambda x: (x @ x) @ x)
    times = interleave([partial(layers, q, pools), partial(product, square)], rounds)
    # two products of 2 * D a query head for each key that a row sees
    seen = sum(rows * held - rows * (rows - 1) / 2 for rows, held in packed)
    giga = 4 * HEAD_DIM * heads[0] * seen * LAYERS / 1e9
    (rate, cpu), (floor, cpu_floor) = (np.asarray([[giga], [4 * 1024**3 / 1e9]]) / times.min(axis=2)).tolist()
    ratios = rate / floor, cpu / cpu_floor
    median = giga / statistics.median(times[0, 0].tolist())
    shape = f"{heads[0]}/{heads[1]} heads, {name}"
    return Row("prefill_attention", shape, page_size, "GFLOP/s", rate, floor, *ratios, median)


def measure(rounds: int, quick: bool) -> list[Row]:
    rows = []
    for heads in HEADS[:1] if quick else HEADS:
        for page_size in PAGE_SIZES[:1] if quick else PAGE_SIZES:
            lengths = [[tokens] * 8 for tokens in DECODE_TOKENS] + [list(range(64, 577, 73))]
            rows += [measure_decode(page_size, heads, held, rounds) for held in lengths[: 1 if quick else None]]
        rows += [measure_prefill(16, heads, name, rounds) for name in list(PREFILL)[: 1 if quick else None]]
    return rows


def print_table(rows: list[Row]) -> None:
    heads = f"{'best':>9} {'floor':>9} {'ratio':>6} {'cpu':>6} {'median':>9}"
    print(f"{'operation':18} {'shape':44} {'page':>4} {heads}  unit")
    for row in rows:
        figures = f"{row.reached:9.3f} {row.floor:9.3f} {row.ratio:6.2f} {row.cpu_ratio:6.2f} {row.median:9.3f}"
        print(f"{row.operation:18} {row.shape:44} {row.page_size:4} {figures}  {row.unit}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file for the rows, the device and the versions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one shape of each operation")
    options = parser.parse_args(arguments)
    rows = measure(options.rounds, options.quick)
    print_table(rows)
    if options.output is not None:
        record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
        record |= {"command": f"python benchmarks/kernels.py {' '.join(arguments)}"}
        options.output.write_text(json.dumps(record | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
