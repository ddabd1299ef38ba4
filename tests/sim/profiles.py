"""A profile made up by formulas, so that what is read off it can be counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jdisagg.core.mesh_spec import MeshSpec, Schedule
from jdisagg.core.profile import DecodeTime, Host, Pool, PrefillTime, Profile, TransferTime
from jdisagg.core.worker_config import Ring, Role, Stages, WorkerConfig
from tests.sim.cases import worker

BUCKETS, BATCHES, CONTEXTS = (8, 16), (1, 2, 4), (4, 32, 64)
PAGE_BYTES, LATENCY_S, BYTES_PER_S = 512, 1e-3, 1e6


def chunk_s(bucket: int, tokens: float, context: float) -> float:
    return 1e-3 * bucket + 1e-4 * tokens + 1e-5 * context


def step_s(batch: float, context: float) -> float:
    return 2e-3 + 1e-4 * batch + 1e-5 * context


def config_of(role: Role, microbatches: int = 1, **sizes: Any) -> WorkerConfig:
    return worker(f"{role}-0", role, decode=Stages(microbatches), prefill_buckets=BUCKETS, **sizes)


def pool(role: Role, pp: int = 1, schedule: Schedule = Schedule.STAGES) -> Pool:
    """Of a ring, dispatches of one turn and of eight, which take eight times as long."""
    chunks = [(8, 1), (8, 8), (16, 9), (16, 16)] if role.prefills else []
    prefill = tuple(
        PrefillTime(bucket, tokens, context, chunk_s(bucket, tokens, context))
        for bucket, tokens in chunks
        for context in (0, 50, 100)
    )
    cells = [(batch, context) for batch in BATCHES for context in CONTEXTS] if role.decodes else []
    if schedule is Schedule.RING:
        config = replace(config_of(role), num_slots=2 * pp, decode=Ring(pp, 8))
        times = tuple(DecodeTime(32, *cell, turns * step_s(*cell), (), turns) for cell in cells for turns in (1, 8))
        return Pool(config, 1, pp, prefill, times)
    decode = tuple(DecodeTime(32, *cell, step_s(*cell), (step_s(*cell) / pp,) * pp) for cell in cells)
    return Pool(config_of(role, pp), 1, pp, prefill, decode, admit_s=5e-4)


def profile(mesh: str = "prefill:tp1,decode:tp1", **given: Any) -> Profile:
    """Made on that mesh: a pool of each of its kinds."""
    places = {(place.role, place.pp, place.schedule) for place in MeshSpec.parse(mesh).workers()}
    ship_s, sizes = LATENCY_S / 2, [(pages, pages * PAGE_BYTES) for pages in (1, 4, 16)]
    transfers = tuple(
        TransferTime("chunk", "raw", pages, size, ship_s, LATENCY_S - ship_s + size / BYTES_PER_S)
        for pages, size in sizes
    )
    made = Profile(
        machine="paper", platform="cpu", date="2026-01-01", mesh=mesh, model="formulas", dtype="float32", page_size=4,
        num_layers=4, kv_bytes_per_token=PAGE_BYTES // 4, repeats=3, host=Host(message_s=1e-5), transfers=transfers,
        pools=tuple(pool(*each) for each in sorted(places)),
    )  # fmt: skip
    return replace(made, **given)
