"""Two routers and the lease of a service: the leader is killed, the standby leads, and a restarted one stands by."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from jdisagg.serve.frontends.grpc import jetstream_pb2 as pb
from jdisagg.serve.frontends.grpc.jetstream_pb2_grpc import OrchestratorStub
from tests.kv.tiers.valkey import Valkey
from tests.ports import free_port
from tests.serve.cluster.processes import Cluster, Process, status, until

pytestmark = pytest.mark.slow

LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "logprobs": 1}
PROMPTS = ["def f(", "import os\n\n\nclass Tree:\n"]
BODIES = [{**LONG, **more, "prompt": each} for each in PROMPTS for more in ({}, {"temperature": 0.7, "seed": 11})]
HELD = {"structured_outputs": {"regex": "(copy|move) ([a-f]{40} ?){99}!"}}  # longer than an answer may become
BODIES.append({**LONG, **HELD, "prompt": "def g(", "temperature": 0.7, "seed": 3})
GRACE_S = 60.0


class RouterGroup:
    """Two routers, a front and a worker of each kind, all told of one coordination service."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        cluster.mesh, cluster.coordination = "prefill:tp1,decode:tp1", url
        self.cluster, self.second = cluster, Cluster(cluster.folder, cluster.cache, cluster.mesh)
        self.via = Cluster(cluster.folder, cluster.cache, cluster.mesh)
        self.grpc_ports = {cluster.http: free_port(), self.second.http: free_port()}
        first = self.start_router(cluster)
        first.await_word("this router leads")
        self.routers = [first, self.start_router(self.second)]
        more = [f"--router_grace_s={GRACE_S}"]
        self.front = cluster.start("front", f"--http_port={self.via.http}", "--grpc_port=-1", *more)
        self.workers = [cluster.start(role, *more) for role in ("decode", "prefill")]
        until(lambda: status(f"{self.via.url}/ready") == 200, "a front that is ready")
        until(lambda: status(f"{self.second.url}/ready") == 200, "a standby that is ready")

    def start_router(self, which: Cluster) -> Process:
        ports = [f"--http_port={which.http}", f"--control_port={which.control}"]
        return self.cluster.start(
            "router", "--queue_timeout_s=200", *ports, f"--grpc_port={self.grpc_ports[which.http]}"
        )

    def assert_sends_clients_to(self, standby: Cluster, leader: Cluster) -> None:
        """Asserts that a standby is ready, and answers requests with the leader's address."""
        assert status(f"{standby.url}/ready") == 200
        body = json.dumps({"model": "embedded", "prompt": "x", "max_tokens": 1}).encode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{standby.url}/v1/completions", body), timeout=60)
        error = json.load(refused.value)["error"]
        at, grpc_at = f"127.0.0.1:{leader.http}", f"127.0.0.1:{self.grpc_ports[leader.http]}"
        assert refused.value.code == 503 and error["code"] == "not_leader"
        assert refused.value.headers["x-jdisagg-leader"] == at
        assert f"HTTP at {at} and gRPC at {grpc_at}" in error["message"]
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_ports[standby.http]}") as channel:
            asked = pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text="x"), max_tokens=1)
            with pytest.raises(grpc.RpcError) as failed:
                list(OrchestratorStub(channel).Decode(asked, timeout=60))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE and grpc_at in str(failed.value)


def terms(router: Process) -> list[int]:
    """Returns the terms with which the router has led."""
    return [int(term) for term in re.findall(r"this router leads with term (\d+)", router.log.read_text())]


def test_streams_outlive_kill_9_of_the_leading_router_with_the_same_tokens(cluster: Cluster, pool, tmp_path: Path):
    with Valkey(policy="noeviction") as server:
        group = RouterGroup(cluster, server.url)
        first, second = group.routers
        assert terms(first) == [1] and not terms(second)
        group.assert_sends_clients_to(group.second, cluster)
        undisturbed = group.via.ask_all(BODIES)
        answers = [group.via.begin(pool, pieces=3 if number < 2 else 0, **body) for number, body in enumerate(BODIES)]
        first.kill()
        for expected, answer in zip(undisturbed, answers, strict=True):
            told = answer.result()
            assert told.error is None and told.finish == "length"
            assert told.tokens == expected.tokens and told.text == expected.text
        assert terms(second) == [2] and second.said("goes on with"), "what was decoded was kept"
        group.second.await_all_free()
        again = group.start_router(cluster)
        until(lambda: status(f"{cluster.url}/ready") == 200, "a router that is back")
        group.assert_sends_clients_to(cluster, group.second)
        server.client().flushall()  # the service forgets the term, and workers do not
        assert group.via.ask(**BODIES[0]).tokens == undisturbed[0].tokens
        second.kill()
        assert group.via.ask(**BODIES[1]).tokens == undisturbed[1].tokens
        assert terms(again) and terms(again)[-1] > terms(second)[-1]
