"""What crosses between processes, or comes from a file, is of the types that are declared, or it is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.codec import NOUNS, decode, decode_as, encode, shown
from jdisagg.core.errors import DecodeError
from jdisagg.core.events import Event, Finish, Received
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import Abort, Commit, Message, Reserved, TokenDelta, View
from jdisagg.core.request import PARAMETERS, Attempt, FinishReason, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from tests.sim.cases import request

A1 = Attempt(RequestId("a"), 1)

st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(max_size=8))
st.register_type_strategy(int, st.integers(-(2**40), 2**40))
st.register_type_strategy(
    Ledger, st.lists(st.tuples(st.sampled_from(Mark), st.integers(0, 2**62)), max_size=3).map(Ledger)
)
SENT = {name: hint for name, hint in get_type_hints(SamplingParams).items() if not PARAMETERS[name].is_local}
st.register_type_strategy(
    SamplingParams, st.builds(SamplingParams, **{name: st.from_type(hint) for name, hint in SENT.items()})
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_every_noun_comes_back_exactly_as_it_was_written(data: st.DataObject):
    noun: Any = data.draw(st.sampled_from(sorted(NOUNS)).map(NOUNS.__getitem__))
    value = data.draw(st.from_type(noun))
    assert decode(json.loads(json.dumps(encode(value)))) == value


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_noun_with_any_field_exchanged_for_junk_is_read_as_declared_or_refused(data: st.DataObject):
    noun: Any = data.draw(st.sampled_from(sorted(NOUNS)).map(NOUNS.__getitem__))
    record = encode(data.draw(st.from_type(noun)))
    record[data.draw(st.sampled_from(sorted(record)) | st.text(max_size=8))] = data.draw(JUNK)
    try:
        found = decode(json.loads(json.dumps(record)))
    except DecodeError as error:
        assert len(str(error)) < 600 and "\n" not in str(error)
    else:
        assert decode(encode(found)) == found


@given(JUNK)
@settings(max_examples=200, deadline=None)
def test_junk_is_no_noun(value: Any):
    with pytest.raises(DecodeError):
        decode(value)


def test_every_event_and_every_message_can_be_recorded():
    assert {each.__name__ for each in (*Event.__args__, *Message.__args__)} <= NOUNS.keys()


def test_what_is_at_its_default_is_not_written():
    assert encode(Sampled(5)) == {"is": "Sampled", "token": 5}


VIEW = encode(View(1, 2, 3, 4))
ATTEMPT = encode(A1)
COMMIT = encode(Commit(A1, Sampled(3), 6, 1, layers=((0, 2),)))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (VIEW | {"free_pages": "x"}, "View.free_pages: 'x' is no whole number"),
        (VIEW | {"free_pages": [[1]]}, r"View.free_pages: \[\[1\]\] is no whole number"),
        (VIEW | {"free_pages": True}, "View.free_pages: True is no whole number"),
        (VIEW | {"free_pages": 1.0}, "View.free_pages: 1.0 is no whole number"),
        (VIEW | {"free_pages": 10**30}, "View.free_pages: a huge number is no whole number"),
        (VIEW | {"more": 1}, "View has no field 'more'"),
        ({"is": "View"}, "View lacks free_pages, free_slots, running, waiting_tokens"),
        ({"is": "Views"}, "names no noun"),
        ({"is": ["View"]}, "names no noun"),
        (COMMIT | {"attempt": "a"}, "Commit.attempt: 'a' names no noun"),
        (COMMIT | {"first": VIEW}, "Commit.first: View is not what belongs here"),
        (COMMIT | {"layers": [[1, 2, 3]]}, "Commit.layers: 3 values where 2 belong"),
        (COMMIT | {"layers": "ab"}, "Commit.layers: 'ab' is no list"),
        (COMMIT | {"attempt": ATTEMPT | {"epoch": "1"}}, "Commit.attempt: Attempt.epoch: '1' is no whole number"),
        (COMMIT | {"attempt": ATTEMPT | {"request_id": "\ud800"}}, "half a character"),
        (encode(Sampled(1)) | {"logprob": math.nan}, "Sampled.logprob: nan is no number"),
        (encode(Abort(A1, "x")) | {"reason": "fun"}, "Abort.reason: 'fun' is no FinishReason"),
        (
            encode(Reserved(A1, (1,))) | {"pages": [1, "2"]},
            "Reserved.pages: '2' is no whole number",
        ),
        (encode(TokenDelta(A1, 0, ())) | {"sampled": {}}, "TokenDelta.sampled: {} is no list"),
        (encode(Received(WorkerId("w"), View(1, 1, 0, 0))) | {"message": encode(Sampled(1))}, "Received.message"),
        (encode(WorkerConfig(WorkerId("w"), Role.DECODE, 8, 4, 64)) | {"page_size": "x"}, "WorkerConfig.page_size"),
    ],
)
def test_what_is_not_of_its_declared_type_is_refused_by_its_field(record: dict[str, Any], says: str):
    with pytest.raises(DecodeError, match=says):
        decode(record)


def test_a_noun_of_another_class_is_refused_by_both_names():
    with pytest.raises(DecodeError, match="it is a Request and no View"):
        decode_as(View, encode(request("a")))


def test_a_finish_keeps_its_ledger():
    ledger = Ledger([(Mark.ARRIVED, 5), (Mark.ENDED, 9)])
    finish = Finish(RequestId("a"), FinishReason.STOP, ledger)
    assert decode_as(Finish, encode(finish)).ledger.total_ns == 4


@pytest.mark.parametrize("value", ["x" * 10**6, [1] * 10**5, 10**9000, {"a\nb": "c\nd"}, None], ids=range(5))
def test_what_a_message_repeats_of_a_value_is_short_and_of_one_line(value: Any):
    assert len(shown(value)) <= 120 and "\n" not in shown(value)
