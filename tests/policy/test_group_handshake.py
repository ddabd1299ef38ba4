"""Who may be a member of a group; each refusal names the member, both values and what to change."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jdisagg.policy.group_handshake import MemberInfo, read_member_info, refusal, unfilled

LEADER = MemberInfo("p0", 0, 4, "0.9", "0.10.2", "aaaa", {"mesh": "prefill:tp4", "page_size": "32"}, 1000.0)
MEMBER = replace(LEADER, rank=2, clock_s=1003.0)
CASES = {
    "another group": (replace(MEMBER, group="p1"), ["'p1'", "'p0'", "--coordinator"]),
    "another size": (replace(MEMBER, size=2), ["--group_size=2", "says 4"]),
    "a rank of nobody": (replace(MEMBER, rank=4), ["member 4", "1 to 3", "--group_rank"]),
    "the leader's rank": (replace(MEMBER, rank=0), ["member 0", "1 to 3", "--group_rank"]),
    "a rank twice": (replace(MEMBER, rank=1), ["member 1", "10.0.0.9:5", "10.0.0.2:7", "--group_rank"]),
    "another version": (replace(MEMBER, version="0.8"), ["jdisagg 0.8", "leader 0.9", "install"]),
    "another jax": (replace(MEMBER, jax="0.9"), ["jax 0.9", "leader 0.10.2", "install"]),
    "another flag": (
        replace(MEMBER, flags={"mesh": "prefill:tp4", "page_size": "16"}),
        ["--page_size=16", "leader 32", "same flags"],
    ),
    "a flag too few": (replace(MEMBER, flags={"mesh": "prefill:tp4"}), ["--page_size=unknown", "leader 32"]),
    "another model": (replace(MEMBER, model="bbbb"), ["bbbb", "aaaa", "--model"]),
    "a clock that is off": (replace(MEMBER, clock_s=1100.0), ["1100 s", "1000 s", "30 s", "NTP"]),
    "a clock that is none": (replace(MEMBER, clock_s=float("nan")), ["nan s", "1000 s"]),
}


def test_a_process_like_the_leader_is_taken_in() -> None:
    assert refusal(LEADER, MEMBER, "10.0.0.9:5", {1: "10.0.0.2:7"}) is None


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_said_in_one_line_with_the_member_and_both_values(case: str) -> None:
    card, wanted = CASES[case]
    said = refusal(LEADER, card, "10.0.0.9:5", {1: "10.0.0.2:7"})
    assert said is not None and "\n" not in said
    for each in [f"member {card.rank} at 10.0.0.9:5", *wanted]:
        assert each in said, (each, said)


def test_a_card_survives_its_way() -> None:
    assert read_member_info(json.loads(json.dumps(MEMBER.to_json()))) == MEMBER


@pytest.mark.parametrize(
    "change", [{"rank": "2"}, {"rank": True}, {"flags": []}, {"flags": {"a": 3}}, {"group": None}, {"clock_s": "now"}]
)
def test_what_is_no_card_is_none(change: dict[str, object]) -> None:
    assert read_member_info(MEMBER.to_json() | change) is None
    assert read_member_info(None) is None and read_member_info([]) is None


def test_a_group_that_did_not_fill_names_who_is_missing_and_who_was_refused() -> None:
    said = unfilled(LEADER, {2: "10.0.0.2:7"}, 30.0, "member 1 at x has --page_size=16, the leader 32")
    for each in ("'p0'", "2 of 4", "ranks 1, 3", "30 s", "--group_wait_s", "--page_size=16"):
        assert each in said, (each, said)
