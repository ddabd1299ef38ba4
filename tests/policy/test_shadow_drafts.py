"""What n-grams would have guessed is known of every sequence without verifying a guess."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.engine.ngrams import guess_after
from jdisagg.policy.shadow_drafts import AGAIN, APART, KNOWN, LONG, UNKNOWN, ShadowDrafts

DRAFTS = 3
texts = st.lists(st.integers(0, 3), max_size=40)


@given(texts)
def test_what_is_guessed_is_what_the_engine_guesses(tokens: list[int]):
    shadow = ShadowDrafts(DRAFTS)
    for count, token in enumerate(tokens, 1):
        shadow.read([token])
        assert shadow.guess() == guess_after(tokens[:count], DRAFTS)


@given(texts)
def test_an_end_is_known_where_its_last_two_tokens_stood_there_before(tokens: list[int]):
    shadow = ShadowDrafts(DRAFTS)
    shadow.read(tokens)
    pairs = list(itertools.pairwise(tokens))
    known = [pair in pairs[:place] for place, pair in enumerate(pairs)]
    run = len(list(itertools.takewhile(bool, reversed(known))))
    assert shadow.place == (AGAIN if run >= LONG else KNOWN if run else UNKNOWN)


@given(texts, st.lists(texts, max_size=6), st.integers(0, 2))
def test_what_drafts_came_to_is_what_verifying_them_would_have_shown(
    prompt: list[int], pieces: list[list[int]], late: int
):
    """However many tokens are told at once; a draft that is followed begins at least so far behind the last one, and is
    of the place that the host knew by then."""
    shadow, began = ShadowDrafts(DRAFTS, late), -APART
    shadow.read(prompt)
    found = [outcome for piece in pieces for outcome in shadow.drew(piece)]
    whole, expected = [*prompt, *(token for piece in pieces for token in piece)], list[tuple[int, int, int]]()
    for at in range(len(prompt), len(whole)):
        if at - began < APART:
            continue
        guess = guess_after(whole[: at + 1], DRAFTS)
        pairs = [*zip(guess, whole[at + 1 :], strict=False)]
        taken = next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
        began, before = at, ShadowDrafts(DRAFTS)
        before.read(whole[: max(0, at + 1 - late)])
        if taken < len(pairs) or len(pairs) == len(guess):  # else it is still followed
            expected.append((before.place, DRAFTS, taken))
    assert found == expected


def test_what_a_prompt_repeats_says_nothing_of_what_will_be_drawn():
    shadow = ShadowDrafts(DRAFTS)
    shadow.read([1, 2, 3] * 9)
    assert shadow.place == AGAIN and shadow.guess() == [1, 2, 3]
    assert list(shadow.drew([9, 1, 2])) == [(UNKNOWN, DRAFTS, 0)], "nothing is guessed behind the first"
    assert list(shadow.drew([3, 1, 2])) == [], "behind the second there stood 3, and behind it 9"
    assert list(shadow.drew([3, 1])) == [(KNOWN, DRAFTS, 2)]
