"""Chunks and decode rows in one program draw what they draw apart, and nothing is compiled for it when it is needed."""

from functools import cache

import jax
import pytest

from jdisagg.core.events import StepDone
from jdisagg.core.request import RequestId, Sampled, SamplingParams
from jdisagg.core.steps import DecodeRows, PrefillChunks, StepPlan
from jdisagg.core.worker_config import Role
from jdisagg.engine.mesh_executor import MeshExecutor
from tests.engine.stacks import (
    CHUNK,
    CONFIG,
    GREEDY,
    HALVES,
    WIDEST,
    Steps,
    first_tokens,
    greedy_continuation,
    open_machine,
    prefill_chunk,
    prefill_plans,
    run_prefill,
    source_pages,
)

RUNNING = [(3, 1, 4, 1, 5), (9, 2, 6)]  # they decode; sequences 0 and 1, in slots 0 and 1
COMING = [(2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4), (5,) * 30]  # their prompts come beside; sequences 2 and 3
MESHES = [(1, 1), (2, 1), (1, 2)]
LOGPROBS = SamplingParams(temperature=0.0, logprobs=3)
DRAFTS = 3


@cache
def machine_of(pp: int, tp: int) -> MeshExecutor:
    layers = HALVES if pp == 2 else (range(CONFIG.num_layers),)
    drafts = DRAFTS if (pp, tp) == (1, 1) else 0
    machine = open_machine(
        Role.COLOCATED, layers, jax.devices()[: pp * tp], pp=pp, mixed_steps=True, draft_tokens=drafts
    )
    machine.warm()
    return machine


def seated(machine: MeshExecutor, sampling: SamplingParams = GREEDY) -> tuple[Steps, list[Sampled]]:
    """The running ones, prefilled and one step on."""
    asked = [sampling] * len(RUNNING)
    firsts = first_tokens(run_prefill(machine, prefill_plans(RUNNING, asked)))
    loop = Steps(machine)
    loop.run(1, loop.admissions(RUNNING, firsts, asked, source_pages))
    return loop, firsts


def beside(machine: MeshExecutor, step_id: int, *chunks: tuple[int, int, int], sampling=GREEDY) -> StepDone:
    """One step of the running rows, and of these chunks: (sequence, start, stop)."""
    cut = tuple(prefill_chunk(index, COMING[index - 2], start, stop, sampling) for index, start, stop in chunks)
    rows = DecodeRows(0, (0, 1), WIDEST)
    return machine.run(StepPlan(step_id, rows, PrefillChunks(cut, CHUNK, WIDEST))).read()


@pytest.mark.parametrize(("pp", "tp"), MESHES)
def test_rows_and_chunks_of_one_step_draw_what_the_full_forward_does(pp: int, tp: int):
    machine = machine_of(pp, tp)
    loop, firsts = seated(machine)
    done = [beside(machine, 10, (2, 0, 11), (3, 0, 16)), beside(machine, 11, (3, 16, 30))]
    for step in done:
        for slot, drawn in step.decode:
            loop.drawn[slot] += drawn or ()
    loop.run(2, active=(0, 1))  # what the mixed steps left is what later steps read
    running = [[first.token, *[each.token for each in loop.drawn[row] if each]] for row, first in enumerate(firsts)]
    assert running == greedy_continuation(RUNNING, 6)
    came = {name: sampled.token for step in done for name, sampled in step.first}
    assert [came[RequestId(name)] for name in "23"] == [row[0] for row in greedy_continuation(COMING, 1)]
    assert machine.recompiles() == 0


def test_a_mixed_step_rounds_otherwise_than_a_decode_step_and_by_next_to_nothing():
    """In f32. Products of more rows are summed in another order: `--mixed_steps=off` keeps to one."""
    machine, found = machine_of(1, 1), []
    for mixed in (True, False):
        loop, _ = seated(machine, LOGPROBS)
        if mixed:
            done = beside(machine, 20, (3, 0, 30))
            found.append([drawn[0] for _, drawn in done.decode if drawn])
        else:
            loop.run(1, active=(0, 1))
            found.append([loop.drawn[row][-1] for row in (0, 1)])
    for one, other in zip(*found, strict=True):
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_prompt_that_rides_gets_its_logprobs():
    machine, asked = machine_of(1, 1), SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    seated(machine)
    alone = machine.run(
        StepPlan(30, prefill=PrefillChunks((prefill_chunk(2, COMING[0], 0, 11, asked),), CHUNK, WIDEST))
    ).read()
    done = beside(machine, 31, (2, 0, 11), sampling=asked)
    for one, other in zip(
        [*done.prompt[0][1], done.first[0][1]], [*alone.prompt[0][1], alone.first[0][1]], strict=True
    ):
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert len(done.prompt[0][1]) == 10 and len(done.first[0][1].top) == 2


def test_a_held_row_of_a_mixed_step_goes_on_from_where_it_was():
    machine = machine_of(1, 1)
    loop, firsts = seated(machine)
    cut = (prefill_chunk(2, COMING[0], 0, 11, GREEDY),)
    done = machine.run(StepPlan(40, DecodeRows(0, (1,), WIDEST), PrefillChunks(cut, CHUNK, WIDEST))).read()
    loop.drawn[1] += done.decode[0][1] or ()
    loop.run(2, active=(0, 1))
    rows = [[first.token, *[each.token for each in loop.drawn[row] if each]] for row, first in enumerate(firsts)]
    assert rows[0] == greedy_continuation(RUNNING, 4)[0] and rows[1] == greedy_continuation(RUNNING, 5)[1]


def test_rows_verify_drafts_beside_chunks_and_draw_the_tokens_that_they_draw_without():
    machine, prompts = machine_of(1, 1), [(5, 6, 7, 5, 6, 7, 5, 6), (1, 2) * 8]
    asked = [GREEDY, SamplingParams(temperature=0.4, seed=7, presence_penalty=0.1, logprobs=1)]
    found, steps = [], []
    for most in (1, 1 + DRAFTS):
        firsts = first_tokens(run_prefill(machine, prefill_plans(prompts, asked)))
        admitted = tuple(Steps(machine).admissions(prompts, firsts, asked, source_pages))
        rows, count = [[first.token] for first in firsts], 0
        while min(map(len, rows)) < 20:
            chunks = (prefill_chunk(2, COMING[0], 0, 11, GREEDY), prefill_chunk(3, COMING[1], 0, 16, GREEDY))
            slots = DecodeRows(0, (0, 1), WIDEST, () if count else admitted, widths=(most,) * 2)
            done = machine.run(StepPlan(count, slots, PrefillChunks(chunks, CHUNK, WIDEST))).read()
            for row, (_, drawn) in zip(rows, done.decode, strict=True):
                row += [each.token for each in drawn or ()]
            assert all(1 <= guessed < most for _, kind, guessed in done.guessed) and len(done.first) == 1
            count += 1
        found.append([row[:20] for row in rows])
        steps.append(count)
    assert found[0] == found[1] and found[0][0] == greedy_continuation(prompts[:1], 20)[0]
    assert steps[1] < steps[0] == 19 and machine.recompiles() == 0
