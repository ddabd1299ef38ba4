"""Batches that Sarathi-Serve measured (Agrawal et al., OSDI 2024): what decodes cost that ride on a chunk of a prompt.

Yi-34B, tensor parallel over two A100-80G PCIe joined by an NVLink bridge, by the roofline with the A100's shares and
nothing fitted. What it says about fused steps holds; that engine's times do not come from a data sheet, neither those
of prompts (a quarter to a third too fast) nor those of decode steps (46.8 ms for one sequence; the weights' bytes: 25).
"""

from dataclasses import replace

import pytest

from jdisagg.core.request import RequestId, SamplingParams
from jdisagg.core.steps import DecodeRows, PrefillChunk, PrefillChunks
from jdisagg.sim.arithmetic import model
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware
from tests.published.gates import hold, relative

PCIE = replace(hardware("a100"), hbm_bytes_per_s=1.935e12)
YI = Roofline(Model(model("yi-34b")), PCIE, tp=2)
HYBRID_MS, CHUNK_MS = 217.65, 217.24  # 1021 prompt tokens and 3 decodes; 1024 prompt tokens
OLD_ENGINE = "an engine of early 2024 on 300 W boards: at 2048 tokens .62 of the peak, where a large GEMM alone has .91"
PROMPTS_MS = {2048: 366.0, 4096: 757.6, 8192: 1863.3, 16384: 4407.5}  # figure 2


def prompt(tokens: int) -> PrefillChunks:
    chunk = PrefillChunk(RequestId("r"), (0,) * tokens, 0, (), False, SamplingParams())
    return PrefillChunks((chunk,), tokens, 1)


def test_decodes_that_ride_on_a_chunk_are_nearly_free():
    riding_s = YI.mixed_s(prompt(1021), DecodeRows(0, (0, 1, 2), 1), 3 * 1024)
    ratio = riding_s / YI.prefill_s(prompt(1024))
    hold(relative("Sarathi table 2: 1021 + 3 decodes over a chunk of 1024", HYBRID_MS / CHUNK_MS, ratio, 0.05))


@pytest.mark.parametrize("tokens", PROMPTS_MS)
def test_prompts_by_the_roofline(tokens: int):
    target = f"Sarathi figure 2: Yi-34B on 2 A100, prefill of {tokens} tokens, ms"
    hold(relative(target, PROMPTS_MS[tokens], 1e3 * YI.prefill_s(prompt(tokens)), 0.25), OLD_ENGINE)
