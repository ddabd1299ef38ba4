# %% [markdown]
# # A routing policy of your own
#
# Which prefill and which decode worker take a request is a pure function over snapshots of the workers. Here is another
# one in twenty lines: power of two choices. It is run in the simulator, and then by the live stack.

# %%
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import jdisagg
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.router_config import Routing
from jdisagg.policy.router import pair_selection, routing
from jdisagg.policy.router.routing import Choice, RoutingRequest, WorkerSnapshot
from jdisagg.sim.cluster import PATIENT
from jdisagg.sim.cluster_spec import by_roofline, cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces.trace import poisson
from jdisagg.sim.traces.workloads import read_workload


# %% The policy: of two workers of each role, drawn by the request's name, the one with less work.
def two_choices(
    snapshots: Sequence[WorkerSnapshot], routed: RoutingRequest | None = None, named: Routing | None = None
) -> Choice:
    """The least loaded of two; of all, where those two have no room."""
    name = routed.request_id if routed else ""

    def place(snapshot: WorkerSnapshot) -> bytes:
        return blake2b(f"{name}/{snapshot.worker}".encode()).digest()

    drawn = []
    for role in {snapshot.role for snapshot in snapshots}:
        able = [snapshot for snapshot in snapshots if snapshot.role is role and snapshot.has_room]
        drawn += sorted(able, key=place)[:2]
    return routing.choose_pair(drawn or snapshots, routed, Routing.LEAST_LOADED)


# %% Simulated: 4 + 4 H100s with Llama-3-8B, 1,200 requests of two lengths, on each routing.
TRACE = poisson(read_workload("mix:2000+100@0.3,200+150@0.7").sample(1200, seed=1), rate_rps=100.0, seed=1)
COSTS = by_roofline(lambda tp: Roofline(Model(model_of("llama3-8b")), hardware("h100"), tp))
SETTINGS = plain_settings(longest(TRACE), max_num_seqs=256)
SPEC = cluster_spec(MeshSpec.parse("prefill:4xtp1,decode:4xtp1"), SETTINGS, COSTS, 50e9)


def run(named: Routing) -> Outcome:
    cluster = simulated(SPEC, router=replace(PATIENT, routing=named))
    outcome = cluster.run(TRACE)
    cluster.check_all_ended()
    return outcome


def told(name: str, outcome: Outcome) -> None:
    ttft_ms = sorted(1e3 * outcome.values("TTFT"))
    middle, late = ttft_ms[len(ttft_ms) // 2], ttft_ms[len(ttft_ms) * 99 // 100]
    print(f"{name.ljust(14)} TTFT p50 {middle:7.1f} ms, p99 {late:7.1f} ms, {len(outcome.served)} served")


for each in (Routing.RANDOM, Routing.ROUND_ROBIN, Routing.LEAST_LOADED):
    told(each.value, run(each))
ours, pair_selection.choose_pair = pair_selection.choose_pair, two_choices  # the one place that the router asks
told("two choices", run(Routing.LEAST_LOADED))

# %% Live: the same function routes real requests, here of the model of code on virtual devices.
with jdisagg.LLM(mesh="prefill:2xtp1,decode:tp1", max_model_len=128, routing="least_loaded") as llm:
    prompts = ["def fibonacci(n):", "class Stack:", "import os", "for i in range("]
    for completion in llm.generate_all(prompts, jdisagg.SamplingParams(max_tokens=8, temperature=0.0)):
        print(repr(completion.text))
pair_selection.choose_pair = ours
