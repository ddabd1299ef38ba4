"""Random owners over one pool and its prefix cache: the law holds after each operation, and what is read stays.

python -m tests.policy.test_shared_pages 1000000
"""

from __future__ import annotations

import random
import sys

import pytest

from jdisagg.core.request import Attempt, RequestId
from jdisagg.core.worker_config import Role
from jdisagg.policy.page_pool import PageState
from jdisagg.policy.prefix_cache import Handle
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.worker import Worker
from tests.sim.cases import request, worker

PAGES, ALPHABET, LONGEST = 24, 2, 6  # texts of two letters, a letter a page: many begin alike


class Holder:
    """One sequence: the text that it writes, a letter a page, the pages it reads and those that are its own."""

    def __init__(self, owner: Attempt, text: tuple[int, ...], held: Handle, own: tuple[int, ...]) -> None:
        self.owner, self.text, self.held, self.own = owner, text, held, own
        self.pages = (*held.pages, *own)

    def names(self) -> tuple[int, ...]:
        """The whole beginning is the name: no two texts share one."""
        return tuple(int("1" + "".join(map(str, self.text[: end + 1]))) for end in range(len(self.text)))


class Hammer:
    """Takes, publishes, keeps and drops at random; `texts` says what is in each page, as a device would know it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shared: SharedPages = Worker(worker("w", Role.DECODE, num_pages=PAGES, prefix_caching=True)).shared
        self.holders: list[Holder] = []
        self.texts: dict[int, tuple[int, ...]] = {}
        self.epoch = 0

    def step(self) -> None:
        move = self.random.choice((self.begin, self.begin, self.publish, self.keep, self.drop))
        move()
        for each in self.holders:
            for place, page in enumerate(each.pages):
                assert self.texts[page] == each.text[: place + 1], f"page {page} of {each.owner} holds another's text"
        self.shared.check_invariants()
        counts = self.shared.pool
        assert sum(counts.count(state) for state in PageState) == PAGES

    def begin(self) -> None:
        text = tuple(self.random.randrange(ALPHABET) for _ in range(self.random.randint(1, LONGEST)))
        self.epoch += 1
        new = Holder(Attempt(RequestId("r"), self.epoch), text, Handle((), ()), ())
        found, cost = self.shared.room_for(new.names(), len(text))
        if cost > self.shared.available:
            return
        held = self.shared.lock(new.names()[:found])
        own = self.shared.take(len(text) - found, new.owner, PageState.HELD)
        assert own is not None, "what room_for promises is there"
        new = Holder(new.owner, text, held, own)
        for place, page in enumerate(own, found):
            self.texts[page] = text[: place + 1]
        self.holders.append(new)

    def publish(self) -> None:
        if self.holders:
            each = self.random.choice(self.holders)
            before = each.held
            each.held, each.own = self.shared.publish(each.names(), each.pages, each.own, each.owner)
            self.shared.release(before)

    def keep(self) -> None:
        if self.holders:
            each = self.holders.pop(self.random.randrange(len(self.holders)))
            self.shared.keep(each.names(), each.pages, each.own, each.owner)
            self.shared.release(each.held)

    def drop(self) -> None:
        """It failed: nothing of its own is kept."""
        if self.holders:
            each = self.holders.pop(self.random.randrange(len(self.holders)))
            self.shared.keep((), each.pages, each.own, each.owner)
            self.shared.release(each.held)


@pytest.mark.parametrize("seed", range(4))
def test_no_page_that_is_read_is_written_or_lost_whatever_happens(seed):
    hammer = Hammer(seed)
    for _ in range(2_500):
        hammer.step()
    while hammer.holders:
        hammer.keep()
    assert hammer.shared.available == PAGES and hammer.shared.cache.pages()


def test_names_tell_salts_and_beginnings_apart_and_only_full_pages_have_one():
    shared = Worker(worker("w", Role.DECODE, prefix_caching=True)).shared
    each = request("a", 11)
    assert len(shared.names(each)) == 2
    other = type(each)(each.request_id, each.prompt, each.sampling, cache_salt="tenant")
    assert not set(shared.names(each)) & set(shared.names(other))
    assert Worker(worker("w", Role.DECODE)).shared.names(each) == ()


if __name__ == "__main__":
    at_once = Hammer(0)
    for _ in range(int(sys.argv[1])):
        at_once.step()
    print(f"{sys.argv[1]} operations, the law held after each")
