"""Several turns a dispatch of a worker that is one stage: the tokens of single steps, whatever is asked for."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from jdisagg.core.model_config import Experts
from jdisagg.core.request import SamplingParams
from jdisagg.core.worker_config import Role, Stages
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.spec.drafting import DraftingDecoder
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import (
    CONFIG,
    GREEDY,
    WIDEST,
    Steps,
    decode_machine,
    first_tokens,
    generate,
    mixed_prompts,
    open_machine,
    prefill_machine,
    prefill_plans,
    run_prefill,
    ship_all,
    tokens_of,
)
from tests.steps import decode_plan

PROMPTS = mixed_prompts(6, longest=40)
STEPS, TURNS = 9, 4
SAMPLED = [SamplingParams(temperature=1.1, seed=9 + n, top_k=5 * n, min_p=0.01 * n) for n in range(len(PROMPTS))]


@cache
def machine(tp: int = 1) -> MeshExecutor:
    found = open_machine(Role.DECODE, (range(4),), jax.devices()[8 - tp :], decode=Stages(1, TURNS))
    found.warm()
    prefill_machine(1).warm(peers=[found])
    return found


def drawn(one: MeshExecutor, sampling: list[SamplingParams], steps: int = STEPS) -> list[list[int]]:
    return tokens_of(generate(prefill_machine(1), one, PROMPTS, steps, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sampling", [[GREEDY] * len(PROMPTS), SAMPLED], ids=["greedy", "sampled"])
def test_turns_draw_what_single_steps_draw(tp: int, sampling: list[SamplingParams]):
    assert drawn(machine(tp), sampling) == drawn(decode_machine(1), sampling)
    assert machine(tp).recompiles() == 0


def test_a_stop_in_the_midst_of_a_dispatch_ends_one_row_and_no_other():
    free = drawn(machine(), [GREEDY] * len(PROMPTS))
    stop = free[1][3]  # the second turn of the first dispatch
    asked = [GREEDY, replace(GREEDY, stop_token_ids=(stop,)), *[GREEDY] * (len(PROMPTS) - 2)]
    rows = drawn(machine(), asked)
    ends = free[1].index(stop, 1) + 1
    assert rows[1] == free[1][:ends] and ends < 1 + TURNS
    assert [row for at, row in enumerate(rows) if at != 1] == [row for at, row in enumerate(free) if at != 1]


def test_single_steps_and_turns_follow_each_other_on_one_state():
    """As where somebody comes: a dispatch of one turn between two of several."""
    one = machine()
    firsts = first_tokens(run_prefill(prefill_machine(1), prefill_plans(PROMPTS, SAMPLED)))
    ship_all(prefill_machine(1), one, [len(prompt) for prompt in PROMPTS])
    steps = Steps(one)
    steps.run(TURNS + 1, steps.admissions(PROMPTS, firsts, SAMPLED))  # a dispatch of one turn last
    steps.run(STEPS - TURNS - 1, active=range(len(PROMPTS)))
    rows = [[first, *steps.drawn[index]] for index, first in enumerate(firsts)]
    assert tokens_of(rows) == drawn(one, SAMPLED)


def test_a_row_draws_no_more_than_its_own_width():
    one = machine()
    firsts = first_tokens(run_prefill(prefill_machine(1), prefill_plans(PROMPTS, SAMPLED)))
    ship_all(prefill_machine(1), one, [len(prompt) for prompt in PROMPTS])
    steps = Steps(one)
    admitted = steps.admissions(PROMPTS, firsts, SAMPLED)
    widths = (1, 4, 2, 3, 4, 1)
    asked = tuple(range(len(PROMPTS))), WIDEST, tuple(admitted)
    done = one.run(decode_plan(0, 0, *asked, widths=widths, turns=True)).read()
    free = drawn(one, SAMPLED)
    told = [[each.token for each in tokens or ()] for _, tokens in done.decode]
    assert told == [row[1 : 1 + width] for row, width in zip(free, widths, strict=True)]


@pytest.mark.slow
def test_turns_count_what_their_experts_are_sent():
    config = replace(CONFIG, family="qwen3_moe", experts=Experts(5, 2, 24, dense_layers=(0,)))
    source, counts = RandomSource(config, 3), []
    prefill = open_machine(Role.PREFILL, (range(4),), jax.devices()[:1], config, source)
    for turns in (1, TURNS):
        one = open_machine(Role.DECODE, (range(4),), jax.devices()[7:], config, source, decode=Stages(1, turns))
        rows = tokens_of(generate(prefill, one, PROMPTS, 2 * TURNS, [GREEDY] * len(PROMPTS)))
        counts.append((rows, one.expert_loads[0].totals()[0].tolist()))
    assert counts[0] == counts[1]


@cache
def choosing_machine() -> MeshExecutor:
    sizes = {"decode": Stages(1, TURNS), "draft_tokens": 3, "draft_auto": True}
    found = open_machine(Role.DECODE, (range(4),), jax.devices()[7:], **sizes)
    found.warm()
    prefill_machine(1).warm(peers=[found])
    return found


@pytest.mark.parametrize("ends", [(0, 1, 2), (1, 0, 2), (2, 1, 0, 1, 2)])
def test_drafts_are_made_of_tokens_that_turns_drew_and_turns_go_on_behind_drafts(ends: tuple[int, ...]):
    """Steps of one token (0), of turns (1) and with drafts (2) follow each other, each read before the next."""
    one, prompts = choosing_machine(), [(5, 6, 7, 5, 6, 7, 5, 6), (1, 2) * 8, (9, 3, 4) * 3, (4,) * 9]
    sampling = [GREEDY, GREEDY, replace(GREEDY, temperature=0.3, seed=5), GREEDY]
    firsts = first_tokens(run_prefill(prefill_machine(1), prefill_plans(prompts, sampling)))
    ship_all(prefill_machine(1), one, [len(prompt) for prompt in prompts])
    admitted, active = Steps(one).admissions(prompts, firsts, sampling), tuple(range(len(prompts)))
    rows, guessed = [[first.token] for first in firsts], 0
    for step, kind in enumerate(ends * 2):
        widths, admit = ((1, TURNS, 4)[kind],) * len(active), tuple(admitted) if step == 0 else ()
        done = one.run(decode_plan(step, 0, active, WIDEST, admit, widths=widths, turns=kind == 1)).read()
        for slot, drawn in done.decode:
            rows[slot] += [each.token for each in drawn or ()]
        guessed += sum(number for _, _, number in done.guessed)
    plain = tokens_of(generate(prefill_machine(1), decode_machine(1), prompts, max(map(len, rows)), sampling))
    assert rows == [row[: len(found)] for row, found in zip(plain, rows, strict=True)]
    assert one.recompiles() == 0 and guessed > 0
    decoder = one.runner.decoder
    assert isinstance(decoder, DraftingDecoder)
    decoder._note(decoder.microbatches[0], decoder.guesses[0])  # pyright: ignore[reportPrivateUsage]
    for slot, row in enumerate(rows):
        whole = [*prompts[slot], *row]
        assert np.asarray(decoder.guesses[0].history)[slot, : len(whole)].tolist() == whole
