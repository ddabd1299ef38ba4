"""A ring behind the whole stack: the answers of `stages`, whatever becomes of a request on its way."""

from typing import Any

import pytest

import jdisagg
from jdisagg import replay
from tests.fixtures import conformance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAMILY = conformance.load("llama3")
SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8}
SHAPES = ("decode:pp2", "decode:ring2", "decode:ring2tp2")


def asked(**more: Any) -> list[jdisagg.SamplingParams]:
    """Of every prompt: in turns the likeliest tokens, seeded draws, and draws under penalties."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.2},
    ]
    return [
        jdisagg.SamplingParams(**{"max_tokens": 30, "seed": n, "ignore_eos": True, **kinds[n % 3], **more})
        for n in range(len(FAMILY.prompts) * 2)
    ]


def answers(shape: str, **settings: Any) -> list[list[int]]:
    """Twice every prompt, so that the second time is a prefix; more than there are slots."""
    with jdisagg.LLM(model=str(FAMILY.folder), mesh=f"prefill:tp1,{shape}", **{**SIZES, **settings}) as llm:
        found = llm.generate_all(FAMILY.prompts * 2, asked())
        return [list(answer.token_ids) for answer in found]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(SHAPES[0])


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_ring_answers_as_stages_do(shape: str, expected: list[list[int]]):
    assert answers(shape) == expected


def test_a_ring_that_runs_out_of_pages_gives_the_same_answers(expected: list[list[int]]):
    assert answers("decode:ring2", kv_tokens=160, reserve_tokens=1) == expected


def test_a_ring_takes_compressed_kv_and_answers_as_stages_do():
    wire = {"transfer_compress": "int8", "transfer_error_bound": 1.0}
    assert answers("decode:ring2", **wire) == answers("decode:pp2", **wire)


def test_a_rings_journal_replays(tmp_path: Any):
    answers("decode:ring2", record_dir=str(tmp_path))
    (journal,) = tmp_path.iterdir()
    assert replay.main(["replay", str(journal)]) == 0
