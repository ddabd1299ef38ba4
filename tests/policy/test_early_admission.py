"""Who begins to decode before its KV is whole, what its turn waits for, and who goes first where places are few."""

from typing import Any

from jdisagg.core.events import KVArrived, OpenGates, Received, Send, StepDone
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.messages import Abort, Ack, Commit
from jdisagg.core.request import Attempt, Request, RequestId, Sampled, WorkerId
from jdisagg.core.steps import Gate, KVTransfer
from jdisagg.core.worker_config import Role, Stages
from jdisagg.policy.router.request_state import reserve_for
from jdisagg.policy.worker import Worker
from tests.sim.cases import request, worker
from tests.steps import decode_runs

A1 = Attempt(RequestId("a"), 1)

STAGES = ((0, 3), (3, 6), (6, 8))
SOURCE = WorkerId("prefill-0")


class Bench:
    """A decode worker of three stages; each prompt's KV is one chunk in three parts, a stage's layers each."""

    def __init__(self, **sizes) -> None:
        given = {"layer_groups": STAGES, "num_slots": 6, "decode": Stages(3), **sizes}
        self.worker = Worker(worker("decode-0", Role.DECODE, **given))
        self.effects: list = []

    def take(self, event) -> list:
        effects = self.worker.handle(event, 0.0)
        self.worker.check_invariants()
        self.effects += effects
        return effects

    def begin(self, each: Request, parts: tuple[int, ...] = (), layers=STAGES) -> list:
        """A reservation, these parts in it, and COMMIT."""
        self.take(Received(SOURCE, reserve_for(Attempt(each.request_id, 1), each, 0, SOURCE, 10.0)))
        for part in parts:
            self.arrive(each, part)
        return self.take(
            Received(SOURCE, Commit(Attempt(each.request_id, 1), Sampled(3), len(each.prompt), 3, layers=layers))
        )

    def arrive(self, each: Request, part: int) -> list:
        name = each.request_id
        nowhere = (NULL_PAGE,)  # as of pages that the worker holds already
        return self.take(
            KVArrived(KVTransfer(Attempt(name, 1), SOURCE, self.worker.config.worker, (1,), nowhere, 4, part))
        )

    def read(self, plan: Any) -> list:
        return self.take(StepDone(plan.step_id, tuple((slot, (Sampled(4),)) for slot in plan.decode.active)))

    @property
    def free_pages(self) -> int:
        return self.worker.pool.free_pages


def plans(effects: list) -> list[Any]:
    return [run.plan for run in decode_runs(effects)]


def opened(effects: list) -> list[str]:
    return [effect.attempt.request_id for effect in effects if isinstance(effect, OpenGates)]


def test_a_sequence_is_seated_when_its_first_stage_is_in_and_later_stages_have_gates():
    bench = Bench()
    (plan,) = plans(bench.begin(request("a"), (0,)))
    assert plan.decode.gates == (Gate(1, A1, (1,)), Gate(2, A1, (2,))) and len(plan.decode.admit) == 1
    assert not plans(bench.arrive(request("a"), 1)), "its microbatch takes no other step"
    effects = bench.arrive(request("a"), 2)
    assert [type(each.message) for each in effects if isinstance(each, Send)].count(Ack) == 1
    (more,) = plans(effects)
    assert more.decode.microbatch == plan.decode.microbatch and not opened(bench.effects)
    assert not more.decode.gates and not more.decode.admit


def test_nobody_is_seated_while_the_first_stage_lacks_a_part_or_parts_hold_all_layers():
    for parts, layers, sizes in [
        ((1, 2), STAGES, {}),
        ((0,), (), {}),
        ((0,), STAGES, {"stage_admission": False}),
        ((0,), STAGES, {"layer_groups": ()}),
    ]:
        assert not plans(Bench(**sizes).begin(request("a"), parts, layers))


def test_other_microbatches_go_on_as_if_it_was_not_there():
    bench = Bench()
    (held,) = plans(bench.begin(request("a"), (0,)))
    steps = plans(bench.begin(request("b", max_tokens=30), (0, 1, 2)))
    assert len(steps) == 2, "two steps ahead, though the first microbatch's step waits"
    for _ in range(9):
        steps += plans(bench.read(steps.pop(0)))
    assert len(steps) == 2 and all(step.decode.microbatch != held.decode.microbatch for step in steps)


def test_an_abort_opens_the_gates_before_the_pages_can_be_anothers():
    bench = Bench()
    free = bench.free_pages
    (plan,) = plans(bench.begin(request("a"), (0,)))
    effects = bench.take(Received(SOURCE, Abort(A1, "no longer wanted")))
    assert opened(effects) == ["a"] and bench.free_pages == free
    assert isinstance(effects[0], OpenGates), "first of all"
    bench.read(plan)
    assert bench.worker.idle and not [each for each in bench.effects if isinstance(each, Send) and "Drawn" in str(each)]


def test_a_whole_sequence_that_finds_no_other_place_takes_that_of_one_that_waits():
    bench = Bench(num_slots=1, decode=Stages(1))
    free = bench.free_pages
    early, whole = request("a", max_tokens=3), request("b", max_tokens=3)
    (held,) = plans(bench.begin(early, (0,)))
    steps = plans(effects := bench.begin(whole, (0, 1, 2)))
    assert opened(effects) == ["a"] and [each.request_id for each in steps[0].decode.admit] == ["b"]
    assert steps[0].decode.retire == held.decode.active
    for part in (1, 2):
        bench.arrive(early, part)
    for step in (steps := plans(bench.effects)):
        steps += plans(bench.read(step))
    assert [each.request_id for step in steps for each in step.decode.admit] == ["a", "b", "a"]
    assert bench.worker.idle and bench.free_pages == free
    drawn = [delta for each in bench.effects if isinstance(each, Send) for delta in getattr(each.message, "deltas", ())]
    assert [(delta.attempt.request_id, delta.index) for delta in drawn] == [("b", 1), ("b", 2), ("a", 1), ("a", 2)]


def test_whole_sequences_keep_away_from_a_microbatch_that_waits_as_long_as_there_is_another():
    bench = Bench()
    (held,) = plans(bench.begin(request("a"), (0,)))
    steps = [plan for name in "bcde" for plan in plans(bench.begin(request(name), (0, 1, 2)))]
    assert held.decode.microbatch not in {step.decode.microbatch for step in steps} and not opened(bench.effects)


def test_the_last_step_may_be_the_first_and_its_pages_stay_until_its_kv_is_in():
    bench = Bench()
    free = bench.free_pages
    each = request("a", max_tokens=2)
    (plan,) = plans(bench.begin(each, (0,)))
    bench.arrive(each, 1)
    assert bench.free_pages < free
    bench.arrive(each, 2)
    assert bench.free_pages == free, "given back when the step is certain to run"
    bench.read(plan)
    assert bench.worker.idle
