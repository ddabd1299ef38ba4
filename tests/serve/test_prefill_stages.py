"""A prefill worker of stages behind the whole stack gives the answers of one mesh, and its journal replays."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jdisagg
from jdisagg.commands import replay
from jdisagg.core.events import KVArrived
from tests.fixtures import conformance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAMILY = conformance.load("llama3")
KINDS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
PROMPTS = [[*range(1, 1 + length)] for length in (3, 16, 33, 90)] * 2  # the second time each was kept
ASKED = [
    jdisagg.SamplingParams(**{"max_tokens": 12, "seed": n, "ignore_eos": True, **KINDS[n % 2]})
    for n in range(len(PROMPTS))
]


def running(mesh: str, **settings) -> jdisagg.LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8}
    return jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, **sizes, **settings)


def answers(llm: jdisagg.LLM) -> list[list[int]]:
    """Of chunks of 32 tokens, several of one prompt under way at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = [list(answer.token_ids) for answer in pool.map(llm.generate, PROMPTS, ASKED)]
    assert llm.service.recompiles() == 0
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with running("prefill:tp1,decode:tp1") as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("mesh", "transfer", "layers"),
    [("prefill:pp2,decode:tp1", "layer", {(0, 2), (2, 4)}), ("prefill:pp2tp2,decode:pp2", "chunk", {None})],
)
def test_prefill_stages_answer_as_one_mesh_does_and_their_journal_replays(
    mesh: str,
    transfer: str,
    layers: set[object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    expected: list[list[int]],
):
    with running(mesh, transfer=transfer, record_dir=str(tmp_path)) as llm:
        assert answers(llm) == expected
        parts = [each.event.transfer for each in llm.service.journal.entries if isinstance(each.event, KVArrived)]
        assert {each.layers for each in parts} >= layers
    (journal,) = tmp_path.iterdir()
    assert replay.main(["replay", str(journal)]) == 0
    assert re.search(r"^\d+ events, same decisions; model ", capsys.readouterr().out, re.MULTILINE)
