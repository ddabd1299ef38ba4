"""What a group's stream costs a step: `python -m benchmarks.group_stream --output=FILE.json`.

A member in a process of its own reads commands as a member does and decodes each plan. `said` is what telling it costs
the leader's thread (plan to MessagePack, signature, send); `way` runs from before that until the member has the plan,
and is how much later than a worker of one process it may begin the step. Best and median of some thousand; `aim` is of
the way. Both processes read the same monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks import machine
from jdisagg.core.codec import decode_as
from jdisagg.core.request import RequestId, SamplingParams
from jdisagg.core.steps import DecodeRows, PageGrant, PrefillChunk, PrefillChunks, StepPlan
from jdisagg.policy.group_handshake import MemberInfo
from jdisagg.serve.cluster.group.assembly import Assembly, Meeting, join_leader, listener_at
from jdisagg.serve.cluster.group.leader import Members, awaited
from jdisagg.serve.cluster.group.stream import Commands, Pulse

SECRET, SILENCE_S, WAIT_S = b"a secret of this benchmark alone", 30.0, 120.0
AIM_US = 200.0
CHUNK = PrefillChunk(RequestId("r" * 32), tuple(range(512)), 0, tuple(range(1, 33)), True, SamplingParams())
PLANS = {
    "decode, 8 rows": StepPlan(1000, DecodeRows(0, tuple(range(8)), 8)),
    "decode, 64 rows, 2 grants": StepPlan(
        1000, DecodeRows(0, tuple(range(64)), 32, grants=(PageGrant(3, 9, 77), PageGrant(40, 9, 78)))
    ),
    "prefill, 512 tokens": StepPlan(1000, None, PrefillChunks((CHUNK,), 512, 32)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds."""

    plan: str
    record_bytes: int
    said_best_us: float
    said_median_us: float
    way_best_us: float
    way_median_us: float
    aim_us: float = AIM_US


def card(rank: int) -> MemberInfo:
    return MemberInfo("benchmark", rank, 2, "1", "1", "none", {}, time.time())


def meeting(address: str) -> Meeting:
    return Meeting(address, SECRET, time.monotonic() + WAIT_S, WAIT_S)


def be_member(address: str) -> None:
    """Replies to every plan, until it is told of the end."""
    stream = join_leader(meeting(address), card(1))
    done = [0]
    Pulse([stream], SILENCE_S, lambda why: os._exit(1), lambda: done[0]).start()
    commands = Commands(stream, lambda why: os._exit(1))
    while "end" not in (said := commands.next()):
        decode_as(StepPlan, said["run"])
        here_s = time.monotonic()
        done[0] = said["n"]
        stream.send({"to": said["n"], "here_s": here_s})


def measure(rounds: int) -> list[Row]:
    with listener_at("127.0.0.1", 0) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assembly = Assembly(meeting(address), card(0))
    with subprocess.Popen([sys.executable, "-m", "benchmarks.group_stream", f"--member={address}"]) as member:
        members = Members("benchmark", assembly.gather(), sys.exit, SILENCE_S)
        members.start()
        try:
            return [_row(members, name, plan, rounds) for name, plan in PLANS.items()]
        finally:
            assembly.close()
            members.stop()
            member.wait(10)


def _row(members: Members, name: str, plan: StepPlan, rounds: int) -> Row:
    said_us, way_us = list[float](), list[float]()
    for _ in range(rounds):
        began_s = time.monotonic()
        replies = members.ask({"run": msgspec.to_builtins(plan), "ships": False})
        said_us.append(1e6 * (time.monotonic() - began_s))
        way_us.append(1e6 * (awaited(replies, WAIT_S)[0]["here_s"] - began_s))
    figures = [round(of(each), 1) for each in (said_us, way_us) for of in (min, statistics.median)]
    return Row(name, len(msgspec.msgpack.encode(plan)), *figures)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file for the rows, the machine and the versions")
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.member:
        be_member(options.member)
        return
    rows = measure(options.rounds)
    print(f"{'plan':28} {'bytes':>6} {'said us':>8} {'median':>8} {'way us':>8} {'median':>8} {'aim':>6}")
    for row in rows:
        times = f"{row.said_best_us:8} {row.said_median_us:8} {row.way_best_us:8} {row.way_median_us:8}"
        print(f"{row.plan:28} {row.record_bytes:6} {times} {row.aim_us:6}")
    if options.output is not None:
        record = machine.described() | {"rows": [asdict(row) for row in rows]}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
