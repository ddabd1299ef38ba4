"""Which layers of a stage are a loop: any sequence of kinds is what its compact form stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.steps import FEWEST_TURNS, LONGEST_PERIOD, Repeat, repeating


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" * 80, Repeat(0, 1, 80)),
        ("ab" * 13, Repeat(0, 2, 13)),  # windows at every other layer
        ("aaaaab" * 10 + "aa", Repeat(0, 6, 10)),  # and at five of six, with an end that is no whole period
        ("d" + "m" * 60, Repeat(1, 1, 60)),  # the first layer has no experts
        ("ddd" + "m" * 58, Repeat(3, 1, 58)),
    ],
)
def test_the_layers_of_known_families_are_one_loop(kinds: str, expected: Repeat):
    assert repeating(kinds) == expected


@pytest.mark.parametrize("kinds", ["", "a", "aaa", "abc", "abababb", "abcdabcdabcd"])
def test_layers_with_few_turns_are_written_out(kinds: str):
    assert repeating(kinds) is None


@given(st.lists(st.sampled_from("ab"), max_size=24))
def test_every_layer_is_one_place_of_the_compact_stage_and_of_its_kind(kinds: list[str]):
    repeat = repeating(kinds)
    if repeat is None:
        return
    compact = repeat.compact(kinds)
    places = [place for index in range(len(compact)) for place in repeat.places(index)]
    assert sorted(places) == list(range(len(kinds)))
    assert all(kinds[place] == compact[index] for index in range(len(compact)) for place in repeat.places(index))


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_no_other_loop_leaves_fewer_layers_to_write_out(kinds: list[str]):
    def fits(first: int, period: int, turns: int) -> bool:
        return all(kinds[first + i] == kinds[first + i % period] for i in range(period * turns))

    least = min(
        (
            len(kinds) - period * (turns - 1)
            for period in range(1, LONGEST_PERIOD + 1)
            for turns in range(FEWEST_TURNS, len(kinds) // period + 1)
            for first in range(len(kinds) - period * turns + 1)
            if fits(first, period, turns)
        ),
        default=len(kinds),
    )
    repeat = repeating(kinds)
    written = len(kinds) if repeat is None else len(repeat.compact(kinds))
    # Fewer turns of a longer period may leave fewer; then the loop was refused for its turns, and nothing is looped.
    assert written == least or repeat is None or written <= least
