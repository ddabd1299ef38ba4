"""The search and what it recommends: when to disaggregate and when not, by seed, and clear where nothing goes."""

import pytest

from jdisagg.sim.planner.limits import InfeasibleError
from jdisagg.sim.planner.problem import Objectives
from jdisagg.sim.planner.recommendation import binding, headroom, recommend, total, vary
from jdisagg.sim.planner.search import highest
from jdisagg.sim.planner.space import CandidateSource, Kind
from tests.sim.planner.cases import Lines, problem, search

SMALL = CandidateSource(3, tps=(1,), pps=(1,), chunks=(512,))
TIGHT = Objectives(1.0, 0.015)  # prompts between steps of 10 ms leave no time
LOOSE = Objectives(1.0, 0.2)


def planned(asked, seeds: int = 1):
    trying = search(asked, seeds)
    found = trying.over(SMALL)
    return found, recommend(asked, found, trying.tolerance)


@pytest.fixture(scope="module")
def tight():
    asked = problem(devices=3, objectives=TIGHT)
    return asked, *planned(asked)


@pytest.fixture(scope="module")
def loose():
    asked = problem(devices=3, objectives=LOOSE, device_bytes_per_s=8e6)
    return asked, *planned(asked)


def test_steps_that_must_be_short_are_worth_pools_of_their_own(tight):
    asked, _, recommendation = tight
    assert (
        recommendation.should_disaggregate and str(recommendation.winner.candidate.mesh) == "prefill:2xtp1,decode:tp1"
    )
    assert recommendation.lines[0].startswith("disaggregate: ") and "decode bandwidth binds" in recommendation.lines[0]
    assert recommendation.runner_up and recommendation.runner_up.goodput < recommendation.winner.goodput
    assert total(asked, recommendation.winner) == pytest.approx(3 * recommendation.winner.goodput)


def test_a_thin_link_and_patient_clients_are_not(loose):
    _, found, recommendation = loose
    assert not recommendation.should_disaggregate and recommendation.winner.candidate.kind is Kind.REPLICATED
    assert recommendation.lines[0].startswith("do not disaggregate: ") and "the link binds" in recommendation.lines[0]
    split = found.of(Kind.DISAGGREGATED)
    assert split and binding(split) == "link"


def test_equal_seeds_give_equal_answers(tight):
    asked, found, recommendation = tight
    again, also = planned(asked)
    assert [each.goodputs for each in again.shortlist] == [each.goodputs for each in found.shortlist]
    assert also.lines == recommendation.lines and again.counts == found.counts


def test_every_configuration_is_accounted_for(tight):
    counts = tight[1].counts
    assert counts.considered == 3 and counts.tried + counts.pruned + counts.left >= 3
    assert counts.runs > counts.tried > 0


def test_headroom_says_how_many_devices_a_rate_takes(tight):
    asked, _, recommendation = tight
    carried = total(asked, recommendation.winner)
    assert headroom(asked, recommendation.winner, carried / 2).share == pytest.approx(1.0)
    assert headroom(asked, recommendation.winner, 2 * carried).devices == 6
    assert headroom(asked, recommendation.winner, 2 * carried).share == pytest.approx(-0.5)


def test_other_objectives_can_have_another_winner(tight):
    asked, found, recommendation = tight
    others = {"loose": problem(devices=3, objectives=LOOSE, device_bytes_per_s=8e6), "same": asked}
    others["impossible"] = problem(devices=3, objectives=Objectives(1.0, 1e-3))
    rows, _ = vary(found, recommendation.winner, SMALL, others, search(asked))
    loose, same, impossible = rows
    assert loose.is_changed and loose.winner and loose.winner.kind is Kind.REPLICATED and loose.best > loose.goodput
    assert not same.is_changed and same.goodput > 0
    assert impossible.winner is None and impossible.goodput == 0


def test_one_device_is_nothing_to_split():
    asked = problem(devices=1, lines=Lines(step_s=1e-3))
    trying = search(asked, 1)
    recommendation = recommend(asked, trying.over(CandidateSource(1, (1,), (1,), (512,))), trying.tolerance)
    assert not recommendation.should_disaggregate and "1 device" in recommendation.lines[0]


def test_objectives_nothing_can_keep_are_told_with_the_reasons():
    with pytest.raises(InfeasibleError, match=r"none of 3 configurations keeps .*unloaded TTFT of 102 ms .* 20 ms"):
        search(problem(devices=3, objectives=Objectives(0.02, 0.03))).over(SMALL)


def test_the_highest_rate_is_found_below_and_above_where_it_is_looked_for():
    for edge in (0.2, 3.0, 7.9, 8.1, 20.0):
        tried: list[float] = []

        def holds(rate: float, edge: float = edge, tried: list[float] = tried) -> bool:
            tried.append(rate)
            return rate <= edge

        found = highest(holds, 0.0, 8.0, 0.02)
        assert edge * 0.97 <= found <= edge
        assert len(tried) < 45
    assert highest(lambda rate: False, 0.0, 8.0, 0.02) == 0.0
