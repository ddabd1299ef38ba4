"""DeepSeek over pairs of meshes, in chunks and over a cached prefix, as `transformers` has it.

Latents are whole on every shard, so prefill of any width hands over to decode of any other.
"""

import itertools
from dataclasses import replace
from functools import cache

import jax
import pytest

from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.hf_config import read_config
from jdisagg.model.sources import HFSource
from tests.engine.stacks import (
    CHUNK,
    GREEDY,
    HALVES,
    PAGE_SIZE,
    WIDEST,
    first_tokens,
    generate,
    open_machine,
    prefill_chunk,
    run_prefill,
    source_pages,
    tokens_of,
)
from tests.fixtures.conformance import load
from tests.steps import prefill_plan

FAMILIES = ("deepseek2", "deepseek3")
WIDTHS = [(1, 2, 2), (2, 1, 2), (4, 2, 1)]  # prefill TP, decode PP, decode TP
pytestmark = pytest.mark.timeout(600)


@cache
def machine_of(role: Role, family: str, pp: int, tp: int) -> MeshExecutor:
    """Prefill on the first devices, decode on the last; one family's are kept at a time."""
    folder = load(family).folder
    config, source = read_config(folder), HFSource(folder)
    if role is not Role.DECODE:
        return open_machine(role, HALVES, jax.devices()[:tp], config, source)
    size = config.num_layers // pp
    stages = [range(start, start + size) for start in range(0, config.num_layers, size)]
    return open_machine(role, stages, jax.devices()[8 - pp * tp :], config, source, pp)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_latents_are_handed_over_between_any_cuts(family: str):
    fixture = load(family)
    prompts = [tuple(prompt) for prompt in fixture.prompts]
    for tp, decode_pp, decode_tp in WIDTHS[:: 1 if family == "deepseek3" else -1]:
        source = machine_of(Role.PREFILL, family, 1, tp)
        destination = machine_of(Role.DECODE, family, decode_pp, decode_tp)
        rows = generate(source, destination, prompts, len(fixture.greedy[0]) - 1)
        assert tokens_of(rows) == fixture.greedy, (tp, decode_pp, decode_tp)
    machine_of.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_and_behind_a_cached_prefix_gives_what_it_gives_at_once(family: str):
    fixture, machine = load(family), machine_of(Role.PREFILL, family, 1, 2)
    prompt, first = tuple(fixture.prompts[-1]), fixture.greedy[-1][0]
    cuts = [0, 1, 9, 10, 20, len(prompt)]
    chunks = [prefill_chunk(0, prompt, start, stop, GREEDY) for start, stop in itertools.pairwise(cuts)]
    plans = [prefill_plan(n, (chunk,), CHUNK, WIDEST) for n, chunk in enumerate(chunks)]
    assert [each.token for each in first_tokens(run_prefill(machine, plans))] == [first]
    shared = 3 * PAGE_SIZE  # of the pages that are there now
    chunk = prefill_chunk(1, prompt, shared, len(prompt), GREEDY)
    chunk = replace(chunk, pages=(*source_pages(0, shared), *source_pages(1, len(prompt))[3:]))
    done = machine.run(prefill_plan(9, (chunk,), CHUNK, WIDEST)).read()
    assert done.first[0][1].token == first
