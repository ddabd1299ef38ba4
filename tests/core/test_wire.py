"""A sealed record is read once, in order, by the session it was made for, and by nobody else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import BadTicket
from jdisagg.core.wire import MAX_RECORD_BYTES, Seal, mac_of

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


def ends(secret: bytes = b"s", session: str = "n", direction: str = "up") -> tuple[Seal, Seal]:
    return Seal(secret, session, direction), Seal(secret, session, direction)


@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=4))
def test_records_arrive_as_they_were_and_in_order(bodies: list[dict]):
    writer, reader = ends()
    assert [reader.open(record) for record in [writer.close(body) for body in bodies]] == bodies


def test_a_record_that_comes_again_is_refused():
    writer, reader = ends()
    record = writer.close({"n": 1})
    reader.open(record)
    with pytest.raises(BadTicket, match="not sealed"):
        reader.open(record)


def test_a_record_that_was_left_out_is_noticed():
    writer, reader = ends()
    writer.close({"n": 1})
    with pytest.raises(BadTicket, match="record 0"):
        reader.open(writer.close({"n": 2}))


@given(st.integers(0, 10_000))
def test_any_changed_bit_is_noticed(bit: int):
    writer, reader = ends()
    record = bytearray(writer.close({"text": "attack at dawn"}))
    record[bit // 8 % len(record)] ^= 1 << bit % 8
    with pytest.raises(BadTicket):
        reader.open(bytes(record))


@pytest.mark.parametrize("other", [(b"t", "n", "up"), (b"s", "m", "up"), (b"s", "n", "down")])
def test_another_secret_session_or_direction_cannot_read_it(other: tuple[bytes, str, str]):
    record = Seal(b"s", "n", "up").close({})
    with pytest.raises(BadTicket, match="not sealed"):
        Seal(*other).open(record)


def test_a_record_over_the_limit_is_refused_at_either_end():
    writer, reader = ends()
    with pytest.raises(BadTicket, match=f"over the limit of {MAX_RECORD_BYTES}"):
        writer.close({"text": "x" * MAX_RECORD_BYTES})
    with pytest.raises(BadTicket, match="over the limit"):
        reader.open(bytes(MAX_RECORD_BYTES + 1))


def test_parts_cannot_be_cut_elsewhere():
    assert mac_of(b"s", "ab", "c") != mac_of(b"s", "a", "bc")
