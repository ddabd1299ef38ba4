"""Which link lies between two workers, by their labels: the nearest place that both are known to stand in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jdisagg.core.labels import NAMES, NOWHERE, Labels, LinkClass, link_class

HERE = Labels(process="a/1", host="a", rack="r1", slice="s1", pod="p1")
ELSEWHERE = Labels(process="b/2", host="b", rack="r2", slice="s2", pod="p2")
NEAREST = {
    "process": LinkClass.PROCESS,
    "host": LinkClass.HOST,
    "rack": LinkClass.RACK,
    "slice": LinkClass.RACK,
    "pod": LinkClass.POD,
}
ORDER = [
    LinkClass.PROCESS,
    LinkClass.HOST,
    LinkClass.RACK,
    LinkClass.POD,
    LinkClass.BEYOND,
]


@pytest.mark.parametrize("name", NAMES)
def test_one_place_in_common_says_the_link(name: str):
    other = replace(ELSEWHERE, **{name: getattr(HERE, name)})
    assert link_class(HERE, other) is NEAREST[name]
    assert link_class(other, HERE) is NEAREST[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_place_that_is_not_known_is_shared_by_nobody(name: str):
    one = replace(NOWHERE, **{name: getattr(HERE, name)})
    assert link_class(one, NOWHERE) is LinkClass.BEYOND
    assert link_class(NOWHERE, one) is LinkClass.BEYOND


@pytest.mark.parametrize(("near", "far"), [(a, b) for a in NAMES for b in NAMES if a != b])
def test_of_two_places_in_common_the_nearer_counts(near: str, far: str):
    other = replace(ELSEWHERE, **{near: getattr(HERE, near), far: getattr(HERE, far)})
    expected = min(NEAREST[near], NEAREST[far], key=ORDER.index)
    assert link_class(HERE, other) is expected
    assert link_class(other, HERE) is expected


def test_who_shares_nothing_is_beyond_and_who_shares_all_is_one_process():
    assert link_class(HERE, ELSEWHERE) is LinkClass.BEYOND
    assert link_class(NOWHERE, NOWHERE) is LinkClass.BEYOND
    assert link_class(HERE, HERE) is LinkClass.PROCESS


@pytest.mark.parametrize("name", NAMES)
def test_labels_read_what_they_write(name: str):
    assert str(NOWHERE) == ""
    assert Labels.parse("") == NOWHERE
    one = replace(NOWHERE, **{name: getattr(HERE, name)})
    assert Labels.parse(str(one)) == one
    assert Labels.parse(str(HERE)) == HERE
    assert Labels.parse(str(ELSEWHERE)) == ELSEWHERE
    assert str(one) != str(HERE)
    assert one != HERE
