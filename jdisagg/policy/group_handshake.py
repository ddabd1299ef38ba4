"""The checks of a process that joins a worker group: its own description against the leader's.

Every refusal is one line that names the member, both values, and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

CLOCK_S = 30.0  # largest difference of two clocks: logs and traces of one worker are read side by side
MOST_FLAGS = 200
MOST_TEXT = 400
TEXTS = ("group", "version", "jax", "model")


@dataclass(frozen=True)
class MemberInfo:
    """The description that a process sends before it joins a group."""

    group: str
    rank: int
    size: int
    version: str
    jax: str  # its version
    model: str  # the model's identity in one line
    flags: Mapping[str, str]  # flags that all processes of a group must share
    clock_s: float  # seconds since the epoch

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in TEXTS},
            "rank": self.rank,
            "size": self.size,
            "flags": dict(self.flags),
            "clock_s": self.clock_s,
        }


def read_member_info(record: Any) -> MemberInfo | None:
    """Parses the description in a peer's JSON; returns None if it is malformed."""
    said = cast(dict[str, Any], record) if isinstance(record, dict) else {}
    flags = cast(dict[str, str], said["flags"]) if isinstance(said.get("flags"), dict) else None
    texts: list[Any] = [said.get(name) for name in TEXTS]
    rank, size, clock_s = said.get("rank"), said.get("size"), said.get("clock_s")
    if flags is None or len(flags) > MOST_FLAGS:
        return None
    if not all(isinstance(each, str) and len(each) <= MOST_TEXT for each in (*texts, *flags, *flags.values())):
        return None
    if type(rank) is not int or type(size) is not int or type(clock_s) is not float:
        return None
    group, version, jax, model = texts
    return MemberInfo(group, rank, size, version, jax, model, flags, clock_s)


def refusal(ours: MemberInfo, theirs: MemberInfo, place: str, present: Mapping[int, str]) -> str | None:
    """Returns why the process at `place` cannot join; None if it can. `present`: addresses of members by rank."""
    who = f"member {theirs.rank} at {place}"
    if theirs.group != ours.group:
        return (
            f"{who} is of group {theirs.group!r}, and {ours.group!r} meets here: give each group its own --coordinator"
        )
    if theirs.size != ours.size:
        return f"{who} says --group_size={theirs.size}, the leader says {ours.size}: start all with the same"
    if not 0 < theirs.rank < ours.size:
        return f"{who}: ranks of members are 1 to {ours.size - 1}, the leader is 0; give it a --group_rank of these"
    if theirs.rank in present:
        return (
            f"{who} comes second: the process at {present[theirs.rank]} is rank {theirs.rank} of group"
            f" {ours.group!r} already; give each process its own --group_rank"
        )
    return _difference(ours, theirs, who)


def _difference(ours: MemberInfo, theirs: MemberInfo, who: str) -> str | None:
    for name, what in (("version", "jdisagg"), ("jax", "jax")):
        if getattr(ours, name) != getattr(theirs, name):
            there, here = getattr(theirs, name), getattr(ours, name)
            return f"{who} runs {what} {there}, the leader {here}: install the same version everywhere"
    for name in sorted({*ours.flags, *theirs.flags}):
        here, there = ours.flags.get(name, "unknown"), theirs.flags.get(name, "unknown")
        if here != there:
            return f"{who} has --{name}={there}, the leader {here}: start all processes of a group with the same flags"
    if ours.model != theirs.model:
        return f"{who} has the model {theirs.model}, the leader {ours.model}: give all the same --model, the same files"
    return clock_off(who, theirs.clock_s, ours.clock_s)


def clock_off(who: str, theirs_s: float, ours_s: float) -> str | None:
    """Returns the error if a clock differs too much from the leader's, both in seconds since the epoch; else None."""
    if abs(theirs_s - ours_s) <= CLOCK_S:
        return None
    clocks = f"{theirs_s:.0f} s, the leader's {ours_s:.0f} s"
    return f"{who}: its clock says {clocks}, and at most {CLOCK_S:g} s may lie between them: set it (NTP)"


def unfilled(ours: MemberInfo, present: Mapping[int, str], waited_s: float, last_refusal: str) -> str:
    """Returns the error of a group that is not complete in time."""
    missing = [rank for rank in range(1, ours.size) if rank not in present]
    why = f"; the last that was refused: {last_refusal}" if last_refusal else ""
    ranks = ", ".join(map(str, missing))
    return (
        f"group {ours.group!r}: {1 + len(present)} of {ours.size} processes came within {waited_s:g} s, rank"
        f"{'s' * (len(missing) > 1)} {ranks} did not; start them, or raise --group_wait_s{why}"
    )
