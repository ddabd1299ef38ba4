"""A ring of stages gives the tokens of the network's own definition, whatever is asked for, and those of `stages`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import pytest

from jdisagg.core.layout.stages import ring_cut, split_layers
from jdisagg.core.model_config import Experts, ModelConfig
from jdisagg.core.request import SamplingParams
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.model.hf_config import read_config
from jdisagg.model.sources import HFSource, RandomSource, TensorSource
from tests.engine.scenes import SAMPLING
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    Steps,
    decode_machine,
    first_tokens,
    generate,
    greedy_continuation,
    mixed_prompts,
    open_machine,
    open_ring,
    prefill_machine,
    prefill_plans,
    run_prefill,
    ship_all,
    tokens_of,
)
from tests.engine.worlds import told_by_world
from tests.fixtures.conformance import load
from tests.steps import decode_plan

pytestmark = pytest.mark.slow
PROMPTS = mixed_prompts(12, longest=60)
TURNS = 9
ASKED = [SAMPLING[n % len(SAMPLING)] for n in range(len(PROMPTS))]
EXPERTS = Experts(5, 2, 24, shared_width=16, dense_layers=(0,))
FAMILIES = {
    "five layers": replace(CONFIG, num_layers=5),
    "tied, an odd vocabulary": replace(CONFIG, tie_embeddings=True, vocab_size=99),
    "windows": replace(CONFIG, layer_windows=(16, None, 16, None)),
    "windows out of step": replace(CONFIG, layer_windows=(16, 16, None, 16)),
    "experts behind a dense layer": replace(CONFIG, family="qwen3_moe", experts=EXPERTS),
}


@cache
def ring(pp: int, tp: int) -> MeshExecutor:
    machine = open_ring(pp, tp)
    machine.warm()
    prefill_machine(1).warm(peers=[machine])
    return machine


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_a_ring_gives_the_tokens_of_the_definition(pp: int, tp: int):
    rows = generate(prefill_machine(1), ring(pp, tp), PROMPTS, TURNS)
    assert tokens_of(rows) == greedy_continuation(PROMPTS, TURNS + 1)
    assert ring(pp, tp).recompiles() == 0


def test_a_ring_draws_what_stages_draw():
    """Seeds, penalties and logprobs; the same numbers, and not the tokens alone."""
    mine = generate(prefill_machine(1), ring(2, 1), PROMPTS, TURNS, ASKED)
    other = generate(prefill_machine(1), decode_machine(2), PROMPTS, TURNS, ASKED)
    assert tokens_of(mine) == tokens_of(other)
    for ours, theirs in zip(mine[3], other[3], strict=True):
        assert ours is not None and theirs is not None
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def continued(config: ModelConfig, source: TensorSource, sampling: Sequence[SamplingParams]) -> list[list[list[int]]]:
    """By a ring and by stages, of one prefill."""
    runs = split_layers(config, 2)
    prefill = open_machine(Role.PREFILL, runs, jax.devices()[:1], config, source)
    ring, stages = (
        open_ring(2, 1, config, source),
        open_machine(Role.DECODE, runs, jax.devices()[4:6], config, source, 2),
    )
    prompts = [tuple(token % config.vocab_size for token in prompt) for prompt in PROMPTS[:8]]
    return [tokens_of(generate(prefill, machine, prompts, TURNS, sampling[:8])) for machine in (ring, stages)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_goes_round(name: str):
    config = FAMILIES[name]
    ours, theirs = continued(config, RandomSource(config, 3), ASKED)
    assert ours == theirs


def test_latents_go_round():
    folder = load("deepseek3").folder
    ours, theirs = continued(read_config(folder), HFSource(folder), ASKED)
    assert ours == theirs


def test_a_ring_over_two_processes_gives_the_tokens_of_one_process():
    """Each is a stage; prefill is by a shard of each, so that all KV changes its cut."""
    assert told_by_world("ring_of_two") == [tokens_of(ring_rows())] * 2


def ring_rows():
    return generate(prefill_machine(1), ring(2, 1), PROMPTS, TURNS, ASKED)


def test_a_slot_that_stops_in_a_dispatch_draws_nothing_more():
    prompt, machine = PROMPTS[5], ring(2, 1)
    expected = greedy_continuation([prompt], 6)[0]
    stop = next(index for index in range(1, 6) if expected[index] not in expected[:index])
    asked = replace(GREEDY, stop_token_ids=(expected[stop],))
    rows = generate(prefill_machine(1), machine, [prompt, PROMPTS[1]], TURNS, [asked, GREEDY])
    assert tokens_of(rows)[0] == expected[: stop + 1]
    assert tokens_of(rows)[1] == greedy_continuation([PROMPTS[1]], TURNS + 1)[0]


def test_rows_of_one_dispatch_may_take_different_numbers_of_turns():
    machine, prompts = ring(2, 1), PROMPTS[:3]
    firsts = first_tokens(run_prefill(prefill_machine(1), prefill_plans(prompts, [GREEDY] * 3)))
    ship_all(prefill_machine(1), machine, [len(prompt) for prompt in prompts])
    admit = tuple(Steps(machine).admissions(prompts, firsts, [GREEDY] * 3))
    width = machine.config.table_buckets[-1]
    one = machine.run(decode_plan(0, 0, (0, 1, 2), width, admit, widths=(4, 1, 3), turns=True)).read()
    two = machine.run(decode_plan(1, 0, (0, 2), width, widths=(2, 4), turns=True)).read()
    drawn = {slot: [each.token for each in row or ()] for slot, row in one.decode}
    for slot, row in two.decode:
        drawn[slot] += [each.token for each in row or ()]
    assert [len(drawn[slot]) for slot in range(3)] == [6, 1, 7]
    expected = greedy_continuation(prompts, 8)
    assert [[first.token, *drawn[slot]] for slot, first in enumerate(firsts)] == [
        row[: 1 + len(drawn[slot])] for slot, row in enumerate(expected)
    ]


def test_pools_are_updated_in_place_and_padding_takes_room():
    machine = open_ring(2, 1, FAMILIES["five layers"], RandomSource(FAMILIES["five layers"], 3))
    assert machine.ring is not None
    assert len(ring_cut(FAMILIES["five layers"], 2).numbers) == 3
    assert machine.figures().pool_bytes == 6 * machine.ring.kv.stages[0].pools[0].nbytes

    def addresses() -> list[int]:
        assert machine.ring is not None
        return sorted(
            pool.addressable_data(n).unsafe_buffer_pointer() for pool in machine.ring.kv.pools for n in (0, 1)
        )

    before = addresses()
    config = FAMILIES["five layers"]
    source = open_machine(Role.PREFILL, split_layers(config, 2), jax.devices()[:1], config, RandomSource(config, 3))
    generate(source, machine, PROMPTS[:8], TURNS)
    assert addresses() == before
