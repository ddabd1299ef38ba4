"""The proof of the handoff: whatever mesh prefills and whatever mesh decodes, pages and tokens are the same."""

from functools import cache

import numpy as np
import pytest

from jdisagg.core.worker_config import TransferMode
from jdisagg.engine.mesh_executor import MeshExecutor
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    Steps,
    colocated_machine,
    decode_machine,
    destination_pages,
    first_tokens,
    generate,
    greedy_continuation,
    mixed_prompts,
    pages_by_layer,
    prefill_and_ship,
    prefill_machine,
    prefill_plans,
    run_prefill,
    ship_all,
    source_pages,
    tokens_of,
    warm_pair,
)

PROMPTS = mixed_prompts()
TURNS = 11
pytestmark = pytest.mark.slow


@cache
def expected() -> list[list[int]]:
    return greedy_continuation(PROMPTS, TURNS + 1)


def kv_of(machine: MeshExecutor, pages: list[int]) -> np.ndarray:
    """These pages' bytes: [L, n, Hkv, 2, page_size, D], each head once."""
    layers = []
    for stage in machine.pages:
        for pool in pages_by_layer(stage):
            step = pool.shape[1] // CONFIG.num_kv_heads
            layers.append(pool[np.array(pages)][:, ::step])
    return np.stack(layers)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_disaggregated_equals_single_mesh(tp: int, pp: int):
    source, destination = warm_pair(tp, pp)
    rows = generate(source, destination, PROMPTS, TURNS)
    assert tokens_of(rows) == expected()


@pytest.mark.parametrize(("tp", "pp", "decode_tp"), [(1, 2, 2), (4, 2, 2), (2, 1, 4)])
def test_decode_stages_may_be_tensor_parallel_too(tp: int, pp: int, decode_tp: int):
    rows = generate(*warm_pair(tp, pp, decode_tp), PROMPTS, TURNS)
    assert tokens_of(rows) == expected()


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_a_colocated_worker_gives_the_same_tokens(pp: int, tp: int):
    machine = colocated_machine(pp, tp)
    assert tokens_of(generate(machine, machine, PROMPTS, TURNS)) == expected()


EVERY_PAIR = [(tp, pp, 1) for tp in (1, 2, 4) for pp in (1, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "decode_tp"), [*EVERY_PAIR, (4, 2, 2), (2, 1, 4)])
def test_pages_after_the_handoff_are_byte_equal_to_their_source(tp: int, pp: int, decode_tp: int):
    source, destination = warm_pair(tp, pp, decode_tp)
    run_prefill(source, prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS)))
    ship_all(source, destination, [len(prompt) for prompt in PROMPTS])
    sent = kv_of(source, [page for i, prompt in enumerate(PROMPTS) for page in source_pages(i, len(prompt))])
    landed = kv_of(
        destination, [page for i, prompt in enumerate(PROMPTS) for page in destination_pages(i, len(prompt))]
    )
    assert np.all(np.any(sent, axis=(2, 3, 4, 5)))
    assert landed.tobytes() == sent.tobytes()


@pytest.mark.parametrize(
    ("tp", "pp", "mode"),
    [(1, 1, TransferMode.WHOLE), (2, 2, TransferMode.CHUNK), (2, 2, TransferMode.LAYER), (4, 4, TransferMode.LAYER)],
)
def test_kv_that_streams_while_it_is_computed_gives_the_same_tokens_and_compiles_nothing(tp, pp, mode):
    source, destination = warm_pair(tp, pp)
    firsts = prefill_and_ship(source, destination, PROMPTS, mode)
    loop = Steps(destination)
    loop.run(TURNS, loop.admissions(PROMPTS, firsts, [GREEDY] * len(PROMPTS)))
    assert tokens_of([[first, *loop.drawn[index]] for index, first in enumerate(firsts)]) == expected()
    assert (source.recompiles(), destination.recompiles()) == (0, 0)


def test_three_and_three_engines_mix_freely():
    sources, destinations = [prefill_machine(tp) for tp in (1, 2, 4)], [decode_machine(pp) for pp in (1, 2, 4)]
    for index, source in enumerate(sources):
        run_prefill(source, prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS)))
        ship_all(source, destinations[index], [len(prompt) for prompt in PROMPTS])
    firsts = first_tokens(run_prefill(sources[0], prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS))))
    loops = [Steps(machine) for machine in destinations]
    for loop in loops:
        loop.run(1, loop.admissions(PROMPTS, firsts, [GREEDY] * len(PROMPTS)))
    for _ in range(TURNS - 1):
        for loop in loops:
            loop.run(1, active=range(len(PROMPTS)))
    for loop in loops:
        rows = [[firsts[index], *loop.drawn[index]] for index in range(len(PROMPTS))]
        assert tokens_of(rows) == expected()
