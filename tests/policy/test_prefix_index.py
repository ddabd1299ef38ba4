"""Who keeps each page: what workers were heard to keep, or are expected to, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import SenselessWord
from jdisagg.core.messages import CacheChanged, CacheHeld
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.cache_changes import check_of
from jdisagg.policy.prefix_cache import packed
from jdisagg.policy.prefix_directory import PrefixDirectory
from jdisagg.policy.prefix_index import PrefixIndex
from tests.sim.cases import worker

A, B, C = map(WorkerId, "abc")
CONFIGS = [worker(name, Role.PREFILL, prefix_caching=True, num_pages=6) for name in (A, B)]
NAMES = st.lists(st.integers(1, 9), max_size=8, unique=True)
WORDS = st.tuples(st.sampled_from(["held", "changed", "sent", "forget", "follow"]), st.integers(0, 1), NAMES, NAMES)


@given(st.lists(NAMES.map(lambda names: names[:6]), min_size=2, max_size=2), st.lists(WORDS, max_size=30))
def test_the_index_is_what_the_directory_knows_whatever_it_was_told(begun, words):
    """Words that are too large and of those that are gone among them."""
    directory = PrefixDirectory()
    for config, names in zip(CONFIGS, begun, strict=True):
        directory.follow(config)
        directory.hear(config, CacheHeld(1, packed(tuple(names))))
    for kind, which, some, others in words:
        config = CONFIGS[which]
        known = directory._known.get(config.worker)
        number, check = (known.number or 0, known.check) if known else (0, 0)
        try:
            match kind:
                case "held":
                    directory.hear(config, CacheHeld(number + 1, packed(tuple(some))))
                case "changed":
                    after = check_of(some, check_of(others, check))
                    directory.hear(config, CacheChanged(number + 1, after, packed(tuple(some)), packed(tuple(others))))
                case "sent":
                    directory.sent(config, tuple(some))
                case "forget":
                    directory.forget(config.worker)
                case _:
                    directory.follow(config)
        except SenselessWord:
            pass
        for name in range(1, 10):
            kept = {each for each, known in directory._known.items() if name in known.names or name in known.expected}
            assert set(directory.index.keepers(name)) == kept
            assert len(directory.index.keepers(name)) == len(kept)


def test_the_longest_beginnings_come_first_and_nobody_twice():
    index = PrefixIndex()
    index.add(A, (1,))
    index.add(B, (1, 2, 3, 4))
    index.add(C, (1, 2))
    assert index.nearest((1, 2, 3, 4, 5), 8, 0) == [B, C, A]
    assert index.nearest((1, 2, 3, 4, 5), 1, 0) == [B]
    assert index.nearest((9, 1), 8, 0) == [] == index.nearest((), 8, 0)


def test_of_many_that_keep_the_same_others_are_found_each_turn():
    index, workers = PrefixIndex(), [WorkerId(f"w{number}") for number in range(10)]
    for each in workers:
        index.add(each, (1,))
    turns = [index.nearest((1, 2), 4, turn) for turn in range(0, 20, 4)]
    assert all(len(set(turn)) == 4 for turn in turns)
    assert {each for turn in turns for each in turn} == set(workers)


@given(st.integers(0, 70))
def test_the_longest_beginning_is_found_by_halving(depth):
    index, names = PrefixIndex(), tuple(range(1, 65))
    index.add(A, names[:depth])
    assert index.nearest(names, 2, 0) == ([A] if depth else [])
    assert index._longest(names) == min(depth, 64)
