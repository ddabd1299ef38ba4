"""Costs from tables of measured kernels: the times of one layer's parts on one device, interpolated between points.

A folder holds three files (LLMServingSim's profiler writes them; times in microseconds, of one layer and one shard):
dense.csv.gz (layer, tokens, time_us), per_sequence.csv.gz (layer, sequences, time_us) and attention.csv.gz
(prefill_chunk, kv_prefill, n_decode, kv_decode, time_us). Attention is measured as engines run it: a chunk that runs
beside decoding sequences uses another kernel than either alone, and takes up to twice the sum of both.
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

from jdisagg.core.errors import ConfigError
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.sim.cost_models import Model, all_reduce_s, num_sampled

TABLES = Path(__file__).parent / "data" / "kernels"
EACH_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
ONCE = ("embedding", "final_layernorm")
EACH_SEQUENCE = ("lm_head", "sampler")
Point = tuple[float, ...]


class MeasuredTable:
    """Measured seconds at every point of a grid, interpolated linearly and extrapolated above the last points."""

    def __init__(self, rows: dict[Point, float]) -> None:
        """Builds the axes from the coordinates. Raises ConfigError if points of the full grid are missing."""
        self.axes = [sorted({point[axis] for point in rows}) for axis in range(len(next(iter(rows))))]
        missing = prod(map(len, self.axes)) - len(rows)
        if missing:
            raise ConfigError(
                f"a table of {len(rows)} points lacks {missing} of its grid of {list(map(len, self.axes))}"
            )
        self._seconds = rows

    def at(self, *point: float) -> float:
        """Returns the seconds at a point; below the first point of an axis they are those of that point."""
        sides = [_between(axis, value) for axis, value in zip(self.axes, point, strict=True)]
        total = 0.0
        for corner in product(*sides):
            total += prod(weight for _, weight in corner) * self._seconds[tuple(value for value, _ in corner)]
        return total


def _between(axis: Sequence[float], value: float) -> tuple[tuple[float, float], ...]:
    """Returns the points of the axis on both sides of `value`, and the weight of each."""
    if value <= axis[0] or len(axis) == 1:
        return ((axis[0], 1.0),)
    right = min(bisect_right(axis, value), len(axis) - 1)
    low, high = axis[right - 1], axis[right]
    share = (value - low) / (high - low)
    return ((low, 1.0 - share), (high, share)) if share else ((low, 1.0),)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """One device's tables, of one model at one tp. Times in seconds."""

    linear: MeasuredTable  # (tokens): a layer's work other than attention
    once: MeasuredTable  # (tokens): what is done before and after all layers
    head: MeasuredTable  # (sequences)
    prefill: MeasuredTable  # (chunk tokens, KV tokens before it)
    decode: MeasuredTable  # (sequences, KV tokens of each)
    mixed: MeasuredTable  # both

    def attention_s(self, prefill: PrefillChunks | None, batch: int, context_tokens: int) -> float:
        """Returns the seconds of one layer. Several chunks count as one with as many pairs, sequences as their mean."""
        if prefill is None:
            return self.decode.at(batch, context_tokens / batch)
        chunk, before = _as_one(prefill)
        if not batch:
            return self.prefill.at(chunk, before)
        return self.mixed.at(chunk, before, batch, context_tokens / batch)


def _as_one(plan: PrefillChunks) -> tuple[float, float]:
    """Returns (tokens, KV tokens before) of one chunk with the tokens and attention pairs of the plan's chunks."""
    tokens = plan.num_tokens
    ends = ((chunk.start, chunk.start + len(chunk.tokens)) for chunk in plan.chunks)
    pairs = sum(end**2 - start**2 for start, end in ends) / 2
    return tokens, max(0.0, pairs / tokens - tokens / 2)


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Costs of `tp` devices of one kind. With tp > 1, two all-reduces per layer take `link_s` plus their bytes."""

    model: Model
    kernels: KernelTimes
    tp: int = 1
    host_s: float = 1e-3  # host time per step
    link_bytes_per_s: float = 16e9
    link_s: float = 20e-6

    def prefill_s(self, plan: PrefillChunks) -> float:
        return self._step_s(plan, 0, 0)

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        return self._step_s(None, len(plan.active), context_tokens)

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        return self._step_s(prefill, len(decode.active), context_tokens)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.model.part_bytes(transfer)

    def _step_s(self, prefill: PrefillChunks | None, batch: int, context_tokens: int) -> float:
        rows = batch + (prefill.num_tokens if prefill else 0)
        sequences = batch + (num_sampled(prefill) if prefill else 0)
        layer_s = self.kernels.linear.at(rows) + self.kernels.attention_s(prefill, batch, context_tokens)
        config = self.model.config
        reduce_s = all_reduce_s(self.model.row_bytes(rows), self.tp, self.link_bytes_per_s, self.link_s)
        head_s = self.kernels.head.at(sequences) if sequences else 0.0
        return self.host_s + config.num_layers * (layer_s + 2 * reduce_s) + self.kernels.once.at(rows) + head_s


@cache
def read_kernels(folder: Path | str) -> KernelTimes:
    """Reads the tables of a folder. Raises ConfigError if a file, a column or a layer is missing."""
    dense, heads = (
        _curves(Path(folder) / name, by) for name, by in (("dense", "tokens"), ("per_sequence", "sequences"))
    )
    rows = _rows(Path(folder) / "attention", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
    alone = {point[:2]: seconds for point, seconds in rows.items() if not point[2]}
    steps = {point[2:]: seconds for point, seconds in rows.items() if not point[0]}
    mixed = {point: seconds for point, seconds in rows.items() if point[0] and point[2]}
    return KernelTimes(
        linear=_sum(dense, EACH_LAYER),
        once=_sum(dense, dict.fromkeys(ONCE, 1)),
        head=_sum(heads, dict.fromkeys(EACH_SEQUENCE, 1)),
        prefill=MeasuredTable(_powers(alone)),
        decode=MeasuredTable(_powers(steps)),
        mixed=MeasuredTable(_powers(mixed)),
    )


def shipped_kernels(device: str, model_name: str, tp: int = 1) -> KernelTimes:
    """Reads tables that come with the simulator: rtxpro6000 and rtx4090, of llama3-8b at tp 1. Raises ConfigError."""
    name = f"{device}-{model_name}-tp{tp}"
    if not (TABLES / name).is_dir():
        raise ConfigError(
            f"no kernel tables {name!r}; there are {', '.join(sorted(each.name for each in TABLES.iterdir()))}"
        )
    return read_kernels(TABLES / name)


def _powers(rows: dict[Point, float]) -> dict[Point, float]:
    """Returns the rows whose coordinates are powers of two or 0; the others are denser and form no grid."""
    return {point: seconds for point, seconds in rows.items() if all(int(x) & (int(x) - 1) == 0 for x in point)}


def _rows(path: Path, columns: Sequence[str]) -> dict[Point, float]:
    """Returns the seconds by the named columns."""
    return {tuple(map(float, row[:-1])): float(row[-1]) / 1e6 for row in _read(path, [*columns, "time_us"])}


def _curves(path: Path, by: str) -> dict[str, dict[Point, float]]:
    """Returns the seconds by layer, and by tokens or sequences."""
    curves: dict[str, dict[Point, float]] = {}
    for layer, size, micros in _read(path, ["layer", by, "time_us"]):
        curves.setdefault(layer, {})[(float(size),)] = float(micros) / 1e6
    return curves


def _sum(curves: dict[str, dict[Point, float]], times: dict[str, int]) -> MeasuredTable:
    missing = [name for name in times if name not in curves]
    if missing:
        raise ConfigError(f"a table of {', '.join(curves)} lacks {', '.join(missing)}")
    points = next(iter(curves.values()))
    return MeasuredTable({point: sum(many * curves[name][point] for name, many in times.items()) for point in points})


def _read(path: Path, columns: list[str]) -> Iterable[list[str]]:
    path = path.with_name(f"{path.name}.csv.gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in columns if name not in (rows.fieldnames or ())]:
                raise ConfigError(f"{path}: no column {', '.join(missing)} among {rows.fieldnames}")
            yield from ([row[name] for name in columns] for row in rows)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
