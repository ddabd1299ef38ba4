"""Costs from a profile: the measured times of the user's devices, interpolated.

A chunk's seconds depend on its bucket, its tokens and the context before them. Several prompts in one chunk count as
one with as many attention pairs. A step's seconds depend on its batch and the mean context of its slots. Values
between cells are interpolated linearly; beyond the table the last line continues without falling. No value is below
the least that was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.layout.stages import split_prefill
from jdisagg.core.mesh_spec import MeshSpec, Schedule, WorkerMesh
from jdisagg.core.profile import DecodeTime, Host, Pool, PrefillTime, Profile, TransferTime
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.core.worker_config import RAW, Role, TransferMode, WorkerConfig
from jdisagg.sim.cluster_spec import ClusterSpec, longest
from jdisagg.sim.links import FairLinks
from jdisagg.sim.traces import Trace

NOTICEABLE = 0.03  # smaller slowdowns are within the noise: the devices count as independent


class PiecewiseFit:
    """A piecewise linear function through points; the y of equal x are averaged."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        points_by_x: dict[float, list[float]] = {}
        for x, y in points:
            points_by_x.setdefault(x, []).append(y)
        self.xs = sorted(points_by_x)
        self.ys = [sum(points_by_x[x]) / len(points_by_x[x]) for x in self.xs]
        assert self.xs, "a line has a point"

    def at(self, x: float) -> float:
        """Returns the value at x; beyond the ends the line does not fall with x."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        index = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        slope = (ys[index] - ys[index - 1]) / (xs[index] - xs[index - 1])
        if not xs[0] <= x <= xs[-1]:
            slope = max(0.0, slope)
        start = index if x > xs[-1] else index - 1
        return ys[start] + slope * (x - xs[start])


class SurfaceFit:
    """Seconds over (x, y): lines along y at each measured x, interpolated between these."""

    def __init__(self, cells: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, seconds in cells:
            rows.setdefault(x, []).append((y, seconds))
        self.rows = [(x, PiecewiseFit(points)) for x, points in sorted(rows.items())]
        self.least_s = min(min(line.ys) for _, line in self.rows)

    def at(self, x: float, y: float) -> float:
        xs = [each for each, _ in self.rows]
        index = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        neighbours = self.rows[max(0, index - 1) : index + 1]
        return max(self.least_s, PiecewiseFit((each, line.at(y)) for each, line in neighbours).at(x))


@dataclass(frozen=True, slots=True)
class TransferFit:
    """The linear model of a KV part's seconds, from packing to its pages."""

    latency_s: float
    bytes_per_s: float | None  # None: its size did not matter


@dataclass(frozen=True)
class ProfileCost:
    """One worker's costs from measurements; implements `CostModel`."""

    chunks: tuple[tuple[int, SurfaceFit], ...]  # by bucket, ascending: over tokens and context
    steps: SurfaceFit | None  # over batch and context per slot
    host: Host
    admit_s: float
    page_bytes: float  # of all layers
    num_layers: int
    most_turns: int = 1  # steps per dispatch of the longest dispatch
    long_steps: SurfaceFit | None = None  # times of the longest dispatch

    def prefill_s(self, plan: PrefillChunks) -> float:
        tokens = max(1, plan.num_tokens)
        pairs = sum((chunk.start + len(chunk.tokens)) ** 2 - chunk.start**2 for chunk in plan.chunks) / 2
        context = pairs / tokens - tokens / 2  # of one chunk with as many pairs
        assert self.chunks, "a worker that prefills has times of chunks"
        fitting = [surface for size, surface in self.chunks if size >= plan.bucket_tokens]
        surface = fitting[0] if fitting else self.chunks[-1][1]
        return self.host.prefill_s + surface.at(tokens, context)

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        """Returns the seconds of a mixed step. They are those of the chunks' step with one more row per decode
        sequence, plus the decode rows' reads beyond their first page."""
        assert self.steps is not None, "a worker that decodes has times of steps"
        batch, tokens = max(1, len(decode.active)), max(1, prefill.num_tokens)
        read_s = self.steps.at(batch, context_tokens / batch) - self.steps.at(batch, 0)
        row_s = self.prefill_s(prefill) / tokens
        return self.prefill_s(prefill) + batch * row_s + max(0.0, read_s) + (self.admit_s if decode.admit else 0.0)

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        assert self.steps is not None, "a worker that decodes has times of steps"
        batch, turns = max(1, len(plan.active)), plan.num_turns
        joined_s = self.admit_s if plan.admit else 0.0
        return self.host.decode_s + joined_s + self._turns_s(turns, batch, context_tokens / batch)

    def _turns_s(self, turns: int, batch: int, context: float) -> float:
        """Interpolates between a dispatch of one step and the longest dispatch."""
        assert self.steps is not None, "a worker that decodes has times of steps"
        one_s = self.steps.at(batch, context)
        if turns == 1 or self.long_steps is None:
            return one_s
        return one_s + (self.long_steps.at(batch, context) - one_s) * (turns - 1) / (self.most_turns - 1)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        """Returns the bytes of whole pages, as they are sent."""
        first, stop = transfer.layers or (0, self.num_layers)
        return self.page_bytes * len(transfer.source_pages) * (stop - first) / self.num_layers


def chunk_surfaces(times: Sequence[PrefillTime]) -> tuple[tuple[int, SurfaceFit], ...]:
    buckets = sorted({each.bucket_tokens for each in times})
    return tuple(
        (size, SurfaceFit((each.tokens, each.context, each.seconds) for each in times if each.bucket_tokens == size))
        for size in buckets
    )


def step_surface(times: Sequence[DecodeTime], turns: int = 1) -> SurfaceFit | None:
    """Returns the times of dispatches with `turns` steps."""
    points = [(each.batch, each.context, each.seconds) for each in times if each.turns == turns]
    return SurfaceFit(points) if points else None


def transfer_line_of(transfers: Sequence[TransferTime], wire: str = RAW) -> TransferFit:
    """Fits the line with the least relative error; if it would fall, no part is faster than the median."""
    matching = [each for each in transfers if each.wire == wire]
    if not matching:
        return TransferFit(0.0, None)
    sizes = np.array([each.size_bytes for each in matching], np.float64)
    seconds = np.array([each.seconds for each in matching])
    slope, latency_s = np.polyfit(sizes, seconds, 1, w=1.0 / seconds) if len(set(sizes)) > 1 else (0.0, 0.0)
    if slope <= 0.0 or latency_s < 0.0:
        return (
            TransferFit(float(np.median(seconds)), None)
            if slope <= 0.0
            else TransferFit(0.0, float(np.median(sizes / seconds)))
        )
    return TransferFit(float(latency_s), float(1.0 / slope))


def cluster_spec_of(
    profile: Profile, mesh: MeshSpec, transfer: TransferMode | None = None, *, prefix_caching: bool = False
) -> ClusterSpec:
    """Workers of the profile's own sizes on any mesh whose kinds of workers it has times for. Raises ConfigError. Times
    of chunks and of steps may come from pools of other roles: what counts is the devices of one stage."""
    transfer_line = transfer_line_of(profile.transfers)
    workers, costs, ports = [], {}, {}
    for place in mesh.workers():
        config, costs[place.worker] = _worker(profile, place)
        workers.append(replace(config, transfer=transfer or config.transfer, prefix_caching=prefix_caching))
        ports |= {
            (side, place.worker): transfer_line.bytes_per_s for side in ("out", "in") if transfer_line.bytes_per_s
        }
    slowdown = {
        phase: {other: share for other, share in row.items() if share > NOTICEABLE}
        for phase, row in profile.slowdown.items()
    }
    return ClusterSpec(
        tuple(workers), costs, FairLinks(ports), slowdown=slowdown if any(slowdown.values()) else {},
        message_s=profile.host.message_s, latency_s=transfer_line.latency_s,
    )  # fmt: skip


def check_fits(cluster_spec: ClusterSpec, trace: Trace) -> None:
    """Raises ConfigError for a request that is longer than these workers accept."""
    most = min(config.max_model_len for config in cluster_spec.workers)
    if longest(trace) > most:
        raise ConfigError(
            f"the trace has requests of {longest(trace)} tokens, the profile is of workers that take {most}:"
            f" --max_model_len={most} leaves the longer ones out"
        )


def _worker(profile: Profile, place: WorkerMesh) -> tuple[WorkerConfig, ProfileCost]:
    role = place.role
    prefills = [each for each in _like(profile, place) if each.prefill] if role.prefills else []
    decodes = [each for each in _like(profile, place) if each.decode and _stages(each.config) == _schedule(place)]
    if (role.prefills and not prefills) or (role.decodes and not decodes):
        pools = ", ".join(
            f"{each.config.role}:{_schedule_name(each.config)}{each.pp}tp{each.tp}" for each in profile.pools
        )
        is_it = f"{'ring' if place.schedule is Schedule.RING else 'pp'}{place.pp}tp{place.tp}"
        raise ConfigError(f"{place.worker} is {role}:{is_it}; the profile is of {pools}")
    chosen = decodes[0] if role.decodes else prefills[0]
    config = replace(chosen.config, worker=place.worker, role=role, **_prefill_stages(profile, place, chosen.config))
    cost = ProfileCost(
        chunks=chunk_surfaces(prefills[0].prefill) if role.prefills else (),
        steps=step_surface(decodes[0].decode) if role.decodes else None,
        host=profile.host,
        admit_s=chosen.admit_s,
        page_bytes=profile.kv_bytes_per_token * chosen.config.page_size,
        num_layers=profile.num_layers,
        most_turns=chosen.config.decode.steps_per_dispatch,
        long_steps=step_surface(chosen.decode, chosen.config.decode.steps_per_dispatch),
    )
    return config, cost


def _prefill_stages(profile: Profile, place: WorkerMesh, like: WorkerConfig) -> dict[str, Any]:
    """Returns the stage fields of a prefill worker. A chunk's measured time is that of all stages, which share it."""
    if not (place.role is Role.PREFILL and place.pp > 1):
        return {"prefill_stages": 1}
    groups = tuple((run.start, run.stop) for run in split_prefill(profile.num_layers, place.pp))
    ahead = like.chunks_in_flight - like.prefill_stages
    return {"prefill_stages": place.pp, "chunks_in_flight": place.pp + ahead, "layer_groups": groups}


def _stages(config: WorkerConfig) -> tuple[int, int]:
    """Returns the stages of separate programs, and those of a ring."""
    return (1, config.decode.n) if config.is_ring else (config.decode.n, 1)


def _schedule(place: WorkerMesh) -> tuple[int, int]:
    return (1, place.pp) if place.schedule is Schedule.RING else (place.pp, 1)


def _schedule_name(config: WorkerConfig) -> str:
    return "ring" if config.is_ring else "pp"


def _like(profile: Profile, place: WorkerMesh) -> list[Pool]:
    """Returns the pools of the same tp, those of the same role first."""
    return sorted(
        (each for each in profile.pools if each.tp == place.tp), key=lambda each: each.config.role != place.role
    )
