"""The router is killed with streams under way: clients of a front of their own get the same tokens, none twice and none
lost; those of the router's own process see their connections end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, status, until

pytestmark = pytest.mark.slow

LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "logprobs": 1}
PROMPTS = ["def f(", "import os\n\n\nclass Tree:\n", "for name in names:\n    print(name)\n" * 9]
BODIES = [{**LONG, **more, "prompt": each} for each in PROMPTS for more in ({}, {"temperature": 0.7, "seed": 11})]
GRACE_S = 60.0


class Stack:
    """A router, a front, and a worker of each kind; `own` asks the router's own process."""

    def __init__(self, cluster: Cluster) -> None:
        cluster.mesh = "prefill:tp1,decode:tp1"
        self.own = cluster
        self.router = cluster.start("router", "--queue_timeout_s=200")
        self.front, self.via = start_front(cluster)
        self.workers = [cluster.start(role, f"--router_grace_s={GRACE_S}") for role in ("decode", "prefill")]
        self.settle()
        self.undisturbed = self.via.ask_all(BODIES)

    def settle(self) -> None:
        until(lambda: status(f"{self.via.url}/ready") == 200, "a front that is ready")
        self.own.await_workers(*self.workers)

    def restart(self) -> None:
        self.router = self.own.start("router", "--queue_timeout_s=200")

    def assert_undisturbed(self, told: Answer, body: int) -> None:
        expected = self.undisturbed[body]
        assert told.error is None and told.finish == expected.finish == "length"
        assert told.tokens == expected.tokens and told.text == expected.text

    def joined(self, process: Process) -> int:
        return len(re.findall("joined the router", process.log.read_text()))


def start_front(cluster: Cluster) -> tuple[Process, Cluster]:
    """A front of the cluster's router, and a cluster whose requests go there."""
    via = Cluster(cluster.folder, cluster.cache, cluster.mesh)
    flags = [f"--http_port={via.http}", "--grpc_port=-1", f"--router_grace_s={GRACE_S}"]
    return cluster.start("front", *flags), via


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Iterator[Stack]:
    yield Stack(cluster)


@pytest.fixture
def stack(whole: Stack) -> Stack:
    whole.settle()
    return whole


def test_streams_of_a_front_outlive_a_killed_router_with_the_same_tokens(stack: Stack, pool):
    """Some decode, and are kept; of the others some wait, and are prefilled by the next router."""
    answers = [stack.via.begin(pool, pieces=3 if number < 3 else 0, **body) for number, body in enumerate(BODIES)]
    lost = stack.own.begin(pool, pieces=1, **BODIES[0])
    stack.router.kill()
    stack.restart()
    broken = lost.result(timeout=60)
    assert broken.finish is None, "a client of the router's own process is told by its connection's end"
    for number, answer in enumerate(answers):
        stack.assert_undisturbed(answer.result(), number)
    assert stack.router.said("goes on with"), "the decode worker has kept some"
    stack.own.await_all_free()


def test_what_ends_while_there_is_no_router_is_told_by_the_next(stack: Stack, pool):
    answer = stack.via.begin(pool, pieces=3, **BODIES[0])
    stack.router.kill()
    until(lambda: stack.workers[0].said("the router is gone"), "the decode worker to notice")
    asked = stack.via.begin(pool, pieces=0, **BODIES[2])  # it comes while there is no router, and waits for one
    stack.restart()
    stack.assert_undisturbed(answer.result(), 0)
    stack.assert_undisturbed(asked.result(), 2)
    stack.own.await_all_free()


def test_a_front_that_is_killed_leaves_nothing_behind(stack: Stack, pool):
    """The last test: its front is gone after it."""
    answers = [stack.via.begin(pool, pieces=1, **body) for body in BODIES[:3]]
    stack.front.kill()
    assert all(answer.result(timeout=60).finish is None for answer in answers)
    stack.own.await_all_free()
    assert not stack.own.debug("cluster").get("running"), "nothing runs for it"
