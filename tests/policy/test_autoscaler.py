"""The autoscaler never takes a phase its last worker, never flaps, and comes to rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.errors import ConfigError, IllegalTransition
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.scaling import (
    SHARES,
    TABLE,
    Autoscaler,
    Flip,
    Load,
    Replicas,
    Scaling,
    Sign,
    Stance,
    Standby,
    best_batch,
    best_flip,
    next_stance,
    pressure,
)

QUICK = Scaling(price_s=5, steady_s=10, rest_s=60, shrink_s=300)
SPLITWISE = Scaling(mixed=True, price_s=0, steady_s=0, rest_s=1, margin=0)


def house(prefills: int, decodes: int, both: int = 0) -> dict[WorkerId, Standby]:
    roles = [Role.PREFILL] * prefills + [Role.DECODE] * decodes + [Role.COLOCATED] * both
    return {WorkerId(f"w{index}"): Standby(role) for index, role in enumerate(roles)}


loads = st.builds(Load, st.floats(0, 50), st.floats(0, 50))
houses = st.builds(house, st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
scalings = st.builds(
    Scaling,
    price_s=st.floats(0, 100),
    margin=st.floats(0, 0.5),
    steady_s=st.floats(0, 60),
    rest_s=st.floats(5, 600),
    at_once=st.integers(1, 3),
    mixed=st.booleans(),
)


def flipped(workers: dict[WorkerId, Standby], flips: list[Flip]) -> dict[WorkerId, Standby]:
    return workers | {flip.worker: replace(workers[flip.worker], role=flip.role) for flip in flips}


def serves_both(workers: dict[WorkerId, Standby]) -> bool:
    return all(any(SHARES[each.role][phase] for each in workers.values()) for phase in (0, 1))


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize(("stance", "sign"), list(product(Stance, Sign)), ids=lambda each: each.value)
def test_every_stance_takes_the_signs_of_the_table_and_no_other(stance, sign):
    if (stance, sign) in TABLE:
        assert next_stance(stance, sign) is TABLE[stance, sign]
    else:
        with pytest.raises(IllegalTransition, match=f"{stance} cannot take {sign}"):
            next_stance(stance, sign)


def test_from_every_stance_there_is_a_way_back_to_watching():
    for start in Stance:
        seen, edge = {start}, [start]
        while edge:
            stance = edge.pop()
            more = {after for (before, _), after in TABLE.items() if before is stance} - seen
            seen |= more
            edge.extend(more)
        assert Stance.WATCHING in seen


@pytest.mark.parametrize(
    ("name", "value"),
    [("price_s", -1.0), ("margin", float("nan")), ("prefill_busy", 0.0), ("decode_busy", 1.5), ("rest_s", 0.0)],
)
def test_what_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        replace(Scaling(), **{name: value}).check()


# ---------------------------------------------------------------------- what pays


def test_the_pool_that_is_pressed_gets_a_worker_of_the_other():
    assert [each.role for each in best_batch(Load(3.0, 0.5), house(2, 4), QUICK)] == [Role.PREFILL]
    assert [each.role for each in best_batch(Load(0.5, 4.5), house(4, 2), QUICK)] == [Role.DECODE]


def test_the_worker_with_the_least_to_end_is_the_one_that_flips():
    workers = house(2, 3)
    workers = {name: replace(each, work=9.0 - int(name[1])) for name, each in workers.items()}
    assert [each.worker for each in best_batch(Load(3.0, 0.5), workers, QUICK)] == ["w4"]


def test_a_house_with_room_everywhere_leaves_all_as_it_is():
    assert best_flip(Load(0.6, 0.1), house(2, 2), QUICK) is None


def test_a_flip_that_costs_more_than_it_brings_is_not_made():
    load, workers = Load(1.6, 1.5), house(2, 3)
    assert best_flip(load, workers, replace(QUICK, price_s=0, margin=0.05)) is not None
    assert best_flip(load, workers, replace(QUICK, price_s=1e4, margin=0.05)) is None


def test_a_worker_is_only_asked_to_be_what_it_can_be():
    workers = {name: replace(each, can_be=frozenset({each.role})) for name, each in house(2, 4).items()}
    assert best_flip(Load(3.0, 0.5), workers, QUICK) is None


def test_splitwises_mixed_pool_takes_on_both_phases_and_goes_back():
    scaler, workers = Autoscaler(SPLITWISE), house(2, 4)
    first = scaler.look(Load(3.0, 0.5), workers, 0.0)
    assert [(workers[each.worker].role, each.role) for each in first] == [(Role.DECODE, Role.COLOCATED)]
    workers = flipped(workers, first)
    scaler.ended(first[0].worker, well=True)
    scaler.look(Load(0.2, 4.0), workers, 1.0)
    back = scaler.look(Load(0.2, 4.0), workers, 2.0)
    assert back, "the mixed pool's worker, or one of prefill, helps decode at once"


@settings(deadline=None)
@given(loads, houses, scalings)
def test_no_batch_leaves_a_phase_without_a_worker_even_while_it_is_under_way(load, workers, scaling):
    batch = best_batch(load, workers, scaling)
    assert len({flip.worker for flip in batch}) == len(batch) <= scaling.at_once
    for count in range(1, len(batch) + 1):
        rest = {name: each for name, each in workers.items() if name not in {flip.worker for flip in batch[:count]}}
        assert serves_both(rest), "while they are away, both phases are served"
        assert serves_both(flipped(workers, batch[:count]))


@settings(deadline=None)
@given(loads, houses, scalings)
def test_every_flip_lowers_the_worst_pressure(load, workers, scaling):
    for flip in best_batch(load, workers, scaling):
        before = pressure(load, [each.role for each in workers.values()], scaling)
        workers = flipped(workers, [flip])
        assert pressure(load, [each.role for each in workers.values()], scaling) < before


# ---------------------------------------------------------------------- in time


def run(scaler: Autoscaler, workers: dict[WorkerId, Standby], course: list[Load], gap_s: float) -> list[float]:
    """When each flip was asked for; each takes one gap, during which its worker serves nobody."""
    asked, away = list[float](), list[Flip]()
    for step, load in enumerate(course):
        workers = flipped(workers, away)
        for flip in away:
            scaler.ended(flip.worker, well=True)
        away = scaler.look(load, workers, step * gap_s)
        asked += [step * gap_s] * len(away)
        assert serves_both({name: each for name, each in workers.items() if name not in {f.worker for f in away}})
    return asked


@settings(deadline=None)
@given(houses, st.lists(loads, min_size=2, max_size=60), scalings, st.floats(1, 120))
def test_under_any_load_there_are_no_more_flips_an_hour_than_it_says(workers, course, scaling, gap_s):
    asked = run(Autoscaler(scaling), workers, course, gap_s)
    for first in asked:
        assert sum(first <= each < first + 3600 for each in asked) <= scaling.flips_an_hour


@settings(deadline=None)
@given(houses, loads, scalings)
def test_under_one_load_it_comes_to_rest(workers, load, scaling):
    """Each flip lowers the worst pressure, so no cut of the house comes twice; the last ones ask for nothing."""
    scaling = replace(scaling, rest_s=5.0, steady_s=5.0)
    asked = run(Autoscaler(scaling), workers, [load] * 160, 5.0)
    assert all(each < 600.0 for each in asked)


def test_a_burst_shorter_than_it_waits_for_flips_nobody():
    scaler, workers = Autoscaler(QUICK), house(2, 4)
    course = [Load(3.0, 0.5)] * 3 + [Load(0.5, 0.5)] + [Load(3.0, 0.5)] * 3
    assert run(scaler, workers, course, 4.0) == []


def test_a_load_that_turns_and_turns_flips_once_a_rest_at_most():
    course = [Load(4.0, 0.5) if step // 12 % 2 else Load(0.5, 5.0) for step in range(720)]
    asked = run(Autoscaler(QUICK), house(3, 3), course, 5.0)
    assert asked and all(later - sooner >= QUICK.rest_s for sooner, later in pairwise(asked))


def test_what_a_worker_could_not_become_it_is_not_asked_for_again():
    scaler, workers = Autoscaler(replace(QUICK, steady_s=0.0)), house(1, 2)
    (first,) = scaler.look(Load(3.0, 0.2), workers, 0.0)
    scaler.ended(first.worker, well=False)
    scaler.look(Load(3.0, 0.2), workers, 1.0)
    (second,) = scaler.look(Load(3.0, 0.2), workers, 100.0)
    assert second.worker != first.worker
    scaler.ended(second.worker, well=False)
    scaler.look(Load(3.0, 0.2), workers, 101.0)
    assert scaler.look(Load(3.0, 0.2), workers, 300.0) == []


def test_a_worker_that_never_joins_again_does_not_hold_up_the_next_flip_for_ever():
    scaler, workers = Autoscaler(replace(QUICK, steady_s=0.0, late_s=50.0)), house(1, 4)
    (first,) = scaler.look(Load(3.0, 0.2), workers, 0.0)
    left = {name: each for name, each in workers.items() if name != first.worker}
    assert scaler.look(Load(3.0, 0.2), left, 49.0) == []
    assert scaler.look(Load(3.0, 0.2), left, 51.0) == []
    assert scaler.look(Load(3.0, 0.2), left, 111.0)


def test_more_workers_are_asked_for_at_once_and_fewer_only_after_a_while():
    scaler, workers = Autoscaler(QUICK), house(1, 1)
    assert scaler.desired() is None
    scaler.look(Load(0.1, 0.1), workers, 0.0)
    assert scaler.desired() == Replicas(1, 1)
    scaler.look(Load(2.1, 3.6), workers, 5.0)
    assert scaler.desired() == Replicas(3, 4)
    scaler.look(Load(0.1, 0.1), workers, 300.0)
    assert scaler.desired() == Replicas(3, 4)
    scaler.look(Load(0.1, 0.1), workers, 306.0)
    assert scaler.desired() == Replicas(1, 1) and Replicas(1, 1).total == 2
