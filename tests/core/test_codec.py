"""What crosses between processes, or comes from a file, is of the types that are declared, or it is refused by name."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import asdict, fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.core.codec import KINDS, TaggedStruct, decode, decode_as, encode, read_json, shown
from jdisagg.core.errors import DecodeError
from jdisagg.core.events import Event, Finish, Received
from jdisagg.core.ledger import Ledger, Mark
from jdisagg.core.messages import (
    Abort,
    CacheChanged,
    Commit,
    Drawn,
    Message,
    Progress,
    Reserved,
    TokenDelta,
    View,
)
from jdisagg.core.request import PARAMETERS, Attempt, FinishReason, RequestId, Sampled, SamplingParams, WorkerId
from jdisagg.core.tiers import PagesFound
from jdisagg.core.worker_config import Role, WorkerConfig
from tests.sim.cases import request

A1 = Attempt(RequestId("a"), 1)

st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(max_size=8))
st.register_type_strategy(int, st.integers(-(2**40), 2**40))


def records(kind: type[TaggedStruct]) -> st.SearchStrategy[Any]:
    """Instances of a class of records, each field by its declared type."""
    hints = typing.get_type_hints(kind)  # without the bounds of numbers: those above are narrower
    return st.builds(kind, **{each.name: st.from_type(hints[each.name]) for each in msgspec.structs.fields(kind)})


for each in KINDS.values():
    st.register_type_strategy(each, records)
st.register_type_strategy(
    Ledger, st.lists(st.tuples(st.sampled_from(Mark), st.integers(0, 2**62)), max_size=3).map(Ledger)
)
SENT = [name for name, spec in PARAMETERS.items() if not spec.is_local]
HINTS = typing.get_type_hints(SamplingParams)
st.register_type_strategy(
    SamplingParams, st.builds(SamplingParams, **{name: st.from_type(HINTS[name]) for name in SENT})
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_every_noun_comes_back_exactly_as_it_was_written(data: st.DataObject):
    noun: Any = data.draw(st.sampled_from(sorted(KINDS)).map(KINDS.__getitem__))
    value = data.draw(st.from_type(noun))
    assert decode(read_json(json.dumps(encode(value)))) == value
    assert decode(msgspec.msgpack.decode(msgspec.msgpack.encode(value))) == value


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_noun_with_any_field_exchanged_for_junk_is_read_as_declared_or_refused(data: st.DataObject):
    noun: Any = data.draw(st.sampled_from(sorted(KINDS)).map(KINDS.__getitem__))
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
    assert {each.__name__ for each in (*Event.__args__, *Message.__args__)} <= KINDS.keys()


def test_sampling_parameters_that_only_the_front_reads_are_not_sent():
    asked = SamplingParams(n=3, best_of=4, stop=["x"], ignore_eos=True, structured_outputs={"regex": "a"}, top_k=5)
    resolved = asked.resolve({"seed": 7}, (2,), "%llguidance {}")
    for written in (encode(resolved), msgspec.msgpack.decode(msgspec.msgpack.encode(resolved))):
        assert not [name for name in written if name != "is" and PARAMETERS[name].is_local]
        assert written.pop("is") == "SamplingParams" and written["top_k"] == 5
        assert {type(value) for value in written.values()} <= {int, float, str, bool, list}
        assert decode({"is": "SamplingParams", **written}) == resolved


def test_a_default_parameter_is_not_written_and_stays_one_that_was_not_given():
    asked = SamplingParams(temperature=1.0)
    found = decode_as(SamplingParams, msgspec.msgpack.decode(msgspec.msgpack.encode(asked)))
    assert encode(SamplingParams()) == {"is": "SamplingParams"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {"is": "SamplingParams"}
    assert found.given() == asked.given() == replace(asked, n=1).given() == {"temperature": 1.0}


@pytest.mark.parametrize(("name", "value"), [("n", 0), ("n", 129), ("best_of", 0), ("stop", [1]), ("max_tokens", None)])
def test_a_sampling_parameter_out_of_its_type_is_no_record(name: str, value: Any):
    with pytest.raises(DecodeError, match=name):
        decode({"is": "SamplingParams", name: value})


def test_what_is_at_its_default_is_not_written():
    assert encode(Sampled(5)) == {"is": "Sampled", "token": 5}


VIEWED = View(1, 2, 3, 4)
VIEW = encode(VIEWED)
ATTEMPT = encode(A1)
COMMIT = encode(Commit(A1, Sampled(3), 6, 1, layers=((0, 2),)))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (VIEW | {"free_pages": "x"}, r"View: Expected `int`, got `str` - at `\$.free_pages`"),
        (VIEW | {"free_pages": [[1]]}, r"View: Expected `int`, got `array` - at `\$.free_pages`"),
        (VIEW | {"free_pages": True}, r"View: Expected `int`, got `bool` - at `\$.free_pages`"),
        (VIEW | {"free_pages": 1.0}, r"View: Expected `int`, got `float` - at `\$.free_pages`"),
        (VIEW | {"free_pages": 10**30}, r"View: Expected `int` <= 9223372036854775807 - at `\$.free_pages`"),
        (VIEW | {"more": 1}, "View: Object contains unknown field `more`"),
        ({"is": "View"}, "View: Object missing required field `free_pages`"),
        ({"is": "Views"}, "names no record"),
        ({"is": ["View"]}, "names no record"),
        (COMMIT | {"attempt": "a"}, r"Commit: Expected `object`, got `str` - at `\$.attempt`"),
        (COMMIT | {"first": VIEW}, r"Commit: Invalid value 'View' - at `\$.first.is`"),
        (COMMIT | {"layers": [[1, 2, 3]]}, r"Commit: Expected `array` of length 2, got 3 - at `\$.layers\[0\]`"),
        (COMMIT | {"layers": "ab"}, r"Commit: Expected `array`, got `str` - at `\$.layers`"),
        (COMMIT | {"attempt": ATTEMPT | {"epoch": "1"}}, r"Commit: Expected `int`, got `str` - at `\$.attempt.epoch`"),
        (encode(Abort(A1, "x")) | {"reason": "fun"}, r"Abort: Invalid enum value 'fun' - at `\$.reason`"),
        (encode(Reserved(A1, (1,))) | {"pages": [1, "2"]}, r"Reserved: Expected `int`, got `str` - at `\$.pages\[1\]`"),
        (
            encode(TokenDelta(A1, 0, ())) | {"sampled": {}},
            r"TokenDelta: Expected `array`, got `object` - at `\$.sampled`",
        ),
        (
            encode(Received(WorkerId("w"), View(1, 1, 0, 0))) | {"message": encode(Sampled(1))},
            r"Received: Invalid value 'Sampled' - at `\$.message.is`",
        ),
        (
            encode(WorkerConfig(WorkerId("w"), Role.DECODE, 8, 4, 64)) | {"page_size": "x"},
            r"WorkerConfig: Expected `int`, got `str` - at `\$.page_size`",
        ),
        (
            encode(PagesFound((1,), b"abc")) | {"names": "!"},
            r"PagesFound: Invalid base64 encoded string - at `\$.names`",
        ),
    ],
)
def test_what_is_not_of_its_declared_type_is_refused_by_its_field(record: dict[str, Any], says: str):
    with pytest.raises(DecodeError, match=says):
        decode(record)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (COMMIT | {"attempt": ATTEMPT | {"request_id": "\ud800"}}, "half a character"),
        (COMMIT | {"layout": "\udc00\ud800"}, "half a character"),
        (encode(Sampled(1)) | {"logprob": math.nan}, "NaN is no number"),
    ],
)
def test_json_of_half_a_character_or_no_number_is_refused(record: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        read_json(json.dumps(record))


def test_wide_seeds_infinities_and_characters_of_two_halves_keep_their_meaning():
    """A deadline of infinity is none at all, and the router's default applies where there is no deadline."""
    seeded = replace(request("\N{GRINNING FACE}"), sampling=SamplingParams(seed=2**64 - 1), queue_deadline_s=math.inf)
    drawn = Drawn((TokenDelta(A1, 0, (Sampled(1, -math.inf, ((2, -math.inf),)),)),))
    for value in (seeded, drawn, CacheChanged(1, 2**64 - 1)):
        assert decode(read_json(json.dumps(encode(value)))) == value
        assert decode(msgspec.msgpack.decode(msgspec.msgpack.encode(value))) == value


def test_whole_numbers_of_seconds_stay_whole_so_that_digests_agree():
    for field in (5, 5.0):
        record = encode(Progress(A1, Mark.COMMITTED, field))
        assert json.dumps(encode(decode(record))) == json.dumps(record)


def test_structs_are_replaced_and_taken_apart_as_dataclasses():
    assert replace(VIEWED, running=9) == View(1, 2, 3, 9)
    assert asdict(Commit(A1, Sampled(3), 6, 1))["attempt"] == {"request_id": "a", "epoch": 1}
    assert [each.name for each in fields(View)][:2] == ["free_pages", "free_slots"]
    with pytest.raises(AttributeError):
        VIEWED.running = 9  # pyright: ignore[reportAttributeAccessIssue]


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
