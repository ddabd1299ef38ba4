"""The toy machine tells right pages from wrong ones: else no test that stands on it would prove anything."""

from dataclasses import replace

import pytest

from jdisagg.core.request import Attempt, RequestId, SamplingParams, WorkerId
from jdisagg.core.steps import Admission, KVTransfer, PageGrant, PrefillChunk
from jdisagg.core.worker_config import Role
from jdisagg.engine.toy import NOTHING, ToyError, ToyExecutor, toy_output
from tests.sim.cases import worker
from tests.steps import decode_plan, prefill_plan

A1 = Attempt(RequestId("a"), 1)

PROMPT = (5, 17, 80, 3, 41, 9)
GREEDY = SamplingParams(max_tokens=6)
A = RequestId("a")


def prefill(machine: ToyExecutor, pages: tuple[int, ...] = (3, 1), step_id: int = 1) -> int:
    chunk = PrefillChunk(A, PROMPT, 0, pages, True, GREEDY)
    ((_, sampled),) = machine.run(prefill_plan(step_id, (chunk,), 8, 4)).read().first
    return sampled.token


def admission(first: int, sampling: SamplingParams = GREEDY, pages: tuple[int, ...] = (3, 1)) -> Admission:
    return Admission(0, A, first, len(PROMPT), pages, sampling, 1)


def step(machine: ToyExecutor, step_id: int, **changes: tuple) -> int | None:
    ((_, drawn),) = machine.run(decode_plan(step_id, 0, (0,), 4, **changes)).read().decode
    return drawn[0].token if drawn else None


def machine_of(**kwargs: set[int]) -> ToyExecutor:
    return ToyExecutor(worker("both", Role.COLOCATED), **kwargs)


def test_right_pages_give_the_definition():
    machine = machine_of()
    output = [prefill(machine)]
    output.append(step(machine, 2, admit=(admission(output[0]),)) or 0)
    output.append(step(machine, 3) or 0)
    output.append(step(machine, 4, grants=(PageGrant(0, 2, 7),)) or 0)
    assert output == toy_output(PROMPT, GREEDY)[:4]


@pytest.mark.parametrize("pages", [(1, 3), (3, 2), (2, 1)])
def test_a_foreign_page_or_a_wrong_order_gives_a_wrong_token(pages):
    machine = machine_of()
    first = prefill(machine)
    assert step(machine, 2, admit=(admission(first, pages=pages),)) != toy_output(PROMPT, GREEDY)[1]


def test_a_page_that_another_wrote_over_gives_a_wrong_token():
    machine = machine_of()
    first = prefill(machine)
    chunk = PrefillChunk(RequestId("b"), (1, 2), 0, (3,), False, GREEDY)
    machine.run(prefill_plan(2, (chunk,), 8, 4))
    assert step(machine, 3, admit=(admission(first),)) != toy_output(PROMPT, GREEDY)[1]


def test_what_was_shipped_is_what_the_pages_held_then():
    source, destination = machine_of(), machine_of()
    first = prefill(source)
    transfer = KVTransfer(A1, WorkerId("p"), WorkerId("d"), (3, 1), (5, 6), len(PROMPT))
    shipment = source.ship(transfer, destination)
    source.pages[3] = [0, 0, 0, 0]
    destination.insert(shipment)
    assert step(destination, 1, admit=(admission(first, pages=(5, 6)),)) == toy_output(PROMPT, GREEDY)[1]


def test_a_layer_group_that_was_not_shipped_gives_a_wrong_token():
    config = worker("both", Role.COLOCATED, layer_groups=((0, 2), (2, 3)))
    source, destination = ToyExecutor(config), ToyExecutor(config)
    first = prefill(source)
    for part, layers in enumerate([(0, 2), (2, 3)]):
        transfer = KVTransfer(A1, WorkerId("p"), WorkerId("d"), (3, 1), (5, 6), len(PROMPT), part, layers)
        missing = ToyExecutor(config)
        missing.insert(source.ship(transfer, missing))
        assert step(missing, 1, admit=(admission(first, pages=(5, 6)),)) != toy_output(PROMPT, GREEDY)[1]
        destination.insert(source.ship(transfer, destination))
    assert step(destination, 1, admit=(admission(first, pages=(5, 6)),)) == toy_output(PROMPT, GREEDY)[1]


def test_between_groups_nothing_of_the_next_is_computed():
    config = worker("both", Role.COLOCATED, layer_groups=((0, 2), (2, 3)))
    machine, seen = ToyExecutor(config), []
    chunk = PrefillChunk(A, PROMPT, 0, (3, 1), True, GREEDY)

    def look(layers: int) -> None:
        seen.append((layers, [list(group[3]) for group in machine.groups]))

    machine.run(prefill_plan(1, (chunk,), 8, 4), look)
    assert seen == [(2, [list(PROMPT[:4]), [NOTHING] * 4])]


def test_a_slot_that_drew_its_stop_masks_itself():
    expected = toy_output(PROMPT, GREEDY)
    stopping = replace(GREEDY, stop_token_ids=(expected[1],))
    machine = machine_of()
    first = prefill(machine)
    assert step(machine, 2, admit=(admission(first, stopping),)) == expected[1]
    assert step(machine, 3) is None


def test_a_fault_changes_nothing():
    machine = machine_of(fail_plans={1})
    before = [list(page) for page in machine.pages]
    with pytest.raises(ToyError, match="plan 1"):
        prefill(machine)
    assert machine.pages == before
    assert prefill(machine, step_id=2) == toy_output(PROMPT, GREEDY)[0]
