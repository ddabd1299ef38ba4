"""A router's leadership: members reach it, and hear it, only while it holds the lease by its own clock."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.errors import ConfigError, PeerDead, SenselessWord
from jdisagg.serve.cluster.control_client import TermFence
from jdisagg.serve.cluster.coordination import MAX_TERM, CoordinationError, InProcessLease
from jdisagg.serve.cluster.leadership import Leadership
from jdisagg.serve.cluster.link import Link
from tests.serve.cluster.test_router_node import RecordingLink

TTL_S = 10.0
HELLO = {"named": ["decode-0"], "term": 0, "router": ""}


class RecordingNode:
    """A router that records what reaches it."""

    def __init__(self) -> None:
        self.heard = list[Any]()

    def admit(self, link: Link, hello: dict[str, Any]) -> dict[str, Any]:
        self.heard.append("admit")
        return {}

    def on_joined(self, link: Link) -> None:
        self.heard.append("joined")

    def on_message(self, link: Link, body: dict[str, Any]) -> None:
        self.heard.append(body)

    def on_lost(self, link: Link, why: str) -> None:
        self.heard.append("lost")


class ScriptedLease:
    """A lease that answers as the test says: `term`, or an error."""

    def __init__(self, term: int | None, error: Exception | None = None) -> None:
        self.term, self.error, self.is_released = term, error, False

    def hold(self, above: int = 0) -> int | None:
        if self.error is not None:
            raise self.error
        if self.term is not None:
            self.term = max(self.term, above + 1)
        return self.term

    def leader(self) -> tuple[str, int] | None:
        return "10.0.0.9:8100/8000/8080", 4

    def release(self) -> None:
        self.is_released = True


class LeadershipFixture:
    """A leadership over a scripted lease and clock."""

    def __init__(self, term: int | None = 3) -> None:
        self.node, self.lease, self.clock_s = RecordingNode(), ScriptedLease(term), 100.0
        self.terms, self.ends = list[int](), list[str]()
        self.leadership = Leadership(
            self.node, self.lease, TTL_S, self.terms.append, self.ends.append, lambda: self.clock_s
        )
        self.leadership.renew()

    def admit(self, **hello: Any) -> tuple[RecordingLink, dict[str, Any]]:
        link = RecordingLink()
        answer = self.leadership.admit(link, HELLO | hello)
        self.leadership.on_joined(link)
        return link, answer


def test_a_leader_admits_members_with_its_term_and_passes_their_messages():
    fixture = LeadershipFixture()
    link, answer = fixture.admit()
    assert answer == {"term": 3, "router": fixture.leadership.identity} and fixture.terms == [3]
    fixture.leadership.on_message(link, {"status": 1})
    fixture.leadership.on_lost(link, "it left")
    assert fixture.node.heard == ["admit", "joined", {"status": 1}, "lost"]
    assert fixture.leadership.standby_error() is None


def test_a_standby_turns_members_away_and_names_the_leader_to_clients():
    fixture = LeadershipFixture(None)
    link, answer = fixture.admit()
    assert answer == {"standby": True} and link.why_over == "this router is a standby"
    fixture.leadership.on_message(link, {"status": 1})
    fixture.leadership.on_lost(link, "it left")
    assert not fixture.node.heard and not fixture.ends
    error = fixture.leadership.standby_error()
    assert error is not None and error.http == "10.0.0.9:8000"
    assert str(error) == ("this router is a standby; the leader serves HTTP at 10.0.0.9:8000 and gRPC at 10.0.0.9:8080")


def test_a_leader_that_cannot_renew_stops_by_its_own_clock_before_the_lease_ends():
    fixture = LeadershipFixture()
    link, _ = fixture.admit()
    fixture.lease.error = CoordinationError("gone")
    fixture.clock_s += 0.79 * TTL_S
    fixture.leadership.renew()
    assert fixture.leadership.is_leader and link.may_send() and not fixture.ends
    fixture.clock_s += 0.02 * TTL_S
    assert not fixture.leadership.is_leader and not link.may_send(), "before anything asks the service"
    fixture.leadership.on_message(link, {"status": 1})
    assert fixture.node.heard == ["admit", "joined"]
    fixture.lease.error = None  # the service is back, too late
    fixture.leadership.renew()
    assert fixture.ends == ["this router stepped down: its lease of term 3 was not renewed for 8 s"]
    fixture.leadership.renew()
    assert not fixture.leadership.is_leader and len(fixture.ends) == 1


def test_a_leader_that_the_service_no_longer_names_steps_down_at_once():
    fixture = LeadershipFixture()
    fixture.lease.term = None
    fixture.leadership.renew()
    assert not fixture.leadership.is_leader
    assert fixture.ends == [
        "this router stepped down: the coordination service no longer names it the leader of term 3"
    ]


def test_a_lease_that_was_taken_too_long_ago_makes_no_leader():
    fixture = LeadershipFixture(None)

    def hold_slowly(above: int = 0) -> int:
        fixture.clock_s += TTL_S
        return 5

    fixture.lease.hold = hold_slowly
    fixture.leadership.renew()
    assert not fixture.leadership.is_leader and not fixture.terms and not fixture.ends


def test_a_new_term_exceeds_every_term_that_a_worker_reports_and_members_are_told():
    fixture = LeadershipFixture()
    link, _ = fixture.admit()
    _, answer = fixture.admit(term=41, router="another")
    assert answer["term"] == 42 and fixture.terms == [3, 42] and link.sent == [{"term": 42}]
    _, answer = fixture.admit(term=42, router=fixture.leadership.identity)
    assert answer["term"] == 42, "its own term is no reason for a new one"
    _, answer = fixture.admit(term=42, router="another")
    assert answer["term"] == 43, "two routers gave the same term: the service had lost it"


def test_a_term_that_a_standby_hears_of_counts_when_it_leads():
    fixture = LeadershipFixture(None)
    fixture.admit(term=7, router="another")
    fixture.lease.term = 1
    fixture.leadership.renew()
    assert fixture.terms == [8]


def test_where_no_higher_term_can_be_had_a_member_is_asked_to_come_again():
    fixture = LeadershipFixture()
    fixture.lease.error = CoordinationError("gone")
    with pytest.raises(PeerDead, match=r"a peer has obeyed term 9, .*: gone"):
        fixture.admit(term=9, router="another")
    assert fixture.node.heard == []


def test_an_unfit_service_ends_the_router_with_its_line():
    fixture = LeadershipFixture(None)
    fixture.lease.error = ConfigError("maxmemory-policy allkeys-lru, must be noeviction")
    fixture.leadership.renew()
    assert fixture.ends == ["this router stepped down: maxmemory-policy allkeys-lru, must be noeviction"]


def test_a_leader_that_ends_gives_the_lease_up_and_a_standby_does_not():
    for term, is_released in ((3, True), (None, False)):
        fixture = LeadershipFixture(term)
        fixture.leadership.stop()
        assert fixture.lease.is_released == is_released and not fixture.leadership.is_leader


def test_a_single_router_leads_however_long_it_was_stopped():
    clock_s, ends = 0.0, list[str]()
    lease = InProcessLease("a:1/2/3")
    leadership = Leadership(RecordingNode(), lease, float("inf"), lambda term: None, ends.append, lambda: clock_s)
    leadership.renew()
    clock_s = 1e6
    assert leadership.is_leader
    leadership.renew()
    assert leadership.is_leader and not ends


@pytest.mark.parametrize("wrong", [-1, "1", True, MAX_TERM])
def test_what_a_member_reports_as_its_term_is_checked(wrong: Any):
    with pytest.raises(SenselessWord, match="must be a number from 0 to"):
        LeadershipFixture().admit(term=wrong)


def test_a_worker_refuses_lower_terms_and_the_same_term_of_another_router():
    fence = TermFence()
    fence.obey(5, "one")
    fence.obey(5, "one")
    for term, router in ((4, "one"), (4, "two"), (5, "two")):
        with pytest.raises(PeerDead, match=f"leads with term {term}, and term 5 "):
            fence.obey(term, router)
    fence.obey(6, "two")
    assert (fence.term, fence.router) == (6, "two")
    for wrong in (-1, "7", None, MAX_TERM):
        with pytest.raises(SenselessWord):
            fence.obey(wrong, "two")
