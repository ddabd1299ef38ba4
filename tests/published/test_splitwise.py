"""Splitwise's cluster designs (Patel et al., ISCA 2024) from its own measured runs: BLOOM-176B at equal power.

A fifth of each design's machines at a fifth of the rate, 40 s of Poisson arrivals, lengths drawn from Azure's traces
(`--data_dir`), rates on a grid of 5 requests/s of the whole design. A rate is met when all nine slowdowns against an
idle DGX-A100 are within the paper's limits. Prompts run whole and one by one; a baseline fuses a prompt with the step
beside it; KV crosses ports of 200 GB/s once its prompt ends; pages are those that 90 % of the memory leaves. Finished
prompts are parked where they were computed until a token machine has room; ours holds a reservation before, so token
machines get the prompt machines' memory, too.

Their simulator looks a step of b sequences up as a context of b tokens, so that decoding hardly slows with load. Both
ways are held here: "as theirs", which gives back the published ratios, and ours, keyed by batch and context, which says
that their token machines are too few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jdisagg.core.mesh_spec import MeshSpec, WorkerMesh
from jdisagg.core.steps import DecodeRows, KVTransfer, PrefillChunks
from jdisagg.core.worker_config import Role
from jdisagg.sim.cluster_spec import ClusterSpec, cluster_spec, plain_settings
from jdisagg.sim.cost_models import CostModel, Roofline
from jdisagg.sim.hardware import hardware
from jdisagg.sim.outcome import Outcome, Record
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces import Trace, poisson, read_azure
from tests.published.full_files import full_file
from tests.published.gates import hold, hold_all, in_order, relative
from tests.published.run_tables import OUTPUT, PROMPT, RunTables, splitwise

MODEL, SCALE, SPAN_S, GRID_RPS, SLOTS = "bloom-176b", 5, 40.0, 5, 128
PORT_BYTES_PER_S = 200e9
LIMITS = {"TTFT": (2.0, 3.0, 6.0), "TBT": (1.25, 1.5, 5.0), "E2E": (1.25, 1.5, 5.0)}  # at P50, P90, P99


@dataclass(frozen=True)
class Design:
    """Machines of eight devices: prompts' (of a baseline: all of them), and tokens'."""

    prompt_device: str
    token_device: str
    prompt_machines: int
    token_machines: int = 0

    def mesh(self) -> MeshSpec:
        prompts, tokens = (round(many / SCALE) for many in (self.prompt_machines, self.token_machines))
        return MeshSpec.parse(f"prefill:{prompts}xtp8,decode:{tokens}xtp8" if tokens else f"colocated:{prompts}xtp8")


BASELINES = {"Baseline-A100": Design("a100", "a100", 70), "Baseline-H100": Design("h100", "h100", 40)}
DESIGNS = {
    "conv": BASELINES
    | {
        "Splitwise-AA": Design("a100", "a100", 45, 25),
        "Splitwise-HH": Design("h100", "h100", 25, 15),
        "Splitwise-HA": Design("h100", "a100", 25, 26),
        "Splitwise-HHcap": Design("h100", "h100", 25, 21),  # capped token machines are as fast
    },
    "code": BASELINES
    | {
        "Splitwise-AA": Design("a100", "a100", 55, 15),
        "Splitwise-HH": Design("h100", "h100", 35, 5),
        "Splitwise-HA": Design("h100", "a100", 35, 8),
    },
}


# Where to begin the search: it ends where it ends from any rate, only later.
FOUND_RPS = {
    ("conv", False): dict(zip(DESIGNS["conv"], (35, 75, 35, 60, 40, 75), strict=True)),
    ("conv", True): dict(zip(DESIGNS["conv"], (45, 100, 105, 120, 125, 125), strict=True)),
    ("code", False): dict(zip(DESIGNS["code"], (30, 35, 55, 80, 30), strict=True)),
}


@dataclass(frozen=True, slots=True)
class AsTheirs:
    """Steps as their simulator prices them: b sequences as one of b tokens; a mixed step is its prompt's x 1.1."""

    runs: RunTables

    def prefill_s(self, plan: PrefillChunks) -> float:
        return self.runs.prefill_s(plan)

    def decode_s(self, plan: DecodeRows, context_tokens: int) -> float:
        return self.runs.steps.at(1) + self.runs.token_s * (len(plan.active) - PROMPT - OUTPUT // 2)

    def mixed_s(self, prefill: PrefillChunks, decode: DecodeRows, context_tokens: int) -> float:
        return 1.1 * self.prefill_s(prefill)

    def transfer_bytes(self, transfer: KVTransfer) -> float:
        return self.runs.transfer_bytes(transfer)


IDLE = splitwise(MODEL, "a100")


@cache
def lengths(path: Path) -> Trace:
    return read_azure(path)


def kv_tokens(device: str) -> int:
    return Roofline(IDLE.model, hardware(device), 8, "float16").kv_tokens()


def built(design: Design, theirs: bool) -> ClusterSpec:
    def cost_of(place: WorkerMesh) -> tuple[CostModel, int]:
        if place.role is not Role.DECODE:
            runs, parked = splitwise(MODEL, design.prompt_device), 0
        else:
            runs = splitwise(MODEL, design.token_device)
            parked = kv_tokens(design.prompt_device) * design.prompt_machines // design.token_machines
        room = kv_tokens(design.token_device) + parked
        return (AsTheirs(runs) if theirs else runs), room

    sizes = plain_settings(
        16384,
        page_size=64,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=16384 + (0 if design.token_machines else SLOTS),  # a chunk beside decode rows
        max_chunk_seqs=1,
        steps_in_flight=1,
        reserve_tokens=128,
        mixed_steps="off" if design.token_machines else "on",
    )
    return cluster_spec(design.mesh(), sizes, cost_of, PORT_BYTES_PER_S, chunks_in_flight=1)


def slowdowns(outcome: Outcome) -> dict[str, np.ndarray]:
    """Against an idle DGX-A100, f64[3] by metric: P50, P90, P99."""
    values: dict[str, list[float]] = {metric: [] for metric in LIMITS}
    for record in outcome.records:
        prompt_s, step_s = IDLE.prompts.at(record.input_tokens), idle_step_s(record)
        values["TTFT"].append(record.ttft_s / prompt_s)
        values["E2E"].append(record.latency_s / (prompt_s + (record.output_tokens - 1) * step_s))
        if record.output_tokens > 1:
            values["TBT"].append(record.tpot_s / step_s)
    return {metric: np.percentile(each, (50, 90, 99)) for metric, each in values.items()}


def idle_step_s(record: Record) -> float:
    context = record.input_tokens + record.output_tokens / 2
    return IDLE.steps.at(1) + IDLE.token_s * (context - PROMPT - OUTPUT / 2)


@cache
def meets(path: Path, design: Design, rate_rps: int, theirs: bool) -> bool:
    """Whether the design holds all nine limits at this rate of the whole design."""
    rate = rate_rps / SCALE
    cluster = simulated(built(design, theirs))
    outcome = cluster.run(poisson(lengths(path).sample(int(rate * SPAN_S), seed=0), rate, seed=0))
    cluster.check_all_ended()
    found = slowdowns(outcome)
    return all((found[metric] <= limits).all() for metric, limits in LIMITS.items())


@cache
def capacity(path: Path, name: str, theirs: bool = False) -> int:
    """The highest rate on the grid that is met, walking up or down from where it was found last."""
    workload = "code" if "code" in path.name else "conv"
    design, rate = DESIGNS[workload][name], FOUND_RPS[workload, theirs][name]
    if meets(path, design, rate, theirs):
        while meets(path, design, rate + GRID_RPS, theirs):
            rate += GRID_RPS
    else:
        while rate > 0 and not meets(path, design, rate, theirs):
            rate -= GRID_RPS
    print(f"  {workload}, {name}, {'as theirs' if theirs else 'ours'}: {rate} requests/s")
    return rate


@pytest.fixture
def conv(request: pytest.FixtureRequest) -> Path:
    return full_file(request, "azure_llm_2023_conv.csv.gz")


@pytest.fixture
def code(request: pytest.FixtureRequest) -> Path:
    return full_file(request, "azure_llm_2023_code.csv.gz")


TOO_FEW = "their token machines suffice only where b sequences are priced as a context of b tokens"
TIED = "AA 105 and Baseline-H100 100, one step of the grid the other way round; in their simulator 110 and 120"
ORDER = ("Baseline-A100", "Splitwise-AA", "Baseline-H100", "Splitwise-HH", "Splitwise-HHcap")
# Of the unchanged splitwise-sim on the same lengths, on a grid of 10; the paper prints no rates for this model.
THEIR_RPS = dict(zip(DESIGNS["conv"], (50, 120, 110, 120, 140, 140), strict=True))


def named(what: str, theirs: bool) -> str:
    return f"Splitwise, iso-power, conv: {what}" + (", decode priced as theirs" if theirs else "")


def in_words(rates: dict[str, int]) -> str:
    return ", ".join(f"{name.removeprefix('Splitwise-')} {rate}" for name, rate in rates.items())


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "miss"), [(True, ""), (False, TOO_FEW)])
def test_splitwise_aa_serves_twice_what_as_many_a100_do(conv, theirs, miss):
    ratio = capacity(conv, "Splitwise-AA", theirs) / capacity(conv, "Baseline-A100", theirs)
    hold(relative(named("AA over Baseline-A100, requests/s", theirs), 2.15, ratio, 0.2), miss)


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "miss"), [(True, ""), (False, TOO_FEW)])
def test_splitwise_ha_serves_somewhat_more_than_h100_alone(conv, theirs, miss):
    ratio = capacity(conv, "Splitwise-HA", theirs) / capacity(conv, "Baseline-H100", theirs)
    hold(relative(named("HA over Baseline-H100, requests/s", theirs), 1.18, ratio, 0.15), miss)


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "miss"), [(True, TIED), (False, TOO_FEW)])
def test_designs_stand_in_their_order(conv, theirs, miss):
    rates = {name: capacity(conv, name, theirs) for name in ORDER}
    a, aa, h, hh, capped = rates.values()
    right = a < aa < h <= hh <= capped
    hold(in_order(named("order of designs", theirs), "A100 < AA < H100 <= HH <= HHcap", in_words(rates), right), miss)


@pytest.mark.slow
def test_rates_are_their_simulators_where_decode_is_priced_as_there(conv):
    target = named("%s, requests/s (their simulator)", theirs=True)
    hold_all([relative(target % name, rps, capacity(conv, name, True), 0.3) for name, rps in THEIR_RPS.items()])


@pytest.mark.slow
@pytest.mark.parametrize(("split", "miss"), [("Splitwise-AA", ""), ("Splitwise-HH", ""), ("Splitwise-HA", TOO_FEW)])
def test_split_designs_serve_more_code_than_baselines(code, split, miss):
    rates = {name: capacity(code, name) for name in (*BASELINES, split)}
    *baselines, ours = rates.values()
    target = f"Splitwise, iso-power, code: {split} above both baselines"
    hold(in_order(target, f"{split} > A100, H100", in_words(rates), ours > max(baselines)), miss)


def test_a_step_is_that_of_its_batch_and_longer_for_more_context():
    """512 prompt tokens and half of 128 a sequence are what the batches were measured with."""
    runs, step = splitwise(MODEL, "h100"), DecodeRows(0, tuple(range(64)), 1)
    assert runs.decode_s(step, 64 * 576) == pytest.approx(63.82e-3, rel=1e-3)
    assert runs.decode_s(step, 64 * 1500) > 1.15 * runs.decode_s(step, 64 * 576)
    assert AsTheirs(runs).decode_s(step, 64 * 1500) < 37e-3
