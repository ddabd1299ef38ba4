"""Workers that span processes say what workers of one process say, prefill and decode, with groups at either end; and
whichever of their processes is killed or stopped, the group ends, and streams go on elsewhere with the same tokens."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # up to five processes start at once

GREEDY = [
    {"prompt": "def f(", "max_tokens": 12},
    {"prompt": "import os\n\n\nclass Tree:\n    def __init__(self", "max_tokens": 24, "ignore_eos": True},
    {"prompt": "for name in names:\n    print(name)\n" * 9, "max_tokens": 20, "ignore_eos": True},  # several chunks
]
SEEDED = {**GREEDY[1], "temperature": 0.8, "top_p": 0.95, "seed": 7}
COUNTED = {**GREEDY[2], "presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"11": 4}, "min_tokens": 8}
BODIES = [{"temperature": 0, **each, "logprobs": 3} for each in [*GREEDY, SEEDED, COUNTED]]
LONG = [{"temperature": 0, "max_tokens": 200, "ignore_eos": True, "prompt": each["prompt"]} for each in GREEDY]
SILENCE_S = 8.0  # as `Cluster.start_group` has it
MESH = "prefill:tp2,decode:tp2"
RING = "prefill:tp2,decode:ring2"
TURNS = ("--multi_step=4",)  # of a ring: several tokens of a stream a dispatch


class Stack:
    """A router and whatever workers a test asks for, what is alive being kept from test to test."""

    def __init__(self, cluster: Cluster, *flags: str) -> None:
        self.cluster, self.flags = cluster, flags
        self.router = cluster.start("router", "--queue_timeout_s=200", *flags)
        self.singles: dict[str, Process] = {}
        self.groups: dict[str, list[Process]] = {}

    def settle(self, **wanted: str) -> None:
        """Just these workers are there: prefill="group", decode="single group" or the like."""
        living: list[Process] = []
        for role in ("prefill", "decode"):
            kinds = wanted[role].split()
            self._keep(role, "single" in kinds, "group" in kinds)
            living += [self.singles[role]] if "single" in kinds else []
            living += self.groups[role][:1] if "group" in kinds else []
        self.cluster.await_workers(*living)
        self.cluster.await_all_free()

    def _keep(self, role: str, single: bool, group: bool) -> None:
        if single and (role not in self.singles or self.singles[role].popen.poll() is not None):
            self.singles[role] = self.start(role)
        if not single and role in self.singles:
            self.singles.pop(role).kill()
        members = self.groups.get(role, [])
        if not group or any(each.popen.poll() is not None for each in members):
            for each in members:
                each.kill()
            self.groups.pop(role, None)
        if group and role not in self.groups:
            self.groups[role] = self.cluster.start_group(role, *self.flags)

    def start(self, role: str) -> Process:
        return self.cluster.start(role, *self.flags)

    def assert_ended(self, role: str, within_s: float) -> None:
        """Every process of the group is gone, each with one line and a code that is not 0."""
        deadline_s = time.monotonic() + within_s
        for each in self.groups[role]:
            until(lambda each=each: each.popen.poll() is not None, f"{each.log} to end", deadline_s - time.monotonic())
            assert each.popen.returncode == -9 or each.popen.returncode > 0, each.popen.returncode
            if each.popen.returncode != -9:
                lines = re.findall(r"^jdisagg: .*$", each.log.read_text(), re.MULTILINE)
                assert len(lines) == 1, each.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> list[Answer]:
    """What one process says to each of `BODIES` and `LONG`."""
    one = Cluster(tmp_path_factory.mktemp("alone"), compiled, MESH)
    try:
        one.start("all")
        one.await_ready()
        return [one.ask(**body) for body in [*BODIES, *LONG]]
    finally:
        one.stop()


@pytest.fixture(scope="module")
def stack(alone: list[Answer], cluster: Cluster) -> Stack:
    cluster.mesh = MESH
    return Stack(cluster)


@pytest.fixture(scope="module")
def ring_stack(alone: list[Answer], compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Whose decode workers are rings, of one process or of two."""
    cluster = Cluster(tmp_path_factory.mktemp("rings"), compiled, RING)
    yield Stack(cluster, *TURNS)
    cluster.stop()


def assert_same(told: Answer, alone: Answer) -> None:
    assert told.error is None and told.finish == alone.finish
    assert told.tokens == alone.tokens and told.text == alone.text
    assert told.logprobs == pytest.approx(alone.logprobs, abs=1e-3)


@pytest.mark.parametrize(  # at both ends: also in test_groups_supervised.py
    "ends", ["group single", pytest.param("group group", marks=pytest.mark.hostile), "single group"]
)
def test_a_group_at_either_end_says_what_one_process_says(stack: Stack, alone: list[Answer], ends: str, pool):
    prefill, decode = ends.split()
    stack.settle(prefill=prefill, decode=decode)
    assert_says_the_same(stack, alone, pool)


@pytest.mark.parametrize("ends", [pytest.param("single group", marks=pytest.mark.hostile), "group group"])
def test_a_ring_over_processes_says_what_one_process_says(ring_stack: Stack, alone: list[Answer], ends: str, pool):
    prefill, decode = ends.split()
    ring_stack.settle(prefill=prefill, decode=decode)
    assert_says_the_same(ring_stack, alone, pool)


def assert_says_the_same(stack: Stack, alone: list[Answer], pool: ThreadPoolExecutor) -> None:
    for body, expected in zip(BODIES, alone, strict=False):
        assert_same(stack.cluster.ask(**body), expected)
    answers = [pool.submit(lambda body=body: stack.cluster.ask(**body)) for body in BODIES]  # prefixes are cached now
    for answer, expected in zip(answers, alone, strict=False):
        assert_same(answer.result(), expected)
    stack.cluster.await_all_free()
    assert sum(value for _, value in stack.cluster.samples("recompiles_total")) == 0


@pytest.mark.parametrize(
    "victim, number",
    [  # a member that is killed: a ring's, below, and one of a supervised group
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.hostile),
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
    ],
)
def test_a_decode_group_ends_as_one_and_its_streams_go_on(
    stack: Stack, alone: list[Answer], victim: int, number: signal.Signals, pool
):
    assert_ends_as_one(stack, alone, victim, number, pool)


@pytest.mark.parametrize(
    "victim, number", [(1, signal.SIGKILL), pytest.param(1, signal.SIGSTOP, marks=pytest.mark.hostile)]
)
def test_a_ring_over_processes_ends_as_one_and_its_streams_go_on(
    ring_stack: Stack, alone: list[Answer], victim: int, number: signal.Signals, pool
):
    assert_ends_as_one(ring_stack, alone, victim, number, pool)


def assert_ends_as_one(
    stack: Stack, alone: list[Answer], victim: int, number: signal.Signals, pool: ThreadPoolExecutor
) -> None:
    stack.settle(prefill="single", decode="group")
    answers = [stack.cluster.begin(pool, pieces=3, **body) for body in LONG]
    began_s = time.monotonic()
    stack.groups["decode"][victim].send(number)
    stack.singles["decode"] = stack.start("decode")
    if number is signal.SIGSTOP:
        other = stack.groups["decode"][1 - victim]
        until(lambda: other.popen.poll() is not None, "the other to end")
        assert time.monotonic() - began_s < SILENCE_S + 5
        stack.groups["decode"][victim].send(signal.SIGCONT)
    stack.assert_ended("decode", SILENCE_S + 5)
    for answer, expected in zip(answers, alone[len(BODIES) :], strict=True):
        told = answer.result()
        assert told.error is None and told.text == expected.text and told.finish == expected.finish
    stack.settle(prefill="single", decode="single")


def test_a_prefill_group_whose_leader_is_stopped_ends_and_its_prompts_are_prefilled_elsewhere(
    stack: Stack, alone: list[Answer], pool
):
    stack.settle(prefill="group", decode="single")
    leader, member = stack.groups["prefill"]
    leader.send(signal.SIGSTOP)
    answers = [stack.cluster.begin(pool, pieces=0, **body) for body in BODIES]
    stack.singles["prefill"] = stack.start("prefill")
    until(lambda: member.popen.poll() is not None, "the member to end", SILENCE_S + 5)
    leader.send(signal.SIGCONT)
    stack.assert_ended("prefill", SILENCE_S + 5)
    for answer, expected in zip(answers, alone, strict=False):
        assert_same(answer.result(), expected)
    stack.settle(prefill="single", decode="single")


def test_a_group_that_is_asked_to_stop_drains_and_ends_clean(stack: Stack, pool):
    stack.settle(prefill="single", decode="group")
    answer = stack.cluster.begin(pool, pieces=3, **LONG[0])
    for each in stack.groups["decode"]:  # as a scheduler does, all at once
        each.send(signal.SIGTERM)
    told = answer.result()
    assert told.error is None and told.finish == "length"
    for each in stack.groups["decode"]:
        assert each.popen.wait(timeout=60) == 0, each.log.read_text()[-2000:]
