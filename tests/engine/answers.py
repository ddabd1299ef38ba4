"""What a decode machine answers prompts whose KV it gets from another, by rows of one token or of several."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from jdisagg.core.request import BROKEN, SamplingParams
from jdisagg.core.steps import PrefillChunks, Read
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.runner import Runner
from jdisagg.model.grammars.grammars import CompiledGrammars
from tests.engine.stacks import Steps, first_tokens, prefill_machine, prefill_plans, run_prefill, ship_all
from tests.steps import decode_plan


def answers(
    machine: MeshExecutor,
    prompts: list[tuple[int, ...]],
    sampling: list[SamplingParams],
    most: int,
    beside: PrefillChunks | None = None,
) -> list:
    """What each prompt draws, by rows that may draw `most` a step, each step read before the next; and the rows.
    beside: chunks that every step computes as well."""
    source = prefill_machine(1)
    source.warm(peers=[machine])
    free = [replace(each, grammar="", synchronous=False) for each in sampling]
    firsts = first_tokens(run_prefill(source, prefill_plans(prompts, free)))
    ship_all(source, machine, [len(prompt) for prompt in prompts])
    admitted = Steps(machine).admissions(prompts, firsts, sampling)
    rows, steps, count, active = [[first] for first in firsts], 0, 0, tuple(range(len(prompts)))
    drawn: dict[int, tuple[int, ...]] = {}  # by each slot's last step
    while active:
        left = [min(most, 24 - len(rows[slot])) for slot in active]
        read = tuple(Read(slot, drawn[slot]) for slot in active if steps and sampling[slot].grammar)
        plan = decode_plan(
            *(steps, 0, active, 12, admitted if steps == 0 else ()),
            widths=tuple(left) if most > 1 else (),
            read=read,
        )
        for slot, found in machine.run(replace(plan, prefill=beside)).read().decode:
            assert found is not None
            rows[slot] += found
            drawn[slot] = tuple(each.token for each in found)
        steps, count = steps + 1, count + len(active)
        active = tuple(slot for slot in active if len(rows[slot]) < 24 and rows[slot][-1].token != BROKEN)
    return [rows, count]


@contextmanager
def speaking(machine: MeshExecutor, grammars: CompiledGrammars) -> Iterator[None]:
    """The machine's rows know these grammars meanwhile."""
    assert isinstance(machine.runner, Runner) and machine.runner.decoder is not None
    batches = machine.runner.decoder.microbatches
    for batch in batches:
        batch.masks.grammars = grammars
    yield
    for batch in batches:
        batch.masks.grammars = None
        batch.masks.places.clear()
