"""Rows of many adapters in one step draw what each adapter's merged weights draw, to the same bits in any company."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdisagg.core.request import BROKEN, Adapter, SamplingParams
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import TensorSource
from tests.adapter_files import adapters_in, merged
from tests.engine.stacks import CONFIG, HALVES, SOURCE, generate, mixed_prompts, open_machine, open_ring, tokens_of

SIZES: dict[str, Any] = {"max_loras": 3, "max_lora_rank": 4}
STEPS = 6


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    return adapters_in(tmp_path_factory.mktemp("adapters"), CONFIG, 4)


@cache
def pair(tp: int, decode: str) -> tuple[MeshExecutor, MeshExecutor]:
    """Prefill over `tp` shards, and decode as stages or as a ring."""
    source = open_machine(Role.PREFILL, HALVES, jax.devices()[:tp], **SIZES)
    if decode == "ring":
        destination = open_ring(2, 2, **SIZES)
    else:
        destination = open_machine(Role.DECODE, HALVES, jax.devices()[-2:], pp=2, **SIZES)
    source.warm(peers=[destination])
    destination.warm()
    return source, destination


def asking(adapters: Sequence[Adapter | None]) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, adapter=each, logprobs=3) for each in adapters]


def defined(source: TensorSource, prompt: tuple[int, ...], output: Sequence[int]) -> np.ndarray:
    """Log-probabilities after each token of the output's, by the network's definition over these weights."""
    params = load_stage(source, StageSpec(CONFIG, range(4), Mesh(np.array(jax.devices()[:1]), ("tp",)), jnp.float32))
    logits = forward(params.merge(params.leaves), jnp.array([[*prompt, *output]]))[0]
    return np.asarray(jax.nn.log_softmax(logits))[len(prompt) - 1 :]


@pytest.mark.parametrize(("tp", "decode"), [(2, "stages"), (1, "ring")])
def test_each_row_draws_what_its_adapters_merged_weights_draw(adapters: list[Adapter], tp: int, decode: str) -> None:
    prompts, asked = mixed_prompts(6, seed=1, longest=40), [None, *adapters[:3], adapters[1], None]
    drawn = generate(*pair(tp, decode), prompts, STEPS, asking(asked))
    for prompt, adapter, row in zip(prompts, asked, drawn, strict=True):
        tokens = [each.token for each in row if each is not None]
        source = SOURCE if adapter is None else merged(SOURCE, adapter, CONFIG)
        expected = defined(source, prompt, tokens)
        for place, each in enumerate(row):
            assert each is not None and each.logprob is not None
            assert each.token == expected[place].argmax()
            assert abs(each.logprob - expected[place][each.token]) < 1e-4
    assert len({tuple(row) for row in tokens_of(drawn)}) == len(drawn)
    assert [machine.recompiles() for machine in pair(tp, decode)] == [0, 0]


def test_a_row_has_the_same_bits_whatever_the_others_ask_for(adapters: list[Adapter]) -> None:
    machine = colocated()
    prompts = mixed_prompts(4, seed=2, longest=30)
    companies = [[adapters[0], None, None, None], [adapters[0], *adapters[1:3], adapters[0]]]
    alone = generate(machine, machine, prompts[:1], STEPS, asking([adapters[0]]))[0]
    for company in companies:
        assert generate(machine, machine, prompts, STEPS, asking(company))[0] == alone
    base = generate(machine, machine, prompts[:1], STEPS, asking([None]))[0]
    assert generate(machine, machine, prompts, STEPS, asking([None, *adapters[:3]]))[0] == base != alone


@cache
def colocated() -> MeshExecutor:
    machine = open_machine(Role.COLOCATED, (range(4),), jax.devices()[:1], **SIZES)
    machine.warm()
    return machine


def test_more_adapters_than_slots_take_turns_in_them(adapters: list[Adapter]) -> None:
    machine = colocated()
    prompt = mixed_prompts(1, seed=3, longest=20)
    once = [generate(machine, machine, prompt, STEPS, asking([each]))[0] for each in adapters]
    again = [generate(machine, machine, prompt, STEPS, asking([each]))[0] for each in reversed(adapters)]
    assert again == once[::-1]
    assert len({tuple(row) for row in tokens_of(once)}) == len(adapters) > SIZES["max_loras"]
    assert machine.recompiles() == 0


def test_an_adapter_that_cannot_be_read_ends_its_own_rows_alone(adapters: list[Adapter], tmp_path: Path) -> None:
    machine = colocated()
    prompts, gone = mixed_prompts(3, seed=4, longest=20), replace(adapters[0], name="gone", folder=str(tmp_path))
    drawn = generate(machine, machine, prompts, 1, asking([None, gone, adapters[1]]))
    alone = generate(machine, machine, prompts, 1, asking([None, adapters[1], adapters[1]]))
    assert tokens_of(drawn)[1][0] == BROKEN
    assert [drawn[0], drawn[2]] == [alone[0], alone[2]]
    copytree(adapters[0].folder, tmp_path, dirs_exist_ok=True)
    there = generate(machine, machine, prompts, 1, asking([None, gone, adapters[1]]))
    assert there == generate(machine, machine, prompts, 1, asking([None, adapters[0], adapters[1]]))
