"""Guesses that are always right stay so in any company of a whole stack, and the tokens are those of steps of one.

The model of two layers whose second adds nothing has a head that is its first; a model drafts for itself. Whatever is
lost of either's keys and values on the way shows as a guess that is wrong.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jdisagg
from jdisagg.core.events import StepDone
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.model.checkpoint import read_model
from tests.adapter_files import write_adapter
from tests.fixtures import conformance
from tests.serve.test_role_flip import flip

pytestmark = pytest.mark.slow
LLAMA = conformance.load("llama3")
PAIR = "prefill:tp1,decode:tp1"
GREEDY = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=3)
PROMPTS = [[5, 6, 7, 8] * 3, [9, 3, 9, 3, 9, 3], list(range(20, 36)), [7] * 12]
SIZES: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "prefill_buckets": "64",
    "table_buckets": "64",
}
FEW: dict[str, Any] = {"kv_tokens": 96, "reserve_tokens": 4}  # 12 pages, of which four whole answers want 20


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the model, its head in `eagle`."""
    folder = tmp_path_factory.mktemp("knowing")
    (folder / "eagle").mkdir()
    for path in LLAMA.folder.glob("*.json"):
        copy(path, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for layers, place in ((2, folder), (1, folder / "eagle")):
        (place / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
    whole = load_file(LLAMA.folder / "model.safetensors")
    model = {name: each for name, each in whole.items() if ".layers." not in name or name.split(".")[2] in "01"}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        model[f"model.layers.1.{name}.weight"] = np.zeros_like(model[f"model.layers.1.{name}.weight"])
    size = config["hidden_size"]
    head = {name.removeprefix("model."): model[name] for name in model if ".layers.0." in name}
    head["fc.weight"] = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1).astype(np.float32)
    head["norm.weight"] = model["model.norm.weight"]
    save_file(model, folder / "model.safetensors")
    save_file(head, folder / "eagle" / "model.safetensors")
    return str(folder)


@contextmanager
def running(model: str, mesh: str = PAIR, **settings: Any) -> Iterator[jdisagg.LLM]:
    """Where every guess that was verified was right."""
    speculative = settings.pop("speculative", "eagle:2")
    with jdisagg.LLM(model=model, mesh=mesh, speculative=speculative, **{**SIZES, **settings}) as llm:
        yield llm
        assert llm.service.recompiles() == 0
        drafted, accepted = (counted(llm, f"spec_decode_{name}_tokens") for name in ("draft", "accepted"))
        assert accepted == drafted > 50


def counted(llm: jdisagg.LLM, name: str) -> float:
    assert llm.service.metrics is not None
    lines = [line.split(" ") for line in llm.service.metrics.render().decode().splitlines()]
    return sum(float(line[1]) for line in lines if line[0].split("{")[0] == f"jdisagg_{name}_total")


def answers(llm: jdisagg.LLM, sampling: jdisagg.SamplingParams = GREEDY) -> list[list[int]]:
    return [list(each.token_ids) for each in llm.generate_all(PROMPTS, sampling)]


def plain(llm: jdisagg.LLM, sampling: jdisagg.SamplingParams = GREEDY) -> list[list[int]]:
    """By steps of one token, one answer at a time."""
    alone = replace(sampling, speculative=False)
    return [list(llm.generate(prompt, alone).token_ids) for prompt in PROMPTS]


@pytest.mark.parametrize("below", [{}, {"dram_tokens": 256}], ids=["computed again", "kept below HBM"])
def test_a_head_is_as_right_after_preemptions_and_prefixes_that_were_there(knowing: str, below: dict[str, Any]) -> None:
    with running(knowing, **FEW, **below) as llm:
        for sampling in (GREEDY, DRAWN):
            expected = plain(llm, sampling)
            assert [answers(llm, sampling) for _ in range(2)] == [expected] * 2
        assert counted(llm, "preemptions") > 0 and counted(llm, "prefix_cache_hits") > 0


def test_a_head_over_two_shards_is_as_right_in_steps_that_hold_chunks_too(knowing: str) -> None:
    with running(knowing, "colocated:tp2", max_num_seqs=2) as llm:
        found = answers(llm), answers(llm, DRAWN)
        steps = [each.event for each in llm.service.journal.entries if isinstance(each.event, StepDone)]
        assert any(each.first and each.decode for each in steps), "prompts came while others were decoded"
        assert found == (plain(llm), plain(llm, DRAWN))


def test_a_worker_that_changes_its_role_takes_its_head_along(knowing: str) -> None:
    with running(knowing, "prefill:2xtp1,decode:tp1", kv_dtype="int8") as llm:
        expected = plain(llm)
        flip(llm, "prefill-1", Role.DECODE, "tp1")
        llm.service.driver.give_up(WorkerId("decode-0"))
        assert [answers(llm) for _ in range(2)] == [expected] * 2


def test_a_head_beside_adapters_changes_no_token_of_rows_with_and_without_one(knowing: str, tmp_path: Path) -> None:
    sql = write_adapter(tmp_path / "sql", read_model(Path(knowing)), 1, strength=2.0)
    room = {"lora": f"sql={sql}", "max_lora_rank": 4, "speculative": "eagle:2", "prefix_caching": "off"}
    with jdisagg.LLM(model=knowing, mesh=PAIR, **SIZES, **room) as llm:
        adapters = [llm.adapter("sql"), None, None, llm.adapter("sql")]
        asked = [
            (prompt, replace(how, adapter=adapter))
            for prompt, how, adapter in zip(PROMPTS, [GREEDY, GREEDY, DRAWN, DRAWN], adapters, strict=True)
        ]

        async def together() -> list[list[int]]:
            async def one(prompt: list[int], how: jdisagg.SamplingParams) -> list[int]:
                return [each.token async for piece in llm.stream(prompt, how) for each in piece.delta.sampled]

            return await asyncio.gather(*(one(*each) for each in asked))

        alone = [list(llm.generate(prompt, replace(how, speculative=False)).token_ids) for prompt, how in asked]
        unadapted = [list(llm.generate(prompt, replace(how, adapter=None)).token_ids) for prompt, how in asked]
        assert [mine != other for mine, other in zip(alone, unadapted, strict=True)] == [True, False, False, True]
        drafted, accepted = (counted(llm, f"spec_decode_{name}_tokens") for name in ("draft", "accepted"))
        assert accepted == drafted > 50, "nobody had an adapter"
        assert asyncio.run(together()) == alone
        assert counted(llm, "spec_decode_draft_tokens") > drafted + 50 and llm.service.recompiles() == 0


def test_a_draft_whose_pages_go_along_is_as_right_over_turns_of_which_one_loses_its_worker() -> None:
    speculative = {"speculative": f"draft:{LLAMA.folder}:2", "draft_kv": "ship"}
    turns = [[5, 6, 7, 8, 9], [40, 41, 42], [3] * 4]

    def talk(llm: jdisagg.LLM, sampling: jdisagg.SamplingParams, losing: bool) -> list[list[int]]:
        said, found = list[int](), list[list[int]]()
        for number, turn in enumerate(turns):
            said += turn
            lost = threading.Thread(target=lose_who_draws, args=(llm,)) if losing and number == 1 else None
            if lost:
                lost.start()
            found.append(list(llm.generate(said, replace(sampling, max_tokens=12)).token_ids))
            said += found[-1]
            if lost:
                lost.join()
        return found

    with running(str(LLAMA.folder), "prefill:tp1,decode:2xtp1", **speculative) as llm:
        found = [talk(llm, GREEDY, losing) for losing in (False, True, False)]
        expected = talk(llm, replace(GREEDY, speculative=False), losing=False)  # last: its draft reads no answer
        assert found == [expected] * 3


def lose_who_draws(llm: jdisagg.LLM) -> None:
    """The decode worker that next has rows of an answer is lost."""
    seen = len(llm.service.journal.entries)
    while True:
        for entry in [*llm.service.journal.entries][seen:]:
            if isinstance(entry.event, StepDone) and entry.event.decode:
                llm.service.driver.give_up(WorkerId(entry.actor))
                return
