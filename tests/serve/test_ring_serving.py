"""A ring behind the whole stack gives the answers of `stages`, whatever becomes of a request on its way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import jdisagg
from jdisagg.commands import replay
from jdisagg.core.events import KVArrived, Received
from jdisagg.core.messages import Preempted, Reserved
from tests.fixtures import conformance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAMILY = conformance.load("llama3")
STAGES, RING = "prefill:tp1,decode:pp2", "prefill:tp1,decode:ring2"
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.2},
]
PROMPTS = FAMILY.prompts * 2  # the second time each is a prefix of what was kept
ASKED = [
    jdisagg.SamplingParams(**{"max_tokens": 30, "seed": n, "ignore_eos": True, **KINDS[n % 3]})
    for n in range(len(PROMPTS))
]


@contextmanager
def running(mesh: str, **settings: Any) -> Iterator[jdisagg.LLM]:
    with jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, **{**SIZES, **settings}) as llm:
        yield llm
        assert llm.service.recompiles() == 0


def answers(llm: jdisagg.LLM) -> list[list[int]]:
    """More requests than slots, at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [list(answer.token_ids) for answer in pool.map(llm.generate, PROMPTS, ASKED)]


def events(llm: jdisagg.LLM, kind: type) -> list[Any]:
    return [entry.event for entry in llm.service.journal.entries if isinstance(entry.event, kind)]


def heard(llm: jdisagg.LLM, kind: type) -> list[Any]:
    return [each.message for each in events(llm, Received) if isinstance(each.message, kind)]


def first_and_again(mesh: str, **settings: Any) -> tuple[list[list[int]], list[Reserved]]:
    """A conversation of two turns in each prompt: the second is the first with its answer and a few tokens more."""
    with running(mesh, **settings) as llm:
        asked = jdisagg.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        told = list[list[int]]()
        for prompt in FAMILY.prompts:
            first = llm.generate(prompt, asked)
            again = llm.generate([*prompt, *first.token_ids, 7, 8, 9], asked)
            told += [list(first.token_ids), list(again.token_ids)]
        return told, heard(llm, Reserved)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with running(STAGES) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("mesh", "turns"),
    [
        (RING, 1),
        (f"{RING}tp2", 8),
        *(pytest.param(*each, marks=pytest.mark.hostile) for each in ((RING, 8), (f"{RING}tp2", 1))),
    ],
)
def test_a_ring_answers_as_stages_do(mesh: str, turns: int, expected: list[list[int]]):
    with running(mesh, multi_step=turns) as llm:
        assert answers(llm) == expected


def test_sequences_that_are_sent_back_for_want_of_pages_are_answered_the_same(expected: list[list[int]]):
    with running(RING, kv_tokens=160, reserve_tokens=1) as llm:
        assert answers(llm) == expected
        assert heard(llm, Preempted)


@pytest.mark.parametrize("wire", [pytest.param("int8", marks=pytest.mark.hostile), "int4"])
def test_compressed_kv_is_answered_as_stages_answer_it(wire: str):
    compressed = {"transfer_compress": wire, "transfer_error_bound": 1.0, "prefix_caching": "off"}
    told = dict[str, list[list[int]]]()
    for mesh in (STAGES, RING):
        with running(mesh, **compressed) as llm:
            told[mesh] = answers(llm)
            assert {each.transfer.wire for each in events(llm, KVArrived) if each.intact} == {wire}
    assert told[RING] == told[STAGES]


def test_the_next_turn_of_a_conversation_finds_its_beginning_on_the_ring():
    """Its short end, which stages compute themselves, comes from the prefill worker."""
    told, reserved = first_and_again(RING)
    assert told == first_and_again(STAGES)[0]
    assert [each.cached_pages > 0 for each in reserved] == [False, True] * len(FAMILY.prompts)


def test_a_rings_journal_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: list[list[int]]):
    with running(RING, record_dir=str(tmp_path), kv_tokens=160, reserve_tokens=1) as llm:
        assert answers(llm) == expected
    (journal,) = tmp_path.iterdir()
    assert replay.main(["replay", str(journal)]) == 0
    assert re.search(r"^\d+ events, same decisions; model ", capsys.readouterr().out, re.MULTILINE)
    assert replay.main(["replay", "--virtual", str(journal)]) == 0
