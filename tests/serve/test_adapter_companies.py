"""Adapters beside all that a stack may do meanwhile: guesses, tiers, a pool, lending, changes of roles, other weights.

What each draws is what its merged weights draw, twice: what was kept of one adapter's KV is never another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from jax.sharding import Mesh

import jdisagg
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Adapter
from jdisagg.core.worker_config import Role
from jdisagg.model.checkpoint import read_model
from jdisagg.model.gguf.source import GGUFSource
from jdisagg.model.lora import identified
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import HFSource, TensorSource
from tests.adapter_files import ALL, merged, write_adapter
from tests.fixtures import conformance
from tests.model.test_gguf_source import gguf_of
from tests.serve.live_http import eventually
from tests.serve.test_role_flip import flip
from tests.serve.test_tiers import checked_at_rest, workers_of

pytestmark = pytest.mark.slow
LLAMA, MIXTRAL = conformance.load("llama3"), conformance.load("mixtral")
NAMES = ("sql", "", "tales", "sql")  # of four that are asked for together
LONGEST, ANSWER, PROMPT = 64, 6, 40
SIZES: dict[str, Any] = {
    "max_model_len": LONGEST,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "max_lora_rank": 4,
    "prefill_buckets": "64",
    "table_buckets": "64",
    "short_prompt_tokens": 0,
}
COLOCATED, PAIR = "colocated:tp1", "prefill:tp1,decode:tp1"
TOKENS = [token for prompt in LLAMA.prompts for token in prompt]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, Path]]:
    """Two adapters for a model, once; of attention alone where it has experts."""

    @cache
    def written(model: Path) -> dict[str, Path]:
        config, root = read_model(model), tmp_path_factory.mktemp("adapters")
        targets = ALL if config.experts is None else ALL[:4]
        return {
            name: write_adapter(root / name, config, seed, targets=targets)
            for seed, name in enumerate(("sql", "tales"))
        }

    return written


@contextmanager
def running(mesh: str, adapters: dict[str, Path], model: Path = LLAMA.folder, **settings: Any) -> Iterator[jdisagg.LLM]:
    lora = ",".join(f"{name}={folder}" for name, folder in adapters.items())
    with jdisagg.LLM(model=str(model), mesh=mesh, lora=lora, **{**SIZES, **settings}) as llm:
        yield llm
        assert llm.service.recompiles() == 0


def prompts(kinds: int = 2) -> list[list[int]]:
    """Rotations of one text: whoever takes one adapter's pages for another's finds them here."""
    return [(TOKENS[first:] + TOKENS[:first])[:PROMPT] for first in range(kinds)]


def sampling(adapter: Adapter | None) -> jdisagg.SamplingParams:
    return jdisagg.SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, adapter=adapter)


def asked(llm: jdisagg.LLM, kinds: int = 2) -> tuple[list[list[int]], int]:
    """What four draw of each prompt, all at once; how many of the prompts' tokens were not computed."""
    pairs = [(prompt, llm.adapters.find(name)) for prompt in prompts(kinds) for name in NAMES]

    with ThreadPoolExecutor(len(pairs)) as threads:
        found = list(threads.map(lambda pair: llm.generate(pair[0], sampling(pair[1])), pairs))
    return [list(each.token_ids) for each in found], sum(each.cached_tokens for each in found)


def expected(source: TensorSource, model: ModelConfig, adapters: dict[str, Path], kinds: int = 2) -> list[list[int]]:
    """The greedy answers, by the network's definition over merged weights."""
    runs = {"": defined(source, model)} | {
        name: defined(merged(source, identified(name, str(folder)), model), model) for name, folder in adapters.items()
    }
    return [drawn(runs[name], prompt) for prompt in prompts(kinds) for name in NAMES]


def defined(source: TensorSource, model: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    params = load_stage(source, StageSpec(model, range(model.num_layers), mesh, jnp.float32))
    run = jax.jit(lambda leaves, tokens: forward(params.merge(leaves), tokens))
    return lambda tokens: np.asarray(run(params.leaves, tokens))


def drawn(run: Callable[[np.ndarray], np.ndarray], prompt: Sequence[int]) -> list[int]:
    row = list(prompt)
    for _ in range(ANSWER):
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(row)] = row
        row.append(int(run(padded)[0, len(row) - 1].argmax()))
    return row[len(prompt) :]


@pytest.fixture(scope="module")
def plain(folders: Callable[[Path], dict[str, Path]]) -> list[list[int]]:
    """By merged weights."""
    found = expected(HFSource(LLAMA.folder), read_model(LLAMA.folder), folders(LLAMA.folder))
    assert len({tuple(each) for each in found[:3]}) == 3
    return found


@pytest.mark.parametrize("said", ["ngram", f"draft:{LLAMA.folder}"], ids=["n-grams", "a draft model"])
def test_guesses_change_no_adapters_token(folders: Any, plain: list[list[int]], said: str) -> None:
    with running(PAIR, folders(LLAMA.folder), speculative=said) as llm:
        assert [asked(llm)[0] for _ in range(2)] == [plain] * 2


def test_an_adapters_pages_come_back_from_dram_to_itself_alone(folders: Any, plain: list[list[int]]) -> None:
    with running(COLOCATED, folders(LLAMA.folder), kv_tokens=256, dram_tokens=2048) as llm:
        assert asked(llm)[0] == plain

        def came_back() -> bool:
            for each in workers_of(llm):
                each.tiers.prices.lines.clear()  # a machine that was held up may have found it dear
            asked(llm, 5)
            answers, cached = asked(llm)
            assert answers == plain
            return cached > 0

        eventually(came_back, 120)
        checked_at_rest(llm)


def test_a_pool_gives_a_new_process_each_adapters_own_pages(
    folders: Any, plain: list[list[int]], tmp_path: Path
) -> None:
    for life in range(2):
        with running(COLOCATED, folders(LLAMA.folder), pool=f"file://{tmp_path}/pool") as llm:
            answers, cached = asked(llm)
            assert answers == plain and (cached > 0 or not life)
            assert asked(llm)[0] == plain
            checked_at_rest(llm)


def test_workers_lend_each_other_an_adapters_pages_for_it_alone(folders: Any, plain: list[list[int]]) -> None:
    lending: dict[str, Any] = {"peer_fetch": True, "kv_tokens": 1024, "routing": "round_robin"}
    with running("colocated:2xtp1", folders(LLAMA.folder), **lending) as llm:
        found = [asked(llm) for _ in range(3)]
        assert [answers for answers, _ in found] == [plain] * 3 and found[-1][1] > 0
        checked_at_rest(llm)


def test_a_worker_that_changes_its_role_takes_its_adapters_along(folders: Any, plain: list[list[int]]) -> None:
    with running("prefill:2xtp1,decode:tp1", folders(LLAMA.folder)) as llm:
        assert asked(llm)[0] == plain
        flip(llm, "prefill-1", Role.DECODE, "tp1")
        assert [asked(llm)[0] for _ in range(2)] == [plain] * 2


def test_a_mixture_of_experts_takes_adapters_of_its_attention(folders: Any) -> None:
    adapters = folders(MIXTRAL.folder)
    with running(PAIR, adapters, MIXTRAL.folder, tokenizer=str(LLAMA.folder)) as llm:
        assert asked(llm, 1)[0] == expected(HFSource(MIXTRAL.folder), read_model(MIXTRAL.folder), adapters, 1)


def test_rounded_blocks_of_a_gguf_file_take_adapters(folders: Any, tmp_path: Path) -> None:
    path = gguf_of(LLAMA.folder, tmp_path / "model.gguf", Kind.Q8_0)
    adapters = folders(LLAMA.folder)
    with running(PAIR, adapters, path) as llm:
        assert asked(llm, 1)[0] == expected(GGUFSource(path), read_model(path), adapters, 1)


@pytest.mark.parametrize("stored", [pytest.param("bfloat16", marks=pytest.mark.hostile), "int8"])
def test_over_rounded_weights_an_adapter_draws_in_company_what_it_draws_alone(folders: Any, stored: str) -> None:
    with running(COLOCATED, folders(LLAMA.folder), weight_dtype=stored) as llm:
        together, _ = asked(llm)
        alone = [
            list(llm.generate(prompt, sampling(llm.adapters.find(name))).token_ids)
            for prompt in prompts()
            for name in NAMES[:3]
        ]
    assert alone == together[:3] + together[4:7]
    assert len({tuple(each) for each in alone[:3]}) == 3
