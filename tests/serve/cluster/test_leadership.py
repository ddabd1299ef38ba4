"""A router that is one of two: members reach it only while it leads, and whatever a peer says is checked."""

from __future__ import annotations

from typing import Any

import pytest

from jdisagg.core.errors import ConfigError, SenselessWord
from jdisagg.core.settings import Settings
from jdisagg.policy.lease import Contender, Lease, Rank
from jdisagg.serve.cluster.leadership import KnownMembers, Leadership, OtherRouter, pair_of
from jdisagg.serve.cluster.link import Link
from tests.serve.cluster.test_router_node import RecordingLink

HELLO = {"named": ["decode-0"], "known": ["decode-0", "prefill-0"], "term": 0}


class Node:
    """Who hears what is for a router that leads."""

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


class Worker:
    """A worker process that hears its router."""

    def hello(self) -> dict[str, Any]:
        return {"workers": []}

    def on_joined(self, link: Link, welcome: dict[str, Any]) -> None:
        return

    def on_message(self, body: dict[str, Any]) -> None:
        return

    def on_lost(self, why: str) -> None:
        return


class LeadershipFixture:
    def __init__(self, *, leads: bool) -> None:
        self.node, self.why = Node(), list[str]()
        self.leadership = Leadership(self.node, Contender(True, 0.0, -1.0))
        self.leadership.deposed = self.why.append
        if leads:
            self.leadership.contender.asked("decode-0", 0, (), 0.0)
            self.leadership.contender.heard(Lease(0, False), 0.0)
            self.leadership._look()
            assert self.leadership.leads


def test_a_router_that_stands_by_turns_members_away_and_tells_the_term_it_would_have():
    fixture = LeadershipFixture(leads=False)
    link = RecordingLink()
    assert fixture.leadership.admit(link, HELLO) == {"standing_by": 1}
    fixture.leadership.on_joined(link)
    fixture.leadership.on_message(link, {"from": "decode-0"})
    fixture.leadership.on_lost(link, "it left")
    assert link.why_over == "this router stands by" and not fixture.node.heard


def test_a_router_that_hears_of_a_leader_asks_for_no_promise():
    fixture = LeadershipFixture(leads=False)
    OtherRouter(fixture.leadership).on_message({"lease": {"term": 4, "leading": True, "members": ["decode-0"]}})
    assert fixture.leadership.admit(RecordingLink(), HELLO) == {"standing_by": 0}


def test_a_router_that_leads_takes_members_and_tells_its_term():
    fixture = LeadershipFixture(leads=True)
    link = RecordingLink()
    assert fixture.leadership.admit(link, HELLO) == {"term": 1}
    fixture.leadership.on_joined(link)
    fixture.leadership.on_message(link, {"status": 1})
    fixture.leadership._look()
    assert fixture.leadership.contender.members == {"decode-0"}
    fixture.leadership.on_lost(link, "it left")
    assert fixture.node.heard == ["admit", "joined", {"status": 1}, "lost"]


def test_the_other_router_is_told_the_lease_again_and_again():
    fixture, link = LeadershipFixture(leads=True), RecordingLink()
    lease = {"term": 1, "leading": True, "members": []}
    assert fixture.leadership.admit(link, {"router": True}) == {"lease": lease}
    fixture.leadership.on_joined(link)
    fixture.leadership._look()
    assert link.sent == [{"lease": lease}] and not fixture.node.heard


def test_a_member_that_has_obeyed_a_higher_term_deposes_the_router_with_one_line():
    fixture = LeadershipFixture(leads=True)
    answer = fixture.leadership.admit(RecordingLink(), {**HELLO, "term": 5})
    assert "standing_by" in answer and fixture.leadership.contender.rank is Rank.DEPOSED
    assert fixture.why == ["this router stepped down: decode-0 has obeyed term 5, this router had 1"]


@pytest.mark.parametrize(
    "wrong",
    [{"term": -1}, {"term": "1"}, {"term": 1 << 60}, {"known": "all"}, {"named": [1]}, {"named": ["x"] * 5000}],
)
def test_what_a_member_says_is_checked(wrong: dict[str, Any]):
    with pytest.raises(SenselessWord):
        LeadershipFixture(leads=False).leadership.admit(RecordingLink(), HELLO | wrong)


@pytest.mark.parametrize("wrong", [{}, {"lease": 1}, {"lease": {"term": 1, "leading": True, "members": None}}])
def test_what_the_other_router_says_is_checked(wrong: dict[str, Any]):
    with pytest.raises(SenselessWord):
        OtherRouter(LeadershipFixture(leads=False).leadership).on_message(wrong)


def test_a_member_says_who_its_last_routers_members_were():
    known = KnownMembers(Worker(), ("decode-0",))
    known.on_joined(RecordingLink(), {})
    known.on_message({"peers": [{"config": {"worker": name}} for name in ("prefill-0", "prefill-1")]})
    known.on_message({"gone": ["prefill-1"]})
    known.on_lost("it died")
    assert known.hello() == {"workers": [], "named": ["decode-0"], "known": ["decode-0", "prefill-0"]}
    known.on_joined(RecordingLink(), {})
    assert known.hello()["known"] == ["decode-0"]


def test_a_router_finds_itself_among_the_two():
    both = "10.0.0.1:8100,10.0.0.2:8100"
    assert pair_of(Settings(router="")) is None
    assert pair_of(Settings(host="10.0.0.1", router=both)) == (True, "10.0.0.2:8100")
    assert pair_of(Settings(host="10.0.0.2", router=both)) == (False, "10.0.0.1:8100")
    assert pair_of(Settings(host="0.0.0.0", control_port=8101, router="a:8100,b:8101")) == (False, "a:8100")


@pytest.mark.parametrize("router", ["127.0.0.1:9", "a:8100,b:8100", "a:1,b:2", "a:8100,b:8101,c:8102"])
def test_a_router_that_is_not_one_of_two_is_told_what_to_change(router: str):
    with pytest.raises(ConfigError, match=rf"--router={router} .*0\.0\.0\.0:8100"):
        pair_of(Settings(host="0.0.0.0", router=router))
