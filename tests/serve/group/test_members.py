"""The stream between a leader and its members: one order, replies, proof of step, and an end that nobody outlives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jdisagg.core.dispatch_digest import EVERY, RunningDigest
from jdisagg.core.errors import JdisaggError
from jdisagg.serve.cluster.group.assembly import Assembly, join_leader
from jdisagg.serve.cluster.group.leader import Members, awaited, when_all
from jdisagg.serve.cluster.group.stream import Commands, GroupStream, Pulse
from tests.serve.cluster.processes import until
from tests.serve.group.meetings import WAIT_S, card, meeting

SILENCE_S = 1.0


class Group:
    """A leader and its members' ends; `ends` is why it ended, by who heard it."""

    def __init__(self, size: int = 2) -> None:
        at = meeting()
        assembly = Assembly(at, card(size=size))
        with ThreadPoolExecutor(1) as pool:
            gathered = pool.submit(assembly.gather)
            self.theirs = {rank: join_leader(at, card(rank, size=size)) for rank in range(1, size)}
            self.streams = gathered.result(WAIT_S)
        assembly.close()
        self.ends: dict[int, list[str]] = {rank: [] for rank in range(size)}
        self.members = Members("p0", self.streams, self.ends[0].append, SILENCE_S)

    def commands(self, rank: int = 1) -> Commands:
        return Commands(self.theirs[rank], self.ends[rank].append)

    def pulse(self, rank: int = 1, done: Callable[[], int] = lambda: 0) -> Pulse:
        return Pulse([self.theirs[rank]], SILENCE_S, self.ends[rank].append, done)

    def close(self) -> None:
        self.members.stop(0.0)
        for each in self.theirs.values():
            each.frames.close()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


def ended(group: Group, rank: int = 0) -> str:
    return until(lambda: group.ends[rank], "the group to end", 20)[0]


def test_commands_of_many_threads_come_to_all_in_the_order_of_their_numbers():
    group = Group(size=3)
    try:
        with ThreadPoolExecutor(8) as pool:
            numbers = sorted(pool.map(lambda each: group.members.command({"said": each}), range(200)))
        assert numbers == [*range(1, 201)]
        heard = {rank: [group.theirs[rank].receive(time.monotonic() + WAIT_S) for _ in range(200)] for rank in (1, 2)}
        assert [each["n"] for each in heard[1]] == numbers and heard[1] == heard[2]
    finally:
        group.close()


def test_replies_find_who_asked_for_them_whatever_their_order():
    group = Group(size=3)
    try:
        group.members.start()
        pulses = [group.pulse(rank) for rank in (1, 2)]
        for pulse in pulses:
            pulse.start()
        first, number = group.members.ask_numbered({"offer": 1})
        second = group.members.ask({"offer": 2})
        told: list[Any] = []
        when_all([*first.values()], told.append)
        for rank in (2, 1):
            group.theirs[rank].send({"to": number + 1, "came": True})
            group.theirs[rank].send({"to": number, "pieces": [rank]})
        assert [reply["came"] for reply in awaited(second, WAIT_S)] == [True, True]
        until(lambda: told, "all to have replied", 20)
        assert [reply["pieces"] for reply in told[0]] == [[1], [2]]
        for pulse in pulses:
            pulse.stop()
    finally:
        group.close()


def test_heartbeats_keep_a_group_that_says_nothing_else(group: Group):
    commands, pulse = group.commands(), group.pulse()
    group.members.start()
    pulse.start()
    time.sleep(2.5 * SILENCE_S)
    assert group.ends == {0: [], 1: []}
    group.members.command({"run": 1})
    assert commands.next(WAIT_S)["run"] == 1, "heartbeats are no commands"
    pulse.stop()


def test_a_member_that_falls_silent_ends_the_group_within_the_silence(group: Group):
    began_s = time.monotonic()
    group.members.start()
    assert "member 1 of group 'p0'" in ended(group) and "nothing heard" in group.ends[0][0]
    assert SILENCE_S <= time.monotonic() - began_s < SILENCE_S + 5
    assert group.ends[0][0].startswith("group 'p0' ends: ")


def test_a_leader_that_falls_silent_ends_the_group_though_the_member_is_busy(group: Group):
    group.commands()
    group.pulse().start()
    assert "leader of p0 is lost: nothing heard" in ended(group, 1)


def test_a_member_that_takes_nothing_ends_the_group_while_the_leader_is_in_the_middle_of_a_command(group: Group):
    """As one that is stopped: the kernel's buffers are full, and whoever sends waits."""
    group.members.start()
    big = {"run": "x" * (1 << 20)}
    sender = threading.Thread(target=lambda: [group.members.command(big) for _ in range(64)], daemon=True)
    sender.start()
    assert "nothing heard" in ended(group)
    group.theirs[1].frames.close()


def test_a_member_that_is_gone_ends_the_group_at_once_and_the_others_are_told():
    group = Group(size=3)
    try:
        other = group.commands(2)
        pulse = group.pulse(2)
        group.members.start()
        pulse.start()
        group.theirs[1].frames.close()
        assert "member 1" in ended(group) and "hung up" in group.ends[0][0]
        assert "member 1" in ended(group, 2)
        assert "member 1" in other.next(WAIT_S)["end"]
        pulse.stop()
    finally:
        group.close()


def test_a_leader_that_is_gone_ends_its_members_at_once(group: Group):
    group.commands()
    group.streams[1].frames.close()
    assert "leader of p0 is lost: " in ended(group, 1)


def test_what_a_member_failed_at_ends_the_group_in_its_words(group: Group):
    group.members.start()
    group.theirs[1].send({"failed": "RuntimeError: no memory"})
    assert ended(group).endswith("failed: RuntimeError: no memory") and "member 1" in group.ends[0][0]


def test_a_member_out_of_step_is_named_with_the_step_and_both_digests(group: Group):
    commands = group.commands()
    group.members.start()
    ours, theirs = RunningDigest(), RunningDigest()
    for step in range(1, 2 * EVERY + 1):
        group.members.note(f"prefill {step}")
        ours.note(f"prefill {step}")
        theirs.note(f"prefill {step}" if step != EVERY + 5 else "decode")
        group.members.compare(step)
        if step % EVERY == 0:
            group.theirs[1].send({"digest": theirs.now, "step": step})
    said = ended(group)
    for each in ("member 1", f"step {2 * EVERY}", ours.now, theirs.now):
        assert each in said, (each, said)
    assert said.removeprefix("group 'p0' ends: ") == commands.next(WAIT_S)["end"]
    assert len(group.ends[0]) == 1, "one line"


def test_a_member_that_stands_still_is_named_with_its_command(group: Group):
    group.commands()
    pulse = group.pulse(done=lambda: 1)
    group.members.start()
    pulse.start()
    group.members.command({"run": 1})
    time.sleep(1.0)
    assert not group.ends[0], "nothing is said of how long a command may take"
    group.members.command({"run": 2})
    group.members.expect_within(0.5)
    said = ended(group)
    assert "member 1" in said and "command 2 has not been carried out" in said
    pulse.stop()


def test_a_clean_end_is_told_to_the_members_and_is_no_failure(group: Group):
    commands, pulse = group.commands(), group.pulse()
    group.members.start()
    pulse.start()
    done = threading.Thread(target=group.members.stop, args=(10.0,))
    done.start()
    assert commands.next(WAIT_S)["end"] == ""
    pulse.stop()
    group.theirs[1].frames.close()
    done.join(WAIT_S)
    assert not done.is_alive() and group.ends == {0: [], 1: []}


def test_a_word_that_is_not_signed_ends_the_group(group: Group):
    group.members.start()
    group.theirs[1].frames.send(b"x" * 80)
    assert "not signed" in ended(group)


def test_a_record_that_comes_twice_ends_the_group(group: Group):
    stream: GroupStream = group.theirs[1]
    group.members.start()
    record = stream._outgoing.sign({"leave": True})
    stream.frames.send(record)
    stream.frames.send(record)
    assert "not signed" in ended(group)


def test_a_member_that_leaves_asks_the_leader_to_drain(group: Group):
    asked = threading.Event()
    group.members.on_leave = asked.set
    group.members.start()
    group.theirs[1].send({"leave": True})
    assert asked.wait(WAIT_S)


def test_what_breaks_while_the_group_ends_is_no_second_line(group: Group):
    group.members.start()
    for _ in range(5):
        group.members.end("first")
        try:
            group.members.command({"run": 1})
        except JdisaggError:
            pytest.fail("a command to a group that has ended is for nobody")
    group.theirs[1].frames.close()
    time.sleep(0.3)
    assert group.ends[0] == ["group 'p0' ends: first"]
