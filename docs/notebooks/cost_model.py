# %% [markdown]
# # Your own cost model
#
# The simulator runs the router and workers that serve; what it is told is how long things take. A cost model answers
# three questions: a prefill's seconds, a decode step's seconds, a transfer's bytes.

# %%
from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.mesh_spec import MeshSpec, WorkerMesh
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.sim.cluster import PATIENT
from jdisagg.sim.cluster_spec import cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import CostModel, Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import Outcome
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces.trace import poisson
from jdisagg.sim.traces.workloads import read_workload

MODEL = Model(model_of("llama3-8b"))


# %% A device whose prefill and decode are lines that you fitted yourself, and whose KV is shipped as int8.
@dataclass(frozen=True, slots=True)
class Fitted:
    """Seconds = fixed + per token; a step reads the weights once and each sequence's context."""

    tp: int
    prefill_token_s: float = 40e-6
    step_s: float = 8e-3
    context_token_s: float = 30e-9

    def prefill_s(self, plan: PrefillChunks) -> float:
        return 2e-3 + plan.num_tokens * self.prefill_token_s / self.tp

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        return self.step_s / self.tp + context_tokens * self.context_token_s / self.tp

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return MODEL.part_bytes(transfer) / 2


# %% Two pools with it, and with the roofline of a data sheet, on the same requests.
TRACE = poisson(read_workload("mix:1500+200@0.5,300+100@0.5").sample(300, seed=2), rate_rps=6.0, seed=2)
MESH = MeshSpec.parse("prefill:2xtp1,decode:tp2")


def fitted(place: WorkerMesh) -> tuple[CostModel, int]:
    """The costs of one worker, and the KV tokens it has room for."""
    return Fitted(place.tp), 200_000 * place.tp


def roofline(place: WorkerMesh) -> tuple[CostModel, int]:
    costs = Roofline(MODEL, hardware("h100"), place.tp)
    return costs, costs.kv_tokens(place.pp)


def told(name: str, outcome: Outcome) -> None:
    ttft, tpot = (1e3 * outcome.values(metric).mean() for metric in ("TTFT", "TPOT"))
    busy = ", ".join(f"{worker} {share:.0%}" for worker, share in outcome.busy.items())
    print(f"{name.ljust(9)} TTFT {ttft:6.1f} ms, TPOT {tpot:5.2f} ms, busy: {busy}")


for name, cost_of in (("fitted", fitted), ("roofline", roofline)):
    settings = plain_settings(longest(TRACE), max_num_seqs=256)
    cluster = simulated(
        cluster_spec(MESH, settings, cost_of, port_bytes_per_s=12.5e9),
        router=PATIENT,
    )
    told(name, cluster.run(TRACE))
    cluster.check_all_ended()
