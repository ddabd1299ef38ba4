"""A signed record is read once, in order, by the session it was made for, and by nobody else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.authenticated_channel import MAX_RECORD_BYTES, AuthenticatedChannel, mac_of
from jdisagg.core.errors import BadTicket

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
)


def ends(
    secret: bytes = b"s", session: str = "n", direction: str = "up"
) -> tuple[AuthenticatedChannel, AuthenticatedChannel]:
    return AuthenticatedChannel(secret, session, direction), AuthenticatedChannel(secret, session, direction)


@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=4))
def test_records_arrive_as_they_were_and_in_order(bodies: list[dict]):
    writer, reader = ends()
    assert [reader.verify(record) for record in [writer.sign(body) for body in bodies]] == bodies


def test_a_record_that_comes_again_is_refused():
    writer, reader = ends()
    record = writer.sign({"n": 1})
    reader.verify(record)
    with pytest.raises(BadTicket, match="not signed"):
        reader.verify(record)


def test_a_record_that_was_left_out_is_noticed():
    writer, reader = ends()
    writer.sign({"n": 1})
    with pytest.raises(BadTicket, match="record 0"):
        reader.verify(writer.sign({"n": 2}))


@given(st.integers(0, 10_000))
def test_any_changed_bit_is_noticed(bit: int):
    writer, reader = ends()
    record = bytearray(writer.sign({"text": "attack at dawn"}))
    record[bit // 8 % len(record)] ^= 1 << bit % 8
    with pytest.raises(BadTicket):
        reader.verify(bytes(record))


@pytest.mark.parametrize("other", [(b"t", "n", "up"), (b"s", "m", "up"), (b"s", "n", "down")])
def test_another_secret_session_or_direction_cannot_read_it(other: tuple[bytes, str, str]):
    record = AuthenticatedChannel(b"s", "n", "up").sign({})
    with pytest.raises(BadTicket, match="not signed"):
        AuthenticatedChannel(*other).verify(record)


def test_a_record_over_the_limit_is_refused_at_either_end():
    writer, reader = ends()
    with pytest.raises(BadTicket, match=f"over the limit of {MAX_RECORD_BYTES}"):
        writer.sign({"text": "x" * MAX_RECORD_BYTES})
    with pytest.raises(BadTicket, match="over the limit"):
        reader.verify(bytes(MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800"])
def test_a_value_that_no_record_can_hold_is_refused_where_it_is_written(value: object):
    with pytest.raises(BadTicket, match="cannot be sent"):
        ends()[0].sign({"value": value})


@pytest.mark.parametrize("payload", [b"", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xa3\xed\xa0\x80", b"\x01"])
def test_a_signed_record_that_is_no_object_is_refused(payload: bytes):
    writer, reader = ends()
    with pytest.raises(BadTicket, match="record 0 of session n is no"):
        reader.verify(writer._mac(payload).encode() + payload)


def test_parts_cannot_be_cut_elsewhere():
    assert mac_of(b"s", "ab", "c") != mac_of(b"s", "a", "bc")
