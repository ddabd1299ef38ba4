"""Steps on real devices whose later stages wait for their KV: the same tokens and bytes, and nobody waits along."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from jdisagg.core.request import Attempt, RequestId
from jdisagg.core.steps import Admission, Gate, StepPlan
from jdisagg.engine.mesh_executor import MeshExecutor, MeshShipment
from jdisagg.engine.runner import HeldStep
from tests.engine.stacks import (
    GREEDY,
    HALVES,
    LONGEST,
    PAGE_SIZE,
    WIDEST,
    destination_pages,
    first_tokens,
    pages_by_layer,
    prefill_plans,
    run_prefill,
    transfer,
    warm_pair,
)
from tests.steps import decode_plan

PROMPT = tuple(7 * i % 97 for i in range(37))
TURNS = 4


@dataclass
class Sequence:
    """Prompt number `index` in a slot of its own microbatch, its KV in one part for each half of the layers."""

    machine: MeshExecutor
    index: int
    token: int
    parts: list[MeshShipment]

    @property
    def microbatch(self) -> int:
        return self.index % self.machine.config.num_microbatches

    @property
    def slot(self) -> int:
        return self.microbatch * self.machine.config.slots_per_microbatch

    @property
    def pages(self) -> tuple[int, ...]:
        return destination_pages(self.index, LONGEST)

    def plan(self, number: int, gates: tuple[Gate, ...] = (), **more) -> StepPlan:
        admission = Admission(self.slot, RequestId(str(self.index)), self.token, len(PROMPT), self.pages, GREEDY, 1)
        admit = () if number else (admission,)
        return decode_plan(10 * self.index + number, self.microbatch, (self.slot,), WIDEST, admit, gates=gates, **more)

    def waiting(self) -> tuple[Gate, ...]:
        """Gates of the stages whose layers are in the second part."""
        stages = [each.layers for each in self.machine.pages]
        late = [stage for stage, layers in enumerate(stages) if layers.stop > HALVES[1].start]
        return tuple(Gate(stage, Attempt(RequestId(str(self.index)), 0), (1,)) for stage in late)

    def steps(self, first: int = 0) -> list[int]:
        pending = [self.machine.run(self.plan(number)) for number in range(first, TURNS)]
        return [token_of(each) for each in pending]

    def kv(self) -> list[np.ndarray]:
        """Of every layer, the rows of the prompt and of what was decoded: [pages, Hkv, 2, page, D]."""
        used = list(self.pages[: -(-(len(PROMPT) + TURNS) // PAGE_SIZE)])
        return [pool[used] for stage in self.machine.pages for pool in pages_by_layer(stage)]


def token_of(pending) -> int:
    ((_, (sampled,)),) = pending.read().decode
    return sampled.token


def prefilled(source: MeshExecutor, machine: MeshExecutor, count: int) -> list[Sequence]:
    """The same prompt several times, in pages of their own."""
    firsts = first_tokens(run_prefill(source, prefill_plans([PROMPT] * count, [GREEDY] * count)))
    found = []
    for index, first in enumerate(firsts):
        whole = transfer(source, machine, index, len(PROMPT))
        parts = [
            source.ship(replace(whole, part=part, layers=(run.start, run.stop)), machine)
            for part, run in enumerate(HALVES)
        ]
        found.append(Sequence(machine, index, first.token, parts))
    return found


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_stage_runs_before_the_last_part_is_there_and_tokens_and_pages_are_the_same(pp):
    source, machine = warm_pair(2, pp)
    compiled = machine.num_compiled
    plain, early = prefilled(source, machine, 2)
    for part in plain.parts:
        machine.insert(part)
    tokens = [token_of(machine.run(plain.plan(0)))]
    before = early.kv()
    machine.insert(early.parts[0])
    inserted = early.kv()
    held = machine.run(early.plan(0, early.waiting()))
    during = early.kv()
    assert isinstance(held, HeldStep) and not held.done
    for layer, (was, came, now) in enumerate(zip(before, inserted, during, strict=True)):
        first_part = layer in HALVES[0]
        assert np.array_equal(was, came) != first_part, f"layer {layer}: the part"
        assert np.array_equal(came, now) != first_part, f"layer {layer}: the stage has written its token, or has not"
    tokens += plain.steps(1)  # another microbatch overtakes
    assert not held.done
    machine.insert(early.parts[1])
    assert [token_of(held), *early.steps(1)] == tokens
    for one, other in zip(plain.kv(), early.kv(), strict=True):
        assert written(one).tobytes() == written(other).tobytes()
    assert machine.num_compiled == compiled and machine.recompiles() == 0


def written(pages: np.ndarray) -> np.ndarray:
    """[pages, Hkv, 2, page, D] -> [tokens, ...] of the sequence."""
    rows = np.moveaxis(pages, 3, 1).reshape(-1, *pages.shape[1:3], pages.shape[4])
    return rows[: len(PROMPT) + TURNS]


def test_gates_that_are_opened_let_the_step_run_before_its_pages_are_anothers():
    source, machine = warm_pair(2, 2)
    plain, gone, other = prefilled(source, machine, 3)
    for part in plain.parts:
        machine.insert(part)
    expected = [token_of(machine.run(plain.plan(0)))]
    machine.insert(gone.parts[0])
    held = machine.run(gone.plan(0, gone.waiting()))
    expected += plain.steps(1)
    machine.open_gates(Attempt(RequestId("1"), 0))
    held.read()  # whatever it drew, it is nobody's
    for part in other.parts:  # into the pages that were its own
        machine.insert(moved(source, part, gone))
    again = replace(gone, token=other.token)
    first = again.plan(0).decode
    assert first is not None
    admission = replace(first.admit[0], slot=again.slot + 1)
    rows = replace(first, active=(again.slot + 1,), admit=(admission,), retire=(again.slot,))
    tokens = [token_of(machine.run(StepPlan(70, rows)))]
    for number in range(1, TURNS):
        tokens.append(token_of(machine.run(StepPlan(70 + number, replace(rows, admit=(), retire=())))))
    assert tokens == expected


def moved(source: MeshExecutor, part: MeshShipment, to: Sequence) -> MeshShipment:
    """The same KV for the pages of another."""
    pages = to.pages[: len(part.transfer.destination_pages)]
    return source.ship(replace(part.transfer, destination_pages=pages), to.machine)


def test_what_a_stage_raises_when_its_gate_opens_is_told_to_who_reads_the_step(monkeypatch):
    source, machine = warm_pair(2, 2)
    _, early = prefilled(source, machine, 2)
    machine.insert(early.parts[0])
    held = machine.run(early.plan(0, early.waiting()))

    def broken(*_):
        raise RuntimeError("the stage is broken")

    monkeypatch.setattr(machine.layer_groups[1], "decode", broken)
    machine.insert(early.parts[1])
    with pytest.raises(RuntimeError, match="the stage is broken"):
        held.read()
