"""Two routers, one of which leads: it is killed, the other takes over, and it comes back standing by."""

from __future__ import annotations

import re

import pytest

from tests.ports import free_port
from tests.serve.cluster.processes import Cluster, Process, status, until

pytestmark = pytest.mark.slow

LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "logprobs": 1}
PROMPTS = ["def f(", "import os\n\n\nclass Tree:\n"]
BODIES = [{**LONG, **more, "prompt": each} for each in PROMPTS for more in ({}, {"temperature": 0.7, "seed": 11})]
HELD = {"structured_outputs": {"regex": "(copy|move) ([a-f]{40} ?){99}!"}}  # longer than an answer may become
BODIES.append({**LONG, **HELD, "prompt": "def g(", "temperature": 0.7, "seed": 3})
GRACE_S = 60.0


class Pair:
    """Two routers, a front and a worker of each kind, all told of both routers."""

    def __init__(self, cluster: Cluster) -> None:
        cluster.mesh = "prefill:tp1,decode:tp1"
        self.cluster, self.second = cluster, Cluster(cluster.folder, cluster.cache, cluster.mesh)
        self.second.control = free_port()
        self.both = f"127.0.0.1:{cluster.control},127.0.0.1:{self.second.control}"
        self.via = Cluster(cluster.folder, cluster.cache, cluster.mesh)
        self.routers = [self.start_router(cluster), self.start_router(self.second)]
        more = [f"--router={self.both}", f"--router_grace_s={GRACE_S}"]
        self.front = cluster.start("front", f"--http_port={self.via.http}", "--grpc_port=-1", *more)
        self.workers = [cluster.start(role, *more) for role in ("decode", "prefill")]
        until(lambda: status(f"{self.via.url}/ready") == 200, "a front that is ready")

    def start_router(self, which: Cluster) -> Process:
        flags = ["--queue_timeout_s=200", f"--router={self.both}"]
        ports = [f"--http_port={which.http}", f"--control_port={which.control}"]
        return self.cluster.start("router", *ports, *flags)


def leads(router: Process) -> list[int]:
    """The terms with which it has led."""
    return [int(term) for term in re.findall(r"this router is leading: leads with term (\d+)", router.log.read_text())]


def test_the_second_router_takes_over_from_the_first_and_streams_go_on_with_the_same_tokens(cluster: Cluster, pool):
    pair = Pair(cluster)
    first, second = pair.routers
    assert leads(first) == [1] and not leads(second)
    undisturbed = pair.via.ask_all(BODIES)
    answers = [pair.via.begin(pool, pieces=3 if number < 2 else 0, **body) for number, body in enumerate(BODIES)]
    first.kill()
    for expected, answer in zip(undisturbed, answers, strict=True):
        told = answer.result()
        assert told.error is None and told.finish == "length"
        assert told.tokens == expected.tokens and told.text == expected.text
    assert leads(second) == [2] and second.said("goes on with"), "what was decoded was kept"
    pair.second.await_all_free()
    again = pair.start_router(cluster)
    again.await_word("the other router is there")
    assert pair.via.ask(**BODIES[0]).tokens == undisturbed[0].tokens
    assert not leads(again) and status(f"{cluster.url}/ready") == 503, "it stands by"
    second.kill()
    assert pair.via.ask(**BODIES[1]).tokens == undisturbed[1].tokens
    assert leads(again) == [3]
