"""Prefill by stages of layers, each on devices of its own: the same pages and tokens, whoever decodes."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from jdisagg.core.layout.stages import split_prefill
from jdisagg.core.worker_config import Role, TransferMode
from jdisagg.engine.mesh_executor import MeshExecutor
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    Steps,
    decode_machine,
    generate,
    greedy_continuation,
    mixed_prompts,
    open_machine,
    pages_by_layer,
    prefill_and_ship,
    prefill_machine,
    prefill_plans,
    run_prefill,
    source_pages,
    tokens_of,
)

PROMPTS = mixed_prompts(12)
TURNS = 7


@cache
def expected() -> list[list[int]]:
    return greedy_continuation(PROMPTS, TURNS + 1)


@cache
def staged_machine(pp: int, tp: int) -> MeshExecutor:
    layers = split_prefill(CONFIG.num_layers, pp)
    machine = open_machine(Role.PREFILL, layers, jax.devices()[: pp * tp], prefill_stages=pp)
    machine.warm()
    return machine


@cache
def warm_pair(pp: int, tp: int, decode_pp: int, decode_tp: int) -> tuple[MeshExecutor, MeshExecutor]:
    source, destination = staged_machine(pp, tp), decode_machine(decode_pp, decode_tp)
    source.warm(peers=[destination])
    return source, destination


def test_each_stage_holds_its_own_layers_on_its_own_devices():
    machine = staged_machine(2, 1)
    assert [group.layers for group in machine.layer_groups] == [range(0, 2), range(2, 4)]
    assert [group.submesh.devices for group in machine.layer_groups] == [(each,) for each in jax.devices()[:2]]


def kv_of(pools: list[np.ndarray], index: int, tokens: int) -> np.ndarray:
    """[layers, tokens, Hkv, 2, D] of a prompt; behind its end a page has what others left."""
    pages = np.stack([pool[np.array(source_pages(index, tokens))] for pool in pools])
    by_token = np.moveaxis(pages, 4, 2)
    return by_token.reshape(len(pools), -1, *by_token.shape[3:])[:, :tokens]


def test_two_prefill_stages_write_the_pages_of_one_mesh():
    found = []
    for machine in (prefill_machine(1), staged_machine(2, 1)):
        run_prefill(machine, prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS)))
        pools = [pool for stage in machine.pages for pool in pages_by_layer(stage)]
        found.append(np.concatenate([kv_of(pools, index, len(prompt)) for index, prompt in enumerate(PROMPTS)], axis=1))
    assert np.any(found[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_chunks_through_two_stages_are_decoded_to_the_same_tokens_and_compile_nothing():
    source, destination = warm_pair(2, 1, 1, 1)
    assert tokens_of(generate(source, destination, PROMPTS, TURNS)) == expected()
    assert (source.recompiles(), destination.recompiles()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((2, 1), (2, 1)), ((2, 1), (1, 2)), ((2, 2), (2, 1)), ((4, 1), (2, 1)), ((3, 1), (2, 1)), ((2, 2), (1, 1))],
)
def test_any_prefill_stages_fit_any_decode_mesh(prefill, decode):
    source, destination = warm_pair(*prefill, *decode)
    assert tokens_of(generate(source, destination, PROMPTS, TURNS)) == expected()
    assert (source.recompiles(), destination.recompiles()) == (0, 0)


def test_the_first_stages_kv_leaves_while_the_second_computes():
    source, destination = warm_pair(2, 1, 1, 1)
    (plan, *_), said = prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS)), []
    source.run(plan, said.append).read()
    assert said == [2], "told once the first two layers were dispatched, before the others"
    firsts = prefill_and_ship(source, destination, PROMPTS, TransferMode.LAYER)
    loop = Steps(destination)
    loop.run(TURNS, loop.admissions(PROMPTS, firsts, [GREEDY] * len(PROMPTS)))
    assert tokens_of([[first, *loop.drawn[index]] for index, first in enumerate(firsts)]) == expected()
    assert source.recompiles() == 0


def test_prompt_logprobs_come_of_the_last_stage():
    """They need every row's activations, and those of the chunk before."""
    asked = replace(GREEDY, prompt_logprobs=1)
    plans = prefill_plans(PROMPTS[:4], [asked] * 4)
    one, two = (run_prefill(machine, plans) for machine in (prefill_machine(1), staged_machine(2, 1)))
    for ours, theirs in zip(two, one, strict=True):
        for (name, scored), (other, wanted) in zip(ours.prompt, theirs.prompt, strict=True):
            assert name == other
            assert [each.token for each in scored] == [each.token for each in wanted]
            near = [each.logprob for each in wanted if each.logprob is not None]
            assert [each.logprob for each in scored if each.logprob is not None] == pytest.approx(near, abs=1e-4)
