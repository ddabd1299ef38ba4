"""A front's book of its clients' streams: none of a token twice, none lost, whichever router tells them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import SenselessWord
from jdisagg.core.events import (
    Cancel,
    EmitTokens,
    Finish,
    Reject,
    RouterFound,
    RouterLost,
    Send,
    SetTimer,
    Submit,
    TimerFired,
    Told,
)
from jdisagg.core.ledger import Ledger
from jdisagg.core.messages import Ask, TokenDelta, Withdraw
from jdisagg.core.request import Attempt, FinishReason, RequestId, Sampled, WorkerId
from jdisagg.policy.front import FAR_ROUTER, GRACE_TIMER, RouterClient
from tests.sim.cases import request

A, D = RequestId("a"), WorkerId("decode-0")
OVER = Finish(A, FinishReason.LENGTH, Ledger())


class Book:
    """Speaks to one front as its clients, its router and its clock."""

    def __init__(self, *, linked: bool = True) -> None:
        self.front, self.now_s, self.effects = RouterClient(grace_s=10.0), 0.0, list[Any]()
        self.timers: dict[str, float] = {}
        if linked:
            self.take(RouterFound())

    def take(self, event: Any) -> list[Any]:
        effects = self.front.handle(event, self.now_s)
        self.timers |= {effect.key: effect.at_s for effect in effects if isinstance(effect, SetTimer)}
        self.effects += effects
        return effects

    def tokens(self, index: int, *tokens: int) -> list[Any]:
        delta = TokenDelta(Attempt(A, 1), index, tuple(Sampled(token) for token in tokens))
        return self.take(Told((EmitTokens(delta, D),)))

    def fire(self) -> list[Any]:
        self.now_s = max(self.now_s, self.timers.pop(GRACE_TIMER))
        return self.take(TimerFired(GRACE_TIMER))

    def asked(self) -> list[Any]:
        sends = [effect for effect in self.effects if isinstance(effect, Send)]
        assert all(send.to == FAR_ROUTER for send in sends)
        return [send.message for send in sends]

    def told(self) -> list[int]:
        deltas = [effect.delta for effect in self.effects if isinstance(effect, EmitTokens)]
        places = [place for delta in deltas for place in range(delta.index, delta.index + len(delta.sampled))]
        assert places == [*range(len(places))]
        return [sampled.token for delta in deltas for sampled in delta.sampled]


def test_a_request_is_asked_for_and_what_is_told_is_passed_on():
    book = Book()
    book.take(Submit(request("a")))
    assert book.asked() == [Ask(request("a"))]
    book.tokens(0, 10)
    book.tokens(1, 11, 12)
    assert book.told() == [10, 11, 12] and book.take(Told((OVER,))) == [OVER] and not book.front.rows


def test_the_next_router_is_asked_for_the_rest():
    book = Book()
    book.take(Submit(request("a")))
    book.tokens(0, 10, 11)
    book.take(RouterLost())
    book.take(RouterFound())
    assert book.asked()[-1] == Ask(request("a"), (10, 11), resumed=True)
    book.tokens(1, 11, 12)
    assert book.told() == [10, 11, 12]


def test_a_request_without_a_router_waits_for_one():
    book = Book(linked=False)
    assert [type(effect) for effect in book.take(Submit(request("a")))] == [SetTimer]
    book.take(RouterFound())
    assert book.asked() == [Ask(request("a"))]
    book.fire()
    assert book.front.rows, "the timer was of a wait that is over"


def test_when_no_router_comes_clients_are_told_so_and_new_ones_turned_away_until_one_does():
    book = Book()
    book.take(Submit(request("a")))
    book.take(RouterLost())
    (finish,) = book.fire()
    assert finish.reason is FinishReason.ERROR and "no router for 10 s" in finish.detail and book.now_s == 10.0
    assert finish.ledger.total_ns == 10_000_000_000
    (reject,) = book.take(Submit(request("b")))
    assert isinstance(reject, Reject) and "no router" in reject.detail
    book.take(RouterFound())
    book.take(Submit(request("c")))
    assert [each.request.request_id for each in book.asked()] == ["a", "c"]


def test_each_loss_has_a_grace_of_its_own():
    book = Book()
    book.take(Submit(request("a")))
    book.take(RouterLost())
    book.now_s = 6.0
    book.take(RouterFound())
    book.take(RouterLost())
    book.timers[GRACE_TIMER] = 10.0
    assert book.fire() == [] and book.front.rows


def test_a_client_that_goes_is_withdrawn_and_what_is_told_of_it_later_is_for_nobody():
    book = Book()
    book.take(Submit(request("a")))
    book.take(Cancel(A, FinishReason.STOP))
    assert book.asked()[-1] == Withdraw(A, FinishReason.STOP)
    book.take(Told((OVER,)))
    assert book.tokens(0, 10) == [] and book.take(Told((OVER,))) == []


def test_a_client_that_goes_while_there_is_no_router_has_gone():
    book = Book()
    book.take(Submit(request("a")))
    book.take(RouterLost())
    (finish,) = book.take(Cancel(A))
    assert finish.reason is FinishReason.ABORT
    book.take(RouterFound())
    assert len(book.asked()) == 1 and book.take(Cancel(A)) == []


def test_a_gap_in_what_a_router_tells_ends_the_session_with_it():
    book = Book()
    book.take(Submit(request("a")))
    book.tokens(0, 10)
    with pytest.raises(SenselessWord, match="token 5 of 'a', where 1 are known"):
        book.tokens(5, 15)


@given(st.lists(st.sampled_from(["draw", "hear", "lose", "find", "repeat"]), max_size=60))
def test_whatever_routers_do_a_client_is_told_each_token_once_and_in_order(moves: list[str]):
    """Each router tells on from where it was asked; what is under way when it is lost never comes."""
    book, way, drawn = Book(), list[tuple[int, int]](), 0
    book.take(Submit(request("a", max_tokens=60)))
    for move in moves:
        if move == "draw" and book.front.linked:
            way.append((drawn, 100 + drawn))
            drawn += 1
        elif move == "hear" and way:
            index, token = way.pop(0)
            book.tokens(index, token)
        elif move == "repeat" and book.front.linked and not way and drawn:
            book.tokens(0, *range(100, 100 + drawn))
        elif move == "lose":
            way.clear()
            book.take(RouterLost())
        elif move == "find" and not book.front.linked:
            book.take(RouterFound())
            drawn = len(book.asked()[-1].output)
    assert book.told() == [100 + place for place in range(len(book.told()))]
