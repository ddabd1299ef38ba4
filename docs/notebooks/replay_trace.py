# %% [markdown]
# # A trace of yours, replayed
#
# From a CSV of arrivals and lengths to a simulated cluster, and to a live stack that gets the first of its requests at
# the times they came.

# %%
from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jdisagg
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.sim.cluster import PATIENT
from jdisagg.sim.cluster_spec import by_roofline, cluster_spec, longest, plain_settings
from jdisagg.sim.cost_models import Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.outcome import SLO, Point
from jdisagg.sim.shared import simulated
from jdisagg.sim.traces.files import read_azure
from jdisagg.sim.traces.trace import Trace

# %% Your file: three columns. Name one on the command line, or this is made.
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = [(index * 0.35 + (index % 7) * 0.04, 60 + 37 * index % 180, 8 + 5 * index % 24) for index in range(120)]


def read() -> Trace:
    if len(sys.argv) > 1 and sys.argv[1].endswith(".csv"):
        return read_azure(sys.argv[1])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mine.csv"
        lines = [f"2026-01-01 00:{at // 60:02.0f}:{at % 60:09.6f},{inputs},{outputs}\n" for at, inputs, outputs in ROWS]
        path.write_text(HEAD + "".join(lines))
        return read_azure(path)


TRACE = read()
print(f"{len(TRACE)} requests in {TRACE.span_s:.0f} s, {TRACE.input_tokens.mean():.0f} tokens in, at the mean")

# %% Simulated, as fast as it came and faster: where do the objectives break?
COSTS = by_roofline(lambda tp: Roofline(Model(model_of("llama3-70b")), hardware("h100"), tp))
SETTINGS = plain_settings(longest(TRACE), max_num_seqs=256)
SPEC = cluster_spec(
    MeshSpec.parse("prefill:tp4,decode:tp4"),
    SETTINGS,
    COSTS,
    port_bytes_per_s=50e9,
)
for faster in (1, 10, 40):
    rate_rps = TRACE.rate_rps * faster
    cluster = simulated(SPEC, router=PATIENT)
    point = Point.of(cluster.run(TRACE.at_rate(rate_rps)), rate_rps, SLO(0.5, 0.05, 0.9), 8)
    print(f"{rate_rps:5.1f} requests/s: {point.attainment:.0%} within 0.5 s to the first token and 50 ms a token")


# %% Live: its first requests at their times, on virtual devices; token ids stand for the text that a trace lacks.
async def ask(llm: jdisagg.LLM, count: int) -> None:
    began_s = time.monotonic()

    async def one(index: int) -> tuple[float, int]:
        await asyncio.sleep(float(TRACE.arrival_s[index]) - (time.monotonic() - began_s))
        asked_s, first_s, pieces = time.monotonic(), 0.0, 0
        sampling = jdisagg.SamplingParams(max_tokens=int(TRACE.output_tokens[index]), temperature=0.0, ignore_eos=True)
        prompt = [10 + (index + place) % 200 for place in range(int(TRACE.input_tokens[index]))]
        async for _ in llm.stream(prompt, sampling):
            first_s, pieces = first_s or time.monotonic() - asked_s, pieces + 1
        return first_s, pieces

    for index, (first_s, pieces) in enumerate(await asyncio.gather(*map(one, range(count)))):
        print(f"request {index}: first token after {1e3 * first_s:5.0f} ms, {pieces} pieces")


with jdisagg.LLM(mesh="prefill:tp1,decode:tp1", max_model_len=512) as llm:
    asyncio.run(ask(llm, 8))
