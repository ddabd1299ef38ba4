"""What a machine promises its worker: chunks and cached parts, stops, seeds, logprobs, pages in place, no recompile."""

import itertools
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.core.request import BROKEN, RequestId, Sampled, SamplingParams
from jdisagg.core.steps import PageGrant
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.names import Index
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import (
    CHUNK,
    CONFIG,
    GREEDY,
    LONGEST,
    PAGE_SIZE,
    WIDEST,
    Steps,
    first_tokens,
    full_forward,
    generate,
    greedy_continuation,
    mixed_prompts,
    open_machine,
    prefill_chunk,
    prefill_plans,
    run_prefill,
    ship_all,
    source_pages,
    tokens_of,
    transfer,
    warm_pair,
)
from tests.steps import decode_plan, prefill_plan

PROMPTS = mixed_prompts(6, seed=5)
LONG_PROMPT = max(PROMPTS, key=len)
pytestmark = pytest.mark.slow  # the first test of a session compiles two machines


@pytest.fixture(scope="module")
def pair() -> tuple[MeshExecutor, MeshExecutor]:
    return warm_pair(2, 2)


def test_a_prompt_in_small_chunks_gives_what_it_gives_at_once(pair):
    prompt = LONG_PROMPT
    cuts = [0, 1, 9, 10, len(prompt) // 2, len(prompt)]
    plans = [
        prefill_plan(n, (prefill_chunk(0, prompt, start, stop, GREEDY),), CHUNK, WIDEST)
        for n, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    assert [each.token for each in first_tokens(run_prefill(pair[0], plans))] == greedy_continuation([prompt], 1)[0]


def test_pages_of_another_prompt_serve_as_a_cached_prefix(pair):
    shared = tuple(range(3 * PAGE_SIZE))
    first, second = (*shared, 5, 6), (*shared, 7, 8, 9)
    run_prefill(pair[0], prefill_plans([first], [GREEDY]))
    chunk = prefill_chunk(1, second, len(shared), len(second), GREEDY)
    chunk = replace(chunk, pages=(*source_pages(0, len(shared)), source_pages(1, len(second))[3]))
    done = pair[0].run(prefill_plan(0, (chunk,), CHUNK, WIDEST)).read()
    assert done.first[0][1].token == greedy_continuation([second], 1)[0][0]


def test_a_slot_that_drew_its_stop_token_is_masked_and_disturbs_nobody(pair):
    expected = greedy_continuation(PROMPTS, 10)
    stop = expected[2][3]
    sampling = [GREEDY] * len(PROMPTS)
    sampling[2] = replace(GREEDY, stop_token_ids=(stop,))
    rows = generate(pair[0], pair[1], PROMPTS, 9, sampling)
    end = expected[2].index(stop) + 1
    assert tokens_of(rows)[2] == expected[2][:end] and rows[2][end:] == [None] * (10 - end)
    assert [row for n, row in enumerate(tokens_of(rows)) if n != 2] == [row for n, row in enumerate(expected) if n != 2]


def test_logits_that_are_no_numbers_end_one_sequence_and_what_it_left_in_its_pages_harms_nobody():
    """Token 5's embedding is NaN: who feeds it is broken from there on; then another prompt takes the same pages."""
    colocated = open_machine(Role.COLOCATED, [range(CONFIG.num_layers)], jax.devices()[:1], source=Poisoned())
    prompts = [(1, 2, 5), (1, 2, 3), (9,) * 11]
    firsts = first_tokens(run_prefill(colocated, prefill_plans(prompts, [GREEDY] * 3)))
    assert [first.broken for first in firsts] == [True, False, False]
    loop = Steps(colocated)
    poisoned = [replace(firsts[0], token=5), *firsts[1:]]  # as if drawn: now a step meets it
    loop.run(3, loop.admissions([(1, 2), *prompts[1:]], poisoned, [GREEDY] * 3, source_pages))
    assert loop.drawn[0] == [Sampled(BROKEN), None, None]
    expected = greedy_continuation(prompts[1:], 4)
    assert tokens_of([[first, *loop.drawn[n + 1]] for n, first in enumerate(firsts[1:])]) == expected
    again = first_tokens(run_prefill(colocated, prefill_plans([(1, 2, 3)], [GREEDY])))  # in the poisoned pages
    loop = Steps(colocated)
    loop.run(3, loop.admissions([(1, 2, 3)], again, [GREEDY], source_pages))
    assert tokens_of([[again[0], *loop.drawn[0]]]) == expected[:1]


class Poisoned(RandomSource):
    """The tests' model, whose embedding of token 5 is no number."""

    def __init__(self) -> None:
        super().__init__(CONFIG, seed=3)

    def read(self, name: str, index: Index) -> np.ndarray:
        found = super().read(name, index)
        if "embed_tokens" in name:
            found[[row == 5 for row in range(index[0].start, index[0].stop)]] = np.nan
        return found


def test_a_paused_slot_goes_on_where_it_stopped(pair):
    source, destination = pair
    firsts = first_tokens(run_prefill(source, prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS))))
    ship_all(source, destination, [len(prompt) for prompt in PROMPTS])
    loop = Steps(destination)
    loop.run(3, loop.admissions(PROMPTS, firsts, [GREEDY] * len(PROMPTS)))
    loop.run(2, active=[0, 2, 4])
    loop.run(2, active=[0, 1, 2, 3, 4, 5])
    expected = greedy_continuation(PROMPTS, 8)
    for index in range(6):
        row = [firsts[index], *loop.drawn[index]]
        assert tokens_of([row])[0] == expected[index][: len(row)]
    assert len(loop.drawn[0]) == 7 and len(loop.drawn[1]) == 5


def test_granted_pages_are_used_from_the_step_that_grants_them(pair):
    source, destination = pair
    prompt = PROMPTS[0][:1] * PAGE_SIZE
    firsts = first_tokens(run_prefill(source, prefill_plans([prompt], [GREEDY])))
    ship_all(source, destination, [len(prompt)])
    loop = Steps(destination)
    admission = loop.admissions([prompt], firsts, [GREEDY])[0]
    held, granted = admission.pages[:1], admission.pages[1]
    first = decode_plan(0, 0, (0,), WIDEST, (replace(admission, pages=held),), (PageGrant(0, 1, granted),))
    pending = [destination.run(first), *(destination.run(decode_plan(n, 0, (0,), WIDEST)) for n in (1, 2))]
    tokens = [each.read().decode[0][1][0].token for each in pending]
    assert [firsts[0].token, *tokens] == greedy_continuation([prompt], 4)[0]


def test_the_same_seed_gives_the_same_tokens_in_any_company(pair):
    mine = SamplingParams(temperature=1.3, top_p=0.95, seed=77)
    others = [SamplingParams(temperature=0.8, seed=n, frequency_penalty=0.5) for n in range(len(PROMPTS))]
    alone = tokens_of(generate(pair[0], pair[1], PROMPTS[3:4], 8, [mine]))[0]
    others[3] = mine
    crowd = tokens_of(generate(pair[0], pair[1], PROMPTS, 8, others))
    assert crowd[3] == alone
    assert tokens_of(generate(pair[0], pair[1], PROMPTS[3:4], 8, [replace(mine, seed=78)]))[0] != alone


def test_penalties_count_what_was_drawn_on_the_device(pair):
    prompt, sampling = PROMPTS[1], replace(GREEDY, frequency_penalty=1.7, repetition_penalty=1.3)
    found = tokens_of(generate(pair[0], pair[1], [prompt], 9, [sampling]))[0]
    tokens: list[int] = []
    for _ in range(10):
        logits = full_forward()([(*prompt, *tokens)])[0][-1].copy()
        for token in {*prompt, *tokens}:
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in tokens:
            logits[token] -= 1.7
        tokens.append(int(logits.argmax()))
    assert found == tokens


def test_logprobs_are_those_of_the_full_forward(pair):
    prompt = PROMPTS[4]
    rows = generate(pair[0], pair[1], [prompt], 4, [replace(GREEDY, logprobs=3)])[0]
    tokens = tokens_of([rows])[0]
    logits = full_forward()([(*prompt, *tokens)])[0][len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for sampled, row in zip(rows, expected, strict=True):
        assert sampled is not None and sampled.logprob == pytest.approx(row[sampled.token], abs=1e-4)
        assert [token for token, _ in sampled.top] == np.argsort(-row)[:3].tolist()


def test_prompt_logprobs_cross_the_borders_of_chunks(pair):
    prompt, sampling = LONG_PROMPT, replace(GREEDY, prompt_logprobs=2)
    cuts = [0, 5, 6, len(prompt)]
    chunks = [prefill_chunk(0, prompt, start, stop, sampling) for start, stop in itertools.pairwise(cuts)]
    done = run_prefill(pair[0], [prefill_plan(n, (chunk,), CHUNK, WIDEST) for n, chunk in enumerate(chunks)])
    assert [len(each.prompt[0][1]) for each in done] == [4, 1, len(prompt) - 6]
    found = [sampled for each in done for sampled in each.prompt[0][1]]
    logits = full_forward()([prompt])[0][:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert [sampled.token for sampled in found] == list(prompt[1:])
    for sampled, row in zip(found, expected, strict=True):
        assert sampled.logprob == pytest.approx(row[sampled.token], abs=1e-4)
        assert sampled.top[0] == (row.argmax(), pytest.approx(row.max(), abs=1e-4))


def test_min_tokens_hold_a_stop_back_from_prefill_on(pair):
    first = greedy_continuation(PROMPTS[:1], 1)[0][0]
    sampling = replace(GREEDY, min_tokens=3, stop_token_ids=(first,))
    tokens = tokens_of(generate(pair[0], pair[1], PROMPTS[:1], 6, [sampling]))[0]
    assert first not in tokens[:3]


def test_pools_are_updated_in_place(pair):
    def addresses() -> list[int]:
        return [
            pool.addressable_data(0).unsafe_buffer_pointer()
            for machine in pair
            for s in machine.pages
            for pool in s.pools
        ]

    before = addresses()
    generate(pair[0], pair[1], PROMPTS, 5)
    assert addresses() == before


def test_decode_steps_go_on_during_a_ship():
    """The source is busy for long; steps dispatched after the ship end while its shipment is still on the way."""
    source, destination = warm_pair(1, 2)
    firsts = first_tokens(run_prefill(source, prefill_plans(PROMPTS, [GREEDY] * len(PROMPTS))))
    ship_all(source, destination, [len(prompt) for prompt in PROMPTS])
    loop = Steps(destination)
    loop.run(2, loop.admissions(PROMPTS, firsts, [GREEDY] * len(PROMPTS)))
    jax.block_until_ready(busy_for_long(source.pages[0].pools[0]))
    pools = source.pages[0].pools
    pools[0] = busy_for_long(pools[0])
    started = time.perf_counter()
    shipment = source.ship(transfer(source, destination, 9, LONGEST), destination)
    dispatched_s = time.perf_counter() - started
    loop.run(2, active=[0, 1])
    assert not all(is_ready(array) for each in shipment.landed for array in each.slices.values), (
        "the ship ended before the steps"
    )
    shipment.wait()
    arrived_s = time.perf_counter() - started
    destination.insert(shipment)
    assert dispatched_s < arrived_s / 2
    expected = [row[:5] for row in greedy_continuation(PROMPTS[:2], 5)]
    assert tokens_of([[firsts[n], *loop.drawn[n]] for n in (0, 1)]) == expected


def is_ready(array: Any) -> bool:
    return array.is_ready()


@jax.jit
def busy_for_long(pool: jax.Array) -> jax.Array:
    """The same pool, after a few hundred milliseconds of one core."""
    matrix = jax.lax.fori_loop(0, 400, lambda _, m: jnp.sin(m), jnp.full((1024, 1024), pool[0, 0, 0, 0, 0]))
    return pool + 0 * matrix[0, 0]


def test_nothing_is_compiled_after_warm_up(pair):
    sampling = [GREEDY, SamplingParams(seed=3), replace(GREEDY, logprobs=5), SamplingParams(frequency_penalty=1.0)]
    sampling += [replace(GREEDY, prompt_logprobs=1), replace(GREEDY, logit_bias=((3, 1.0),))]
    generate(pair[0], pair[1], PROMPTS, 3, sampling)
    generate(pair[0], pair[1], mixed_prompts(), 2)
    assert [machine.recompiles() for machine in pair] == [0, 0]


def test_a_machine_says_what_it_holds(pair):
    figures = pair[1].figures()
    kv_bytes = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert figures.pool_bytes == kv_bytes * PAGE_SIZE * (pair[1].config.num_pages + 1)
    assert figures.weights_bytes > 4 * CONFIG.num_layers * CONFIG.layer_params()
    assert figures.num_programs > 5


def test_a_role_refuses_the_other_roles_plans(pair):
    with pytest.raises(AssertionError, match="does not prefill"):
        pair[1].run(prefill_plan(0, (), CHUNK, WIDEST))
    with pytest.raises(AssertionError, match="does not decode"):
        pair[0].run(decode_plan(0, 0, (), WIDEST))


def test_ids_of_requests_come_back_with_their_tokens(pair):
    plan = prefill_plan(41, (prefill_chunk(7, (1, 2, 3), 0, 3, GREEDY),), CHUNK, WIDEST)
    done = pair[0].run(plan).read()
    assert done.step_id == 41 and done.first[0][0] == RequestId("7")
    assert jax.devices()[0] in pair[0].layer_groups[0].submesh.devices
