"""Stop strings, whole characters and ends, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import FinishReason, Request, RequestId, SamplingParams
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends.text import StopStrings, TextOptions, Transcript
from tests.serve.scripted import FIXTURE, end, told

REQUEST = Request(RequestId("r"), (1,), SamplingParams())
AB = st.text(alphabet="ab", max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FIXTURE)


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By the book: the stop string that ends earliest, of two that end together the longer; where to cut."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return None
    at, _, stop = min(ends)
    return at - len(stop), stop


@given(AB, st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_stop_strings_cut_where_the_whole_text_would_be_cut_however_it_is_split(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher, shown, rest = StopStrings(stops), "", text
    while rest and matcher.found is None:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.feed(rest[:size])
        rest = rest[size:]
        assert (text if matcher.found is None else text[: len(shown)]).startswith(shown)
    expected = first_end(text, stops)
    if expected is None:
        assert matcher.found is None
        assert shown + matcher.flush() == text
    else:
        assert (len(shown), matcher.found) == expected


@given(AB, st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for size, char in enumerate(text, start=1):
        shown += matcher.feed(char)
        if matcher.found is not None:
            break
        held = text[len(shown) : size]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_may_be_left_in() -> None:
    matcher = StopStrings(["END"], include=True)
    assert matcher.feed("one E") + matcher.feed("ND two") == "one END"


def text_of(tokenizer: Tokenizer, ids: list[int], options: TextOptions, reason: FinishReason) -> list:
    transcript = Transcript(tokenizer, options)
    return [transcript.take(told(REQUEST, i)) for i in ids] + [transcript.take(end(REQUEST, reason))]


def test_characters_split_over_tokens_arrive_whole(tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界 🦜!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = text_of(tokenizer, ids, TextOptions(), FinishReason.LENGTH)
    assert len(ids) > len(text)
    assert "".join(piece.text for piece in found) == text
    assert all("\ufffd" not in piece.text for piece in found)


def test_an_unfinished_character_is_shown_as_broken_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("世", add_special_tokens=False)[:-1]
    found = text_of(tokenizer, ids, TextOptions(), FinishReason.LENGTH)
    assert "".join(piece.text for piece in found) == "\ufffd"


def test_the_stop_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    [stop] = tokenizer.encode("x", add_special_tokens=False)
    ids = [*tokenizer.encode("ab", add_special_tokens=False), stop]
    options = TextOptions(stop_token_ids=frozenset({stop}))
    found = text_of(tokenizer, ids, options, FinishReason.STOP)
    assert "".join(piece.text for piece in found) == "ab"
    assert sum(len(piece.delta.sampled) for piece in found) == 3
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", stop)


def test_the_models_own_end_has_no_stop_reason(tokenizer: Tokenizer) -> None:
    [eos] = tokenizer.eos_ids
    options = TextOptions(stop_token_ids=frozenset({eos}), eos_ids=frozenset({eos}))
    last = text_of(tokenizer, [eos], options, FinishReason.STOP)[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", None)


def test_tokens_behind_the_stop_string_are_not_counted_when_many_come_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abSTOPcd", add_special_tokens=False)
    transcript = Transcript(tokenizer, TextOptions(stop=("STOP",)))
    piece = transcript.take(told(REQUEST, *ids))
    assert transcript.stopped
    assert (piece.text, piece.stop_reason) == ("ab", "STOP")
    assert tokenizer.decode([each.token for each in piece.delta.sampled]) == "abSTOP"


def test_stop_strings_count_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("xxabxxab", add_special_tokens=False)
    options = TextOptions(stop=("xx",), min_tokens=3)
    transcript = Transcript(tokenizer, options)
    piece = transcript.take(told(REQUEST, *ids))
    assert (piece.text, piece.stop_reason) == ("xxab", "xx")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR])
def test_a_failure_never_looks_like_length(tokenizer: Tokenizer, reason: FinishReason) -> None:
    last = text_of(tokenizer, [70], TextOptions(), reason)[-1]
    assert last.finish_reason == "abort"
