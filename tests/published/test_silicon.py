"""TPOT of 1,043 measured deployments of dense models (aiconfigurator's silicon_sample) by the roofline, nothing fitted.

The shares of the data sheets that kernels reach were read from kernel tables, not from these rows; 1 ms a step is the
host's. With b streams a stream's token takes a step of batch b, and the prompts of the other b - 1, each once in osl
tokens: TPOT = step(b, mid-answer) + (b - 1) prefill / osl. FP8 rows read one byte a weight and FP4 rows half a one, the
KV is taken to be bf16. Two groups stand apart in the source, cause unknown (SGLang's Qwen3-32B on H100 with a TTFT of
30 prefills; NVIDIA's Llama-3.1-8B-FP8 under vLLM on H200 at half its roofline): counted in, and left out.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from jdisagg.core.request import RequestId, SamplingParams
from jdisagg.core.steps import DecodeRows, PrefillChunk, PrefillChunks
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware
from tests.published.gates import between, hold, hold_all

ROWS = Path(__file__).parent / "data" / "silicon_dense_agg.csv.gz"
WEIGHTS = {"": "bfloat16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "int4"}
APART = {("sglang", "Qwen/Qwen3-32B", "h100"), ("vllm", "nvidia/Llama-3.1-8B-Instruct-FP8", "h200")}


@dataclass(frozen=True)
class Deployment:
    """A row, and our TPOT for it; milliseconds."""

    group: tuple[str, str, str]  # backend, model, system
    weights: str
    measured_ms: float
    ours_ms: float

    @property
    def error(self) -> float:
        return abs(self.ours_ms / self.measured_ms - 1)


def tpot_s(cost: Roofline, streams: int, inputs: int, outputs: int) -> float:
    chunk = PrefillChunk(RequestId("r"), (0,) * inputs, 0, (), True, SamplingParams())
    prefill_s = cost.prefill_s(PrefillChunks((chunk,), inputs, 1)) - cost.host_s
    step_s = cost.decode_s(DecodeRows(0, tuple(range(streams)), 1), streams * (inputs + outputs // 2))
    return step_s + (streams - 1) * prefill_s / outputs


@cache
def deployments(ideal: bool = False) -> list[Deployment]:
    """ideal: the peaks of the data sheets, and a host that takes no time."""
    with gzip.open(ROWS, "rt", encoding="utf-8") as file:
        return [predicted(row, ideal) for row in csv.DictReader(file)]


def predicted(row: dict[str, str], ideal: bool) -> Deployment:
    weights, chip = WEIGHTS[row["gemm_quant_mode"]], hardware(row["system"])
    if ideal:
        chip = replace(
            chip, gemm=1.0, skinny=1.0, prefill_attention=1.0, decode_attention=1.0, link=1.0, collective_s=0.0
        )
    cost = Roofline(Model(model(row["model"])), chip, int(row["tp_size"]), weights, 0.0 if ideal else 1e-3)
    ours_s = tpot_s(cost, *(int(row[name]) for name in ("batch_size", "isl", "osl")))
    group = (row["backend"], row["source_model"], row["system"])
    return Deployment(group, weights, float(row["silicon_tpot_ms"]), 1e3 * ours_s)


def spearman(rows: Sequence[Deployment]) -> float:
    """Correlation of ranks, equal values sharing their mean rank."""
    ours, theirs = (ranks(np.array(column)) for column in zip(*((r.ours_ms, r.measured_ms) for r in rows), strict=True))
    return float(np.corrcoef(ours, theirs)[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def mape(rows: Sequence[Deployment]) -> float:
    return 100 * float(np.mean([row.error for row in rows]))


def test_tpot_of_all_rows_is_within_24_percent_in_the_mean():
    print("\nby group: rows, MAPE, median of ours / measured")
    groups = defaultdict(list)
    for row in deployments():
        groups[*row.group, row.weights].append(row)
    for name, rows in sorted(groups.items()):
        ratio = float(np.median([row.ours_ms / row.measured_ms for row in rows]))
        print(f"  {' '.join(name)}: {len(rows)}, {mape(rows):.1f} %, {ratio:.2f}")
    note = "9 to 23 % by group; FP4 on B200 comes out a quarter to a third too fast"
    hold(
        between(
            "silicon_sample: TPOT by roofline, MAPE of 1,043 dense rows, %",
            "measured",
            mape(deployments()),
            0,
            24,
            note,
        )
    )


def test_tpot_without_the_groups_that_stand_apart():
    rows = [row for row in deployments() if row.group not in APART]
    assert len(deployments()) - len(rows) == 105
    hold_all(
        [
            between("silicon_sample: TPOT by roofline, MAPE without 105 rows, %", "measured", mape(rows), 0, 20),
            between(
                "silicon_sample: TPOT by roofline, Spearman's rank correlation", "measured", spearman(rows), 0.93, 1
            ),
        ]
    )


def test_peaks_of_the_data_sheets_alone_are_out_of_the_band():
    assert mape(deployments(ideal=True)) > 35
    assert ranks(np.array([3.0, 1.0, 3.0])).tolist() == [2.5, 1.0, 2.5]
