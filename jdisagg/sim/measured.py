"""Costs read off a profile: what the user's own devices took, interpolated between what was timed.

A chunk's seconds depend on its bucket, its tokens and the context before them; several prompts in one chunk count as
one with as many pairs of tokens to attend. A step's depend on its batch and on the mean context of its slots. Between
cells lines; beyond the table the last line goes on, never falling; nothing is faster than the least that was measured.
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

NOTICEABLE = 0.03  # a slowdown under this is not told from chance: the devices are independent


class Line:
    """Points joined by lines. Equal x: the mean of their y."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        found: dict[float, list[float]] = {}
        for x, y in points:
            found.setdefault(x, []).append(y)
        self.xs = sorted(found)
        self.ys = [sum(found[x]) / len(found[x]) for x in self.xs]
        assert self.xs, "a line has a point"

    def at(self, x: float) -> float:
        """Beyond the ends the line does not fall with x."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        index = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        slope = (ys[index] - ys[index - 1]) / (xs[index] - xs[index - 1])
        if not xs[0] <= x <= xs[-1]:
            slope = max(0.0, slope)
        start = index if x > xs[-1] else index - 1
        return ys[start] + slope * (x - xs[start])


class Surface:
    """Seconds over (x, y): lines along y at each x that was timed, and a line between these."""

    def __init__(self, cells: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, seconds in cells:
            rows.setdefault(x, []).append((y, seconds))
        self.rows = [(x, Line(points)) for x, points in sorted(rows.items())]
        self.least_s = min(min(line.ys) for _, line in self.rows)

    def at(self, x: float, y: float) -> float:
        known = [each for each, _ in self.rows]
        index = min(max(bisect_left(known, x), 1), len(known) - 1)
        near = self.rows[max(0, index - 1) : index + 1]
        return max(self.least_s, Line((each, line.at(y)) for each, line in near).at(x))


@dataclass(frozen=True, slots=True)
class TransferLine:
    """Of a part of KV, from packing to its pages."""

    latency_s: float
    bytes_per_s: float | None  # None: its size did not matter


@dataclass(frozen=True)
class Measured:
    """One worker's costs; implements `CostModel`."""

    chunks: tuple[tuple[int, Surface], ...]  # by bucket, ascending: over tokens and context
    steps: Surface | None  # over batch and context a slot
    host: Host
    admit_s: float
    page_bytes: float  # of all layers
    num_layers: int
    most_turns: int = 1  # of a ring's dispatch,
    long_steps: Surface | None = None  # and what these take

    def prefill_s(self, plan: PrefillChunks) -> float:
        tokens = max(1, plan.num_tokens)
        pairs = sum((chunk.start + len(chunk.tokens)) ** 2 - chunk.start**2 for chunk in plan.chunks) / 2
        context = pairs / tokens - tokens / 2  # of one chunk with as many pairs
        assert self.chunks, "a worker that prefills has times of chunks"
        fitting = [surface for size, surface in self.chunks if size >= plan.bucket_tokens]
        surface = fitting[0] if fitting else self.chunks[-1][1]
        return self.host.prefill_s + surface.at(tokens, context)

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        """The chunks' step with as many rows more as sequences decode, and what these read beyond their first page."""
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
        """On the line between one turn and the most."""
        assert self.steps is not None, "a worker that decodes has times of steps"
        one_s = self.steps.at(batch, context)
        if turns == 1 or self.long_steps is None:
            return one_s
        return one_s + (self.long_steps.at(batch, context) - one_s) * (turns - 1) / (self.most_turns - 1)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        """Of whole pages, as they travel."""
        first, stop = transfer.layers or (0, self.num_layers)
        return self.page_bytes * len(transfer.source_pages) * (stop - first) / self.num_layers


def chunk_surfaces(times: Sequence[PrefillTime]) -> tuple[tuple[int, Surface], ...]:
    buckets = sorted({each.bucket_tokens for each in times})
    return tuple(
        (size, Surface((each.tokens, each.context, each.seconds) for each in times if each.bucket_tokens == size))
        for size in buckets
    )


def step_surface(times: Sequence[DecodeTime], turns: int = 1) -> Surface | None:
    """Of steps of so many turns."""
    found = [(each.batch, each.context, each.seconds) for each in times if each.turns == turns]
    return Surface(found) if found else None


def transfer_line_of(transfers: Sequence[TransferTime], wire: str = RAW) -> TransferLine:
    """The line that is nearest in relative error; where that would fall, no part is faster than the median."""
    found = [each for each in transfers if each.wire == wire]
    if not found:
        return TransferLine(0.0, None)
    sizes = np.array([each.size_bytes for each in found], np.float64)
    seconds = np.array([each.seconds for each in found])
    slope, latency_s = np.polyfit(sizes, seconds, 1, w=1.0 / seconds) if len(set(sizes)) > 1 else (0.0, 0.0)
    if slope <= 0.0 or latency_s < 0.0:
        return (
            TransferLine(float(np.median(seconds)), None)
            if slope <= 0.0
            else TransferLine(0.0, float(np.median(sizes / seconds)))
        )
    return TransferLine(float(latency_s), float(1.0 / slope))


# ---------------------------------------------------------------------- from a profile to a cluster spec


def cluster_spec_of(
    profile: Profile, mesh: MeshSpec, transfer: TransferMode | None = None, *, prefix_caching: bool = False
) -> ClusterSpec:
    """Workers of the profile's own sizes on any mesh whose kinds of workers it has times for. Raises ConfigError.

    Times of chunks and of steps may come from pools of other roles: what counts is the devices of one stage.
    """
    way = transfer_line_of(profile.transfers)
    workers, costs, ports = [], {}, {}
    for place in mesh.workers():
        config, costs[place.worker] = _worker(profile, place)
        workers.append(replace(config, transfer=transfer or config.transfer, prefix_caching=prefix_caching))
        ports |= {(side, place.worker): way.bytes_per_s for side in ("out", "in") if way.bytes_per_s}
    slowdown = {
        phase: {other: share for other, share in row.items() if share > NOTICEABLE}
        for phase, row in profile.slowdown.items()
    }
    return ClusterSpec(
        tuple(workers), costs, FairLinks(ports), slowdown=slowdown if any(slowdown.values()) else {},
        message_s=profile.host.message_s, latency_s=way.latency_s,
    )  # fmt: skip


def check_fits(cluster_spec: ClusterSpec, trace: Trace) -> None:
    """Raises ConfigError for a request that is longer than these workers take."""
    most = min(config.max_model_len for config in cluster_spec.workers)
    if longest(trace) > most:
        raise ConfigError(
            f"the trace has requests of {longest(trace)} tokens, the profile is of workers that take {most}:"
            f" --max_model_len={most} leaves the longer ones out"
        )


def _worker(profile: Profile, place: WorkerMesh) -> tuple[WorkerConfig, Measured]:
    role = place.role
    prefills = [each for each in _like(profile, place) if each.prefill] if role.prefills else []
    decodes = [each for each in _like(profile, place) if each.decode and _stages(each.config) == _schedule(place)]
    if (role.prefills and not prefills) or (role.decodes and not decodes):
        pools = ", ".join(f"{each.config.role}:{_word(each.config)}{each.pp}tp{each.tp}" for each in profile.pools)
        is_it = f"{'ring' if place.schedule is Schedule.RING else 'pp'}{place.pp}tp{place.tp}"
        raise ConfigError(f"{place.worker} is {role}:{is_it}; the profile is of {pools}")
    chosen = decodes[0] if role.decodes else prefills[0]
    config = replace(chosen.config, worker=place.worker, role=role, **_prefill_stages(profile, place, chosen.config))
    cost = Measured(
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
    """A chunk's time is that of all stages, wherever it was taken: a pipeline divides it."""
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


def _word(config: WorkerConfig) -> str:
    return "ring" if config.is_ring else "pp"


def _like(profile: Profile, place: WorkerMesh) -> list[Pool]:
    """Pools of the same tp, those of the same role first."""
    return sorted(
        (each for each in profile.pools if each.tp == place.tp), key=lambda each: each.config.role != place.role
    )
