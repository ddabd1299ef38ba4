"""Groups at both ends whose KV changes pages and numbers on its way over TCP, and which are started again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # five processes start at once

FLAGS = ("--prefill_page_size=32", "--transfer_compress=int8", "--transport=tcp")
BODIES = [
    {"prompt": "def f(", "max_tokens": 12},
    {"prompt": "for name in names:\n    print(name)\n" * 9, "max_tokens": 20, "ignore_eos": True},  # several chunks
    {"prompt": "for name in names:\n    print(name)\n" * 9 + "def", "max_tokens": 9},  # whose beginning is cached
    {"prompt": "import os\n", "max_tokens": 200, "ignore_eos": True},
]


def ask(cluster: Cluster) -> list[Answer]:
    return [cluster.ask(temperature=0, **body) for body in BODIES]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> list[Answer]:
    """What workers of one process each say, their KV quantised as well."""
    one = Cluster(tmp_path_factory.mktemp("alone"), compiled, "prefill:tp2,decode:tp2")
    try:
        one.start("all", *FLAGS)
        one.await_ready()
        return ask(one)
    finally:
        one.stop()


@pytest.fixture(scope="module")
def groups(alone: list[Answer], cluster: Cluster) -> list[Process]:
    cluster.mesh = "prefill:tp2,decode:tp2"
    cluster.start("router", "--queue_timeout_s=240", *FLAGS)
    started = [*cluster.start_group("prefill", "--supervise", *FLAGS)]
    started += cluster.start_group("decode", "--supervise", *FLAGS)
    cluster.await_ready()
    return started


def child_of(process: Process) -> int:
    """The process that the supervisor has started."""
    children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children")
    return int(until(lambda: children.read_text().split(), "a child")[0])


@pytest.fixture(autouse=True)
def nobody_left(request: pytest.FixtureRequest):
    """Children of supervisors that the fixtures kill."""
    yield
    if request.node.name.startswith("test_a_group_that_lost"):
        for each in request.getfixturevalue("groups"):
            each.send(signal.SIGTERM)
            each.popen.wait(timeout=120)


def test_both_groups_say_what_single_workers_say(groups: list[Process], alone: list[Answer], cluster: Cluster):
    for told, expected in zip(ask(cluster), alone, strict=True):
        assert told.error is None and (told.text, told.finish) == (expected.text, expected.finish)
    cluster.await_all_free()
    for each in groups[:2]:
        assert each.said("KV crosses by tcp"), "each process of the prefill group offers its own shards"


def test_a_group_that_lost_a_member_is_started_again_as_a_whole(
    groups: list[Process], alone: list[Answer], cluster: Cluster, pool
):
    leader, member = groups[2:]
    first = leader.worker
    answer = cluster.begin(pool, pieces=3, temperature=0, **BODIES[3])
    os.kill(child_of(member), signal.SIGKILL)
    told = answer.result()
    assert told.error is None and told.text == alone[3].text, "it waited for the group to come back"
    for each in (leader, member):
        assert len(re.findall("supervise: ended with code", each.log.read_text())) == 1
    workers = re.findall(r"ready\s+(\S+) for ", leader.log.read_text())
    assert len(workers) == 2 and workers[0] == first != workers[1]
    cluster.await_all_free()
