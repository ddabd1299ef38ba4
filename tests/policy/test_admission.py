"""Who may run beside whom: one step holds so many different adapters, and who needs another waits in the line."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.adapters import Adapter
from jdisagg.core.events import Finish, Submit
from jdisagg.core.messages import Ended, Reserve, Reserved
from jdisagg.core.request import Attempt, FinishReason, Request, RequestId
from jdisagg.policy.admission import has_adapter_room
from tests.policy.test_router import D, P, Talk
from tests.sim.cases import request

ADAPTERS = [None, *(Adapter(name, name * 32, f"/{name}") for name in "abcd")]
KINDS = st.sampled_from(ADAPTERS)


def asking(name: str, adapter: Adapter | None) -> Request:
    plain = request(name, 6)
    return replace(plain, sampling=replace(plain.sampling, adapter=adapter))


@given(KINDS, st.lists(KINDS), st.integers(1, 4))
def test_there_is_room_just_where_so_many_hold_them_all(asked: Any, running: list[Any], most: int) -> None:
    rows = [asking("x", each) for each in running]
    needed = {*running, asked} - {None}
    fits = asked is None or asked in running or len(needed) <= most
    if len({*running} - {None}) <= most:
        assert has_adapter_room(asking("y", asked), rows, most) == fits
    assert has_adapter_room(asking("y", asked), rows, 0)


def reserved(talk: Talk) -> list[str]:
    return [message.request_id for _, message in talk.sent(Reserve)]


def test_a_request_waits_for_the_adapters_that_run_and_goes_when_one_has_ended() -> None:
    talk = Talk(max_loras=2)
    _, a, b, c, _ = ADAPTERS
    for name, adapter in (("1", a), ("2", b), ("3", a), ("4", c), ("5", None)):
        talk.submit(asking(name, adapter))
        if name != "4":
            talk.says(D, Reserved(Attempt(RequestId(name), int(name)), (1, 2)))
    assert reserved(talk) == ["1", "2", "3"]  # the fifth does not overtake the fourth
    talk.says(D, Ended(Attempt(RequestId("2"), 2), FinishReason.LENGTH, 0.0, 0))
    assert reserved(talk) == ["1", "2", "3", "4", "5"]


def test_who_waits_for_an_adapter_is_told_when_its_time_is_over() -> None:
    talk = Talk(max_loras=1, queue_timeout_s=5.0)
    talk.submit(asking("1", ADAPTERS[1]))
    talk.take(Submit(asking("2", ADAPTERS[2])))
    talk.fire("row/2")
    (ended,) = [each for each in talk.effects if isinstance(each, Finish)]
    assert (ended.request_id, ended.reason) == ("2", FinishReason.TIMEOUT)
    assert P not in [to for to, _ in talk.sent(Reserve)]
