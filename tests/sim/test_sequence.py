"""Simulated prompts: pages have one name exactly where the trace's blocks are equal, whatever the sizes of both."""

import numpy as np
import pytest

from jdisagg.policy.cache.prefix_cache import page_hashes
from jdisagg.sim.fast_forward import NamedPrompts, SimulatedSequence

BLOCK = 12
PROMPTS = [  # tokens, and the ids of their blocks
    (40, (1, 2, 3, 4)),
    (40, (1, 2, 3, 4)),
    (38, (1, 2, 3, 4)),
    (36, (1, 2, 5)),
    (24, (7, 2)),
    (30, (1, 2, 3)),
    (5, (1,)),
    (48, (9, 9, 9, 9)),
]


def words(tokens: int, ids: tuple[int, ...]) -> list[int]:
    """Tokens that follow from the ids, every one of a block other than any of another's."""
    return np.repeat(ids, BLOCK)[:tokens].tolist()


def partition(names: list[tuple[int, ...]]) -> list[list[int]]:
    """Which pages have the same name, by the name's first appearance."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(name, len(numbers)) for name in path] for path in names]


@pytest.mark.parametrize("page_size", [1, 4, 5, 6, 12, 16, 24, 36])
def test_pages_are_called_alike_exactly_where_pages_of_such_words_are(page_size):
    prompts = NamedPrompts(BLOCK)
    simulated = [page_hashes(prompts.prompt(tokens, ids), page_size) for tokens, ids in PROMPTS]
    assert partition(simulated) == partition([page_hashes(words(*each), page_size) for each in PROMPTS])


def test_an_answer_is_like_nothing_that_another_request_has():
    prompts = NamedPrompts(BLOCK)
    one, other = (prompts.prompt(20, (1, 2)) + (0,) * 12 for _ in range(2))
    ours, theirs = page_hashes(one, 4), page_hashes(other, 4)
    assert len(ours) == 8 and ours[:5] == theirs[:5] and not set(ours[5:]) & set(theirs[5:])
    assert page_hashes(one + (0,) * 4, 4)[:8] == ours, "but like its own, when it is begun again"


def test_tokens_beyond_the_blocks_that_are_named_are_its_own():
    prompts = NamedPrompts(BLOCK)
    ours, theirs = (page_hashes(prompts.prompt(36, (1, 2)), 12) for _ in range(2))
    assert ours[:2] == theirs[:2] and ours[2] != theirs[2]


def test_a_part_of_a_prompt_is_named_from_where_it_begins():
    whole = NamedPrompts(BLOCK).prompt(40, (1, 2, 3, 4))
    assert page_hashes(whole[8:], 4) == page_hashes(whole, 4)[2:]
    assert page_hashes(whole[8:24], 4) == page_hashes(whole, 4)[2:6]


def test_a_prompt_of_a_trace_without_blocks_has_no_names():
    prompt, answer = SimulatedSequence(40), (1, 2)
    assert page_hashes(prompt, 4) == () == page_hashes(prompt + answer, 4)
