"""The same comparison foreseen: the jobs of a live run on simulated devices, into cells like those of the live one.

Where the seconds come from is the caller's: a cluster_spec for each architecture, of whatever cost model. The
client's and the servers' own work is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.table import Table

from benchmarks.crossover_figures import ARCHITECTURES, METRICS, RISING, Cell, Turn, cell, short, turn_s
from benchmarks.crossover_stacks import Plan
from benchmarks.figures import SLO
from benchmarks.load import Burst, Sample
from benchmarks.workload import Job
from jdisagg.core.events import EmitTokens
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.profile import Profile
from jdisagg.core.request import RequestId, WorkerId
from jdisagg.core.router_config import Routing
from jdisagg.sim.cluster import PATIENT, Cluster
from jdisagg.sim.cluster_spec import ClusterSpec
from jdisagg.sim.measured import cluster_spec_of
from jdisagg.sim.traces import Trace

FleetOf = Callable[[Plan], ClusterSpec]


class Watched(Cluster):
    """Notes when each token came: gaps between tokens are what a record of first and last does not tell."""

    def __init__(self, given: ClusterSpec, routing: str) -> None:
        router = replace(PATIENT, routing=Routing(routing))
        super().__init__(
            given.workers, given.costs, given.links, router, given.message_s, given.latency_s, fast_forward=False
        )
        self.times_s: dict[RequestId, list[float]] = {}

    def emit(self, actor: WorkerId, effect: EmitTokens) -> None:
        super().emit(actor, effect)
        self.times_s.setdefault(effect.request_id, []).append(self.now_s)


def burst(fleet_of_plan: FleetOf, plan: Plan, jobs: Sequence[Job], streams: int) -> Turn:
    """A closed loop of `streams` on fresh workers."""
    lengths = np.array([len(job.prompt) for job in jobs]), np.array([job.max_tokens for job in jobs])
    cluster = Watched(fleet_of_plan(plan), plan.routing)
    outcome = cluster.run(Trace(np.zeros(len(jobs)), *lengths), clients=streams)
    cluster.check_all_ended()
    samples = tuple(
        Sample(
            record.arrival_s,
            tuple(cluster.times_s[RequestId(record.request_id)]),
            record.end_s,
            record.input_tokens,
            record.emitted_tokens,
            record.ledger.parts_ns() if record.ledger else None,
        )
        for record in outcome.records
    )
    return Turn(Burst(streams, outcome.span_s, samples), outcome.busy)


def gangs(fleet_of_plan: FleetOf, plan: Plan, jobs: Sequence[Job], streams: int) -> Turn:
    """`streams` at once, and again when all have their answers."""
    turns = [burst(fleet_of_plan, plan, jobs[at : at + streams], streams) for at in range(0, len(jobs), streams)]
    wall_s = sum(turn.burst.wall_s for turn in turns)
    busy = {name: sum(turn.busy[name] * turn.burst.wall_s for turn in turns) / wall_s for name in turns[0].busy}
    return Turn(Burst(streams, wall_s, tuple(sample for turn in turns for sample in turn.burst.samples)), busy)


def foreseen(
    plans: Sequence[Plan],
    jobs: Mapping[tuple[str, int], Sequence[Job]],
    bursty: str,
    fleet_of_plan: FleetOf,
    slos: Mapping[str, SLO],
) -> list[Cell]:
    """A cell for each of `jobs` (by workload and streams) and each architecture; the objectives are the live run's."""
    idle = {}
    for workload, streams in sorted(jobs, key=lambda key: key[1], reverse=True):
        turn = burst(fleet_of_plan, plans[0], jobs[workload, streams], 1)
        idle[workload] = turn_s([turn.burst])
    cells = []
    for (workload, streams), asked in jobs.items():
        for plan in plans:
            ask = gangs if workload == bursty else burst
            turn = ask(fleet_of_plan, plan, asked, streams)
            cells.append(cell((workload, plan.name, streams), [turn], slos[workload], idle[workload]))
    return cells


def by_profiles(profiles: Sequence[Profile], streams: int) -> FleetOf:
    """Fleets of the profile whose decode slots are nearest to the architecture's: a turn costs by its slots.

    Workers have a core each, so that what sharing one would cost is left out. Raises ConfigError, as
    `cluster_spec_of` does.
    """

    def fleet_of_plan(plan: Plan) -> ClusterSpec:
        wanted = plan.slots(streams)
        nearest = min(profiles, key=lambda profile: abs(_slots(profile) - wanted))
        return cluster_spec_of(replace(nearest, slowdown={}), MeshSpec.parse(plan.simulated))

    return fleet_of_plan


def _slots(profile: Profile) -> int:
    return max((pool.config.num_slots for pool in profile.pools if pool.decode), default=0)


def beside(workload: str, live: Sequence[Cell], simulated: Sequence[Cell]) -> Table:
    """Live and simulated medians, one pair of columns a metric, and how far apart they are in the mean."""
    pairs = _pairs(workload, live, simulated)
    table = Table(title=f"{workload}: live / simulated")
    for name in ("streams", "", *METRICS.values()):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for ours, theirs in pairs:
        both = [(getattr(ours, metric).mid, getattr(theirs, metric).mid) for metric in METRICS]
        table.add_row(str(ours.streams), ours.architecture, *(f"{short(a)} / {short(b)}" for a, b in both))
    table.add_section()
    table.add_row("", "mean error", *(f"{error(pairs, metric):.0%}" for metric in METRICS))
    return table


def error(pairs: Sequence[tuple[Cell, Cell]], metric: str) -> float:
    """Mean of |simulated - live| / live."""
    found = [(getattr(a, metric).mid, getattr(b, metric).mid) for a, b in pairs]
    shares = [abs(simulated - live) / live for live, simulated in found if live > 0]
    return sum(shares) / len(shares) if shares else float("nan")


def same_winners(live: Sequence[Cell], simulated: Sequence[Cell]) -> str:
    """How often the simulation names the architecture that was best live; where two were even, either is right."""
    right = asked = 0
    workloads = dict.fromkeys(each.workload for each in live)
    for metric in METRICS:
        for workload in workloads:
            pairs = _pairs(workload, live, simulated)
            for streams in sorted({ours.streams for ours, _ in pairs}):
                here = [pair for pair in pairs if pair[0].streams == streams]
                sign = -1.0 if metric in RISING else 1.0
                best, _ = min(here, key=lambda pair: sign * getattr(pair[0], metric).mid)
                named, _ = min(here, key=lambda pair: sign * getattr(pair[1], metric).mid)
                asked += 1
                right += not getattr(best, metric).apart(getattr(named, metric))
    return f"the simulation names the best architecture in {right} of {asked} comparisons"


def _pairs(workload: str, live: Sequence[Cell], simulated: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    by_key = {(each.workload, each.architecture, each.streams): each for each in simulated}
    found = [
        (each, by_key[each.workload, each.architecture, each.streams])
        for each in live
        if each.workload == workload and (each.workload, each.architecture, each.streams) in by_key
    ]
    return sorted(found, key=lambda pair: (pair[0].streams, ARCHITECTURES.index(pair[0].architecture)))
