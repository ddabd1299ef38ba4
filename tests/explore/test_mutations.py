"""The laws can be broken: whatever is taken out of the protocol, some small world shows that it was needed.

The suite takes out every fourth thing, .ci/run each.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from jdisagg.core.worker_config import TransferMode
from jdisagg.policy.worker import handoff
from tests.explore.mutations import Mutation, every
from tests.explore.scenes import Scene, colocated, disaggregated, request
from tests.explore.search import explore
from tests.explore.story import tell
from tests.explore.world import World

LIMIT = 40_000  # states
ONE, WHOLE = disaggregated(1), disaggregated(1, transfer=TransferMode.WHOLE)
ONE_TOKEN = [request(1, max_tokens=1)]
SCENES: dict[str, Scene] = {
    "calm": ONE,
    "colocated": colocated(1, 1),
    "one token": disaggregated(requests=ONE_TOKEN),
    "one token, colocated": colocated(requests=ONE_TOKEN, num_workers=1),
    "stops at once": disaggregated(requests=[request(1, stop_token_ids=(100,))]),
    "loss": WHOLE.but(loss=1),
    "late": WHOLE.but(late=1),
    "early": WHOLE.but(early=1),
    "lose": WHOLE.but(lose=1),
    "again": WHOLE.but(reboot=1, again=1),
    "late, three tokens": disaggregated(requests=[request(1, max_tokens=3)], transfer=TransferMode.WHOLE).but(late=1),
    "slow": ONE.but(slow=True),
    "fail": ONE.but(fail=1),
    "flip": ONE.but(flip=1),
    "cancel": ONE.but(cancel=1),
}
# Where a mutation is found out; "calm" (nothing goes wrong) where it is not listed.
FOUND_IN = {
    "no row source computing commit": "colocated",
    "no row source computing release": "one token",
    "no row source streaming release": "stops at once",
    "no row source computing abort": "lose",
    "no row source streaming abort": "fail",
    "no row source shipped abort": "loss",
    "no row source computing expire": "one token",
    "no row source shipped expire": "flip",
    "no row destination reserved release": "one token, colocated",
    "no row destination reserved abort": "one token",
    "no row destination filling abort": "stops at once",
    "no row destination committed abort": "lose",
    "no row destination admitted abort": "fail",
    "no deadline for a full house": "fail",
    "no deadline for a row that waits for a free reservation": "loss",
    "no deadline for a row that waits for its first token": "loss",
    "no deadline for a row that waits for its KV to reach the decode worker": "early",
    "no deadline for a row that waits for its next token": "loss",
    "no Refused": "late",
    "no Abort": "fail",
    "no Resend": "flip",
    "no digest": "flip",
    "no Renew": "slow",
    "no fence for KVArrived": "late, three tokens",
    "no fence for Commit": "late, three tokens",
    "no fence for Ack": "fail",
    "no fence for Abort": "late, three tokens",
    "no fence for Reserved": "late, three tokens",
    "no fence for Drawn": "late, three tokens",
    "no fresh epochs": "again",
    "no OpenGates": "cancel",
    "OpenGates behind all else": "cancel",
}


def fourth(mutations: list[Mutation]) -> list[Any]:
    """All of them, of which the suite takes every fourth."""
    marks = [[] if number % 4 == 0 else [pytest.mark.slow] for number in range(len(mutations))]
    return [pytest.param(each, marks=mark) for each, mark in zip(mutations, marks, strict=True)]


@pytest.mark.parametrize("mutation", fourth(every()), ids=lambda mutation: mutation.name)
def test_nothing_can_be_taken_out_unseen(mutation: Mutation, monkeypatch):
    if mutation.row is not None:
        rows = {row: after for row, after in handoff.TABLE.items() if row != mutation.row}
        monkeypatch.setattr(handoff, "TABLE", MappingProxyType(rows))
    world = World(SCENES[FOUND_IN.get(mutation.name, "calm")], mutation.patch)
    found = explore(world, LIMIT)
    assert found.violation, f"{found.line()}: nobody noticed"
    print(tell(world, found))


def test_a_story_says_who_did_what_and_what_each_page_was():
    uncounted = next(each for each in every() if each.name == "no count of parts")
    world = World(ONE, uncounted.patch)
    story = tell(world, explore(world))
    assert "prefill => decode: KV of KVTransfer r1#1" in story
    assert "pages of decode: 1 of r1#1 with nothing" in story
    assert "!! r1#1 reads page 1 of decode, which holds nothing" in story
