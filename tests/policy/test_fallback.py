"""When a worker of both roles is better than a pair: the prediction, what it is made of, and the router's use of it."""

from typing import Any

import pytest

from jdisagg.commands.replay import replay
from jdisagg.core.events import WorkerLost
from jdisagg.core.journal import Header, Journal, read_lines
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Refused, Reserved
from jdisagg.core.request import Attempt, FinishReason, RequestId, WorkerId
from jdisagg.core.router_config import RouterConfig, Routing
from jdisagg.core.worker_config import Role
from jdisagg.policy.fallback import PathEstimate, benefit_of, run_tokens
from jdisagg.policy.pace import FORGET_S, Pace, RecentMeans
from tests.policy.test_pair_selection import Told
from tests.sim.cases import check_ended, request, worker
from tests.sim.world import World

P, D, C = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("colocated-0")
MIXED = [worker(P, Role.PREFILL), worker(D, Role.DECODE), worker(C, Role.COLOCATED)]

IDLE = PathEstimate(run_tokens=100, queue_tokens=0, prompt_token_s=1e-3, output_token_s=1e-2)
APART = PathEstimate(run_tokens=100, queue_tokens=0, prompt_token_s=1e-3, output_token_s=1e-2, transfer_token_s=1e-4)


def but(path: PathEstimate, **changes: Any) -> PathEstimate:
    fields = {name: getattr(path, name) for name in PathEstimate.__dataclass_fields__}
    return PathEstimate(**(fields | changes))


@pytest.mark.parametrize(
    ("apart", "together", "prompt_tokens", "output_tokens", "benefit_s"),
    [
        (APART, IDLE, 100, 10, -0.010),  # idle: only the transfer counts
        (IDLE, IDLE, 100, 10, 0.0),  # and where it is hidden, nothing
        (APART, but(IDLE, disturbed=4), 100, 10, 0.390),  # four who decode would each wait for the prompt
        (APART, but(IDLE, queue_tokens=50), 100, 10, 0.040),
        (but(APART, queue_tokens=50), IDLE, 100, 10, -0.060),
        (but(APART, disturbed=0), but(IDLE, prompt_token_s=2e-3), 100, 10, 0.090),  # the colocated mesh is slower
        (APART, but(IDLE, output_token_s=1.2e-2), 100, 10, 0.010),
        (APART, but(IDLE, output_token_s=1.2e-2), 100, 2, -0.006),  # short answers care less
        (but(APART, transfer_token_s=5e-3), but(IDLE, disturbed=4), 100, 10, -0.1),  # a slow link
    ],
)
def test_the_gain_of_disaggregating(apart, together, prompt_tokens, output_tokens, benefit_s):
    assert benefit_of(apart, together, prompt_tokens, output_tokens).benefit_s == pytest.approx(benefit_s)


def test_the_reason_names_the_parts_that_differ():
    benefit = benefit_of(APART, but(IDLE, disturbed=1), 100, 10)
    assert benefit.reason == (
        "disaggregating gains 90 ms: transfer 10 ms against 0 ms, delay of others 0 ms against 100 ms"
    )
    assert benefit_of(IDLE, IDLE, 100, 1).reason == "disaggregating gains 0 ms: nothing differs"


def test_a_prompt_is_run_in_whole_programs():
    assert [run_tokens(tokens, (16, 64)) for tokens in (1, 16, 17, 64, 65, 129)] == [16, 16, 64, 64, 80, 144]


def test_a_figure_follows_the_latest_and_is_forgotten():
    figures = RecentMeans()
    assert figures.guess("a", 0.0) is None
    figures.learn("a", 1.0, 0.0)
    figures.learn("a", 2.0, 1.0)
    assert figures.of("a", 1.0) == pytest.approx(1.2) == figures.guess("b", 1.0)
    assert figures.of("a", 1.0 + FORGET_S) is None is figures.guess("b", 1.0 + FORGET_S)


def ledger_of(**at_s: float) -> Ledger:
    ledger = Ledger()
    for name, instant_s in at_s.items():
        ledger.mark(Mark(name), instant_s)
    return ledger


WHOLE = {"arrived": 0.0, "prefill_started": 1.0, "first_token": 3.0, "committed": 3.5, "first_step": 3.5, "ended": 8.5}


def test_pace_is_learnt_of_whole_lives_only():
    pace = Pace()
    pace.learn(ledger_of(**WHOLE), P, D, (10, 16, 6), 9.0)
    assert pace.prompt.of(P, 9.0) == pytest.approx(2 / 16) and pace.output.of(D, 9.0) == pytest.approx(1.0)
    assert pace.transfer.of(f"{P} {D}", 9.0) == pytest.approx(0.05) and pace.expected_tokens(100, 9.0) == 6
    pace.learn(ledger_of(arrived=0.0, requeued=1.0, ended=50.0), P, D, (10, 16, 6), 50.0)
    assert pace.prompt.of(P, 50.0) == pytest.approx(2 / 16)
    pace.forget(P)
    assert pace.prompt.of(P, 50.0) is None is pace.transfer.usual(50.0) and pace.output.of(D, 50.0) is not None


# ------------------------------------------------------------------ the router's use of it


def serve(talk: Told, name: str, *, wire_s: float) -> str:
    """Runs one request through its attempt, each part as long as it is said to be; returns who prefilled it."""
    each = request(name, 10, max_tokens=1)
    talk.submit(each)
    pair = talk.pairs()[-1]
    epoch = len(talk.pairs())
    talk.says(pair[1], Reserved(Attempt(each.request_id, epoch), (1, 2, 3)))
    row = talk.router.rows[each.request_id]
    for mark, part_s in ((Mark.PREFILL_STARTED, 0.0), (Mark.FIRST_TOKEN, 0.1), (Mark.COMMITTED, wire_s)):
        talk.now_s += part_s
        row.mark(mark, talk.now_s)
    row.output.append(5)
    talk.router.requests.finish(row, FinishReason.LENGTH, "", talk.now_s)
    return pair[0]


def known(talk: Told) -> None:
    """Output figures, which answers of one token do not give."""
    talk.router.routes.pace.output.learn(D, 0.01, talk.now_s)


def test_the_router_stays_with_the_pools_until_it_knows_and_then_goes_where_it_is_faster():
    talk = Told(MIXED)
    assert serve(talk, "a", wire_s=0.5) == P
    assert "too little is known yet" in talk.decisions[-1].reason
    known(talk)
    assert serve(talk, "b", wire_s=0.0) == C
    assert "disaggregating loses 500 ms: transfer 500 ms against 0 ms" in talk.decisions[-1].reason
    assert talk.decisions[-1].to_json()["taken"] == {"prefill": C, "decode": C}


def test_whoever_failed_the_request_comes_second_whatever_is_predicted():
    talk = Told(MIXED)
    talk.submit(request("a"))
    talk.fire("row/a")  # nobody answers: the decode worker is to be avoided
    assert talk.pairs() == [(P, D), (C, C)] and "failed this request before" in talk.decisions[-1].reason


def test_who_has_no_room_is_not_weighed_and_that_is_told():
    talk = Told(MIXED)
    talk.submit(request("a"))
    talk.says(D, Refused(Attempt(RequestId("a"), 1), "full"))
    assert talk.pairs() == [(P, D), (C, C)]
    assert talk.decisions[1].reason.endswith("the pools have no room")


def test_where_the_transfer_is_hidden_the_pools_are_kept():
    talk = Told(MIXED)
    serve(talk, "a", wire_s=0.0)
    known(talk)
    assert serve(talk, "b", wire_s=0.0) == P and "disaggregating gains 0 ms" in talk.decisions[-1].reason


def test_off_means_the_pools_as_long_as_there_are_any():
    talk = Told(MIXED, colocated_fallback=False)
    serve(talk, "a", wire_s=0.5)
    known(talk)
    assert serve(talk, "b", wire_s=0.5) == P
    assert "candidates" in (shown := talk.decisions[-1].to_json()) and "colocated" not in shown["candidates"]
    talk.take(WorkerLost(P))
    talk.submit(request("c"))
    assert talk.pairs()[-1] == (C, C)


def test_figures_are_only_kept_where_there_is_a_choice():
    talk = Told(MIXED[:2])
    serve(talk, "a", wire_s=0.5)
    assert talk.router.routes.pace == Pace()


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("routing", Routing)
def test_a_mixed_cluster_serves_what_any_cluster_serves_and_decides_alike_again(routing, fallback):
    config, lines = RouterConfig(routing=routing, colocated_fallback=fallback), []
    journal = Journal(Header(config, tuple(MIXED)), sink=lines.append)
    world = World(MIXED, config, journal=journal)
    requests = [request(f"r{index % 5}/{index}", 4 + index, arrival_s=0.01 * index) for index in range(12)]
    for each in requests:
        world.submit(each, each.arrival_s)
    world.run()
    check_ended(world, requests)
    journal.close()
    assert replay(*read_lines(lines)) == journal.num_recorded
