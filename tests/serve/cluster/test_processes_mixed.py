"""Mistakes are one line; a worker of another kind is sent away with both fingerprints; a router may work as well."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import quick
from tests.fixtures import conformance
from tests.fixtures.other_weights import EMBEDDED, with_other_weights
from tests.launched import launch_here
from tests.serve.cluster.processes import Cluster, private, until

MISTAKES = {
    ("--role=baker",): "roles are router, prefill, decode",
    ("--role=router", "--router=127.0.0.1:1"): "is for workers and fronts",
    ("--role=router",): "need --secret_file=FILE",
    ("--role=router", "--secret_file=/dev/null"): "has 0 bytes, needs 16",
    ("--role=router", "--secret_file=pyproject.toml"): "pyproject.toml has mode 0",
    ("--role=router", "--peer_silence_s=0"): "must be at least 0.5",
    ("--role=router", "--secret_file=SECRET", "--prompt=x"): "give prompts to the whole stack",
    ("--role=decode", "--router=127.0.0.1:1", "--secret_file=SECRET", "--tls_ca=x"): "needs --tls_cert",
}


PORTS = ("--http_port=0", "--grpc_port=0")


@pytest.mark.parametrize("flags", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, flags: tuple[str, ...]):
    secret = private(tmp_path / "secret", "sixteen bytes of secret, or more")
    done = launch_here(*PORTS, *[flag.replace("SECRET", str(secret)) for flag in flags])
    assert done.returncode == 2 and MISTAKES[flags] in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_process_without_its_router_is_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "jdisagg.launch", *PORTS, "--role=prefill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=quick(), check=False)
    assert done.returncode == 2 and "needs --router=HOST:PORT" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_router_that_prefills_works_with_a_decode_process_and_refuses_another_model(cluster: Cluster, tmp_path: Path):
    cluster.mesh = "prefill:tp1,decode:tp1"
    cluster.start("router,prefill")
    decode = cluster.start("decode", "--transport=tcp")
    cluster.await_ready()
    other = cluster.start("decode", f"--model={conformance.load('llama3').folder}", "--max_model_len=256")
    told = cluster.ask(prompt="def f(", max_tokens=20, temperature=0, logprobs=1)
    assert told.error is None and len(told.tokens) > 5
    assert len(cluster.pages()) == 2
    cluster.await_all_free()

    assert other.popen.wait(timeout=240) == 1
    refused = until(lambda: other.said(r"jdisagg: .*fingerprint (\w+) there, (\w+) here.*"), "a refusal")
    assert refused[1] != refused[2] and "embedded" in refused[0] and "llama3" in refused[0]

    forger = private(tmp_path / "secret", "another sixteen bytes or more")
    stranger = cluster.start("decode", f"--secret_file={forger}")
    assert stranger.popen.wait(timeout=240) == 1
    assert stranger.said("jdisagg: the router at .* does not share our secret")
    assert decode.popen.poll() is None


@pytest.fixture
def alone(tmp_path: Path, compiled: Path) -> Iterator[Cluster]:
    """A cluster of one test."""
    cluster = Cluster(tmp_path, compiled, "prefill:tp1,decode:tp1")
    yield cluster
    cluster.stop()


@pytest.mark.slow
def test_a_worker_with_other_weights_of_the_same_config_and_sizes_is_refused_with_both_fingerprints(
    alone: Cluster, tmp_path: Path
):
    router, decode = (alone.start(role, f"--model={EMBEDDED}") for role in ("router,prefill", "decode"))
    other = with_other_weights(EMBEDDED, tmp_path / "embedded")
    alone.await_ready()
    second = alone.start("decode", f"--model={other}", "--served_model_name=embedded")
    assert second.popen.wait(timeout=240) == 1
    here, there = (
        each.await_word(r"identity\s+embedded:(\w{12}) \(weights (\w{12}), config (\w{12}), tokenizer (\w{12})\)")
        for each in (router, second)
    )
    refused = until(lambda: second.said(r"jdisagg: .* is not of our kind.*"), "a refusal")[0]
    assert here[1] != there[1] and here[1] in refused and there[1] in refused
    assert here[2] != there[2] and (here[3], here[4]) == (there[3], there[4])

    told = alone.ask(prompt="def f(", max_tokens=20, temperature=0)
    assert told.error is None and decode.popen.poll() is None
    health = json.load(urllib.request.urlopen(f"{alone.url}/health", timeout=30))
    assert health["model_fingerprint"] == here[1]
