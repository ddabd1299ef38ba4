"""Which of two routers leads: row by row, and in a model of members and routers whose links break as they like."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.policy.lease import ASKED_S, PROMISE_S, TABLE, Contender, Lease, Rank, Witness

LEASE_S = 5.0


def first(now_s: float = 0.0) -> Contender:
    return Contender(True, LEASE_S, now_s)


def second(now_s: float = 0.0) -> Contender:
    return Contender(False, LEASE_S, now_s)


def follower(*members: str, term: int = 1) -> Contender:
    """The second router, told of these members by the first, which is silent since second 0."""
    contender = second()
    contender.heard(Lease(term, True, members), 0.0)
    contender.silent()
    return contender


def leader(*members: str, term: int = 1) -> Contender:
    """The first router, which leads these members, as the second knows."""
    contender = first()
    contender.term = term - 1
    contender.heard(Lease(0, False), 0.0)
    contender.look((), 0.0)
    contender.look(members, 0.0)
    contender.heard(Lease(term, False, members), 0.0)
    assert contender.rank is Rank.LEADING and contender.lease == Lease(term, True, tuple(sorted(members)))
    return contender


def test_a_router_that_was_deposed_never_leads_again():
    assert {then for (rank, _), then in TABLE.items() if rank is Rank.LEADING} == {Rank.DEPOSED}
    assert not [sign for rank, sign in TABLE if rank is Rank.DEPOSED]
    assert set(TABLE.values()) == {Rank.LEADING, Rank.DEPOSED}


def test_where_both_are_there_and_nobody_leads_the_first_does():
    one, other = first(), second()
    for contender, its in ((one, other.lease), (other, one.lease)):
        contender.heard(its, 0.0)
        contender.look((), 0.0)
    assert (one.rank, one.term, other.rank) == (Rank.LEADING, 1, Rank.STANDING_BY)


def test_the_first_that_is_asked_leads_alone_after_a_lease_and_the_second_after_two_when_it_is_asked():
    one, other = first(), second()
    for at_s in (LEASE_S - 0.1, LEASE_S):
        one.asked("w", 0, (), at_s)
        one.look((), at_s)
        assert one.rank is (Rank.LEADING if at_s == LEASE_S else Rank.STANDING_BY)
    other.look((), 100.0)
    assert other.rank is Rank.STANDING_BY, "nobody asks for it"
    other.asked("w", 0, (), 100.0)
    other.look((), 100.0)
    assert other.rank is Rank.LEADING


def test_the_second_waits_as_long_as_the_first_leads():
    contender = second()
    for at_s in range(60):
        contender.heard(Lease(1, True, ("w",)), float(at_s))
        contender.asked("w", 1, ("w",), float(at_s))
        contender.look((), float(at_s))
    assert contender.rank is Rank.STANDING_BY


@pytest.mark.parametrize(("asking", "leads"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_half_of_the_members_call_the_second_once_the_lease_is_over(asking: int, leads: bool):
    contender = follower("a", "b", "c", "d")
    for at_s in (LEASE_S - 0.1, LEASE_S):
        for member in "abcd"[:asking]:
            contender.asked(member, 1, (), at_s)
        contender.look((), at_s)
        assert (contender.rank is Rank.LEADING) == (leads and at_s == LEASE_S)
    assert contender.term == (2 if leads else 1)


def test_strangers_and_those_who_asked_long_ago_do_not_count():
    contender = follower("a", "b")
    contender.asked("a", 1, (), LEASE_S)
    contender.asked("x", 1, (), LEASE_S + ASKED_S)
    contender.look((), LEASE_S + ASKED_S)
    assert contender.rank is Rank.STANDING_BY
    contender.asked("a", 1, (), LEASE_S + ASKED_S)
    contender.look((), LEASE_S + ASKED_S)
    assert contender.rank is Rank.LEADING


def test_a_router_that_knows_nothing_learns_the_term_and_the_members_from_who_asks():
    contender = first()
    contender.asked("a", 7, ("a", "b", "c"), LEASE_S)
    contender.look((), LEASE_S)
    assert contender.rank is Rank.STANDING_BY, "one of three"
    contender.asked("b", 7, ("a", "b", "c"), LEASE_S)
    contender.look((), LEASE_S)
    assert (contender.rank, contender.term) == (Rank.LEADING, 8)


@pytest.mark.parametrize(("here", "goes_on"), [("abcd", True), ("abc", True), ("ab", False), ("a", False), ("", False)])
def test_a_leader_without_the_other_needs_more_than_half_of_its_members(here: str, goes_on: bool):
    contender = leader(*"abcd")
    contender.silent()
    contender.look([*here, "x", "y"], LEASE_S)
    assert contender.rank is (Rank.LEADING if goes_on else Rank.DEPOSED)
    assert goes_on or f"{len(here)} of 4 members" in contender.why


def test_a_router_that_was_called_gives_its_members_a_lease_to_come():
    """It stepped down a moment after it had been called, for nobody had joined it yet."""
    contender = follower("a", "b")
    for member in "ab":
        contender.asked(member, 1, (), LEASE_S)
    contender.look((), LEASE_S)
    contender.look((), 2 * LEASE_S - 0.1)
    assert contender.rank is Rank.LEADING
    contender.look("ab", 2 * LEASE_S)
    assert contender.rank is Rank.LEADING
    contender.look("a", 2 * LEASE_S)
    assert contender.rank is Rank.DEPOSED


def test_workers_that_die_depose_nobody_while_the_other_router_is_there():
    contender = leader(*"abcd")
    contender.heard(Lease(1, False), 1.0)
    contender.look((), 1.0)
    assert contender.rank is Rank.LEADING and contender.lease.members == ()


def test_a_higher_term_deposes_whoever_tells_of_it():
    by_router, by_member = leader("a"), leader("a")
    by_router.heard(Lease(2, True), 1.0)
    by_member.asked("b", 3, (), 1.0)
    assert by_router.rank is by_member.rank is Rank.DEPOSED
    assert "term 2" in by_router.why and "b has obeyed term 3" in by_member.why


def test_of_equal_terms_the_first_router_keeps_its():
    one, other = leader("a"), second()
    other.asked("w", 0, (), 100.0)
    other.look((), 100.0)
    assert one.term == other.term == 1 and other.rank is Rank.LEADING
    one.heard(other.lease, 101.0)
    other.heard(one.lease, 101.0)
    assert (one.rank, other.rank) == (Rank.LEADING, Rank.DEPOSED)


def test_a_router_that_comes_back_stands_by():
    contender = first(50.0)
    contender.heard(Lease(2, True, ("a", "b")), 51.0)
    contender.look((), 80.0)
    assert contender.rank is Rank.STANDING_BY and contender.lease == Lease(2, False, ("a", "b"))


def test_a_member_obeys_no_lower_term_than_it_has_obeyed_or_promised_a_moment_ago():
    witness = Witness()
    assert witness.obey(1, 0.0) and witness.obey(1, 0.0)
    witness.promise(3, 10.0)
    assert not witness.obey(1, 10.0 + PROMISE_S - 0.1), "it has asked another"
    assert witness.obey(1, 10.0 + PROMISE_S) and witness.term == 1, "which never led"
    witness.promise(3, 20.0)
    assert witness.obey(3, 21.0) and not witness.obey(2, 60.0)
    witness.promise(9, 70.0)
    witness.promise(9, 72.0)
    assert witness.may_ask(70.5) and not witness.may_ask(72.0), "it would be counted upon for too long"
    assert witness.bound(72.9) and not witness.bound(73.0), "a promise is not made longer"
    assert witness.may_ask(73.0) and witness.obey(3, 73.0)


class Model:
    """Two routers and three members after a quiet start; links break and mend, and are known to within a tick of 1 s.

    A member is with one router, or asks both in turn; no clock is off.
    """

    def __init__(self) -> None:
        self.now_s, self.cut = 0.0, set[frozenset[str]]()
        self.routers = {"A": first(), "B": second()}
        self.witnesses = {name: Witness() for name in "abc"}
        self.with_router: dict[str, str | None] = dict.fromkeys(self.witnesses)
        self.obeyed: dict[str, list[int]] = {name: [] for name in self.witnesses}
        self.asking = dict.fromkeys(self.witnesses, "B")  # last
        for _ in range(10):
            self.tick()
        assert set(self.with_router.values()) == {"A"} and self.routers["B"].members == frozenset("abc")

    def linked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut

    def tick(self) -> None:
        self.now_s += 1.0
        for name, other in (("A", "B"), ("B", "A")):
            if self.linked("A", "B"):
                self.routers[name].heard(self.routers[other].lease, self.now_s)
            else:
                self.routers[name].silent()
        for member in self.witnesses:
            self._go(member)
        for name, router in self.routers.items():
            router.look([each for each, its in self.with_router.items() if its == name], self.now_s)
        for name, router in self.routers.items():
            if router.rank is Rank.DEPOSED:  # its process starts again
                self.routers[name] = Contender(router.first, LEASE_S, self.now_s)
                self.with_router |= {each: None for each, its in self.with_router.items() if its == name}

    def _go(self, member: str) -> None:
        its = self.with_router[member]
        if its is not None and self.linked(member, its):
            return
        self.with_router[member], witness = None, self.witnesses[member]
        if witness.bound(self.now_s):
            name = self.asking[member]
        else:
            name = self.asking[member] = "AB"[self.asking[member] == "A"]
        router = self.routers[name]
        if not self.linked(member, name) or not witness.may_ask(self.now_s):
            return
        router.asked(member, witness.term, "abc", self.now_s)
        if router.rank is not Rank.LEADING:
            witness.promise(router.next_term, self.now_s)
        elif witness.obey(router.term, self.now_s):
            self.with_router[member] = name
            self.obeyed[member].append(router.term)

    @property
    def leaders(self) -> list[str]:
        return [name for name, router in self.routers.items() if router.rank is Rank.LEADING]


LINKS = [frozenset(pair) for pair in (*product("AB", "abc"), ("A", "B"))]
CHANGES = st.tuples(st.sampled_from(LINKS), st.integers(0, 12))


@settings(max_examples=200, deadline=None)
@given(st.lists(CHANGES, max_size=12))
def test_whatever_breaks_a_member_obeys_ever_higher_terms_and_one_router_leads(
    changes: list[tuple[frozenset[str], int]],
):
    model = Model()
    for link, ticks in changes:
        model.cut ^= {link}
        for _ in range(ticks):
            model.tick()
            assert sum(model.routers[name].met for name in model.leaders) <= 1, model.leaders
            assert all(terms == sorted(terms) for terms in model.obeyed.values())
    model.cut.clear()
    for _ in range(40):
        model.tick()
    assert len(model.leaders) == 1 and set(model.with_router.values()) == set(model.leaders), "once all is mended"


def test_when_the_first_is_cut_off_the_second_takes_over_all_and_the_first_comes_back_standing_by():
    model = Model()
    model.cut = {link for link in LINKS if "A" in link}
    for _ in range(12):
        model.tick()
    assert model.leaders == ["B"] and set(model.with_router.values()) == {"B"}
    model.cut.clear()
    for _ in range(12):
        model.tick()
    assert model.leaders == ["B"] and model.routers["A"].rank is Rank.STANDING_BY
    assert all(terms == [1, 2] for terms in model.obeyed.values())


def test_a_partition_between_the_routers_alone_changes_nothing():
    model = Model()
    model.cut = {frozenset("AB")}
    for _ in range(60):
        model.tick()
    assert model.leaders == ["A"] and all(terms == [1] for terms in model.obeyed.values())
