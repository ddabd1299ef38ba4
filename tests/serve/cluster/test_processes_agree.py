"""Several processes say what one process says: greedy and seeded, with log probabilities, one by one and at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, until

pytestmark = pytest.mark.slow

GREEDY = [
    {"prompt": "def f(", "max_tokens": 12},
    {"prompt": "import os\n\n\nclass Tree:\n    def __init__(self", "max_tokens": 24, "ignore_eos": True},
    {"prompt": "for name in names:\n    print(name)\n" * 9, "max_tokens": 20, "ignore_eos": True},  # several chunks
]
SEEDED = [{**each, "temperature": 0.8, "top_p": 0.95, "seed": seed} for seed, each in enumerate(GREEDY, 17)]
COUNTED = [{**GREEDY[2], "presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"11": 4}, "min_tokens": 8}]
BODIES = [{"temperature": 0, **each, "logprobs": 3} for each in [*GREEDY, *SEEDED, *COUNTED]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> list[Answer]:
    """What one process says to each of `BODIES`."""
    one = Cluster(tmp_path_factory.mktemp("alone"), compiled)
    try:
        one.start("all")
        one.await_ready()
        return [one.ask(**body) for body in BODIES]
    finally:
        one.stop()


@pytest.fixture(scope="module")
def three(cluster: Cluster, alone: list[Answer]) -> Cluster:
    """A router, a decode process, and a prefill process that offers by shared memory."""
    for role in ("router", "decode", "prefill"):
        cluster.start(role)
    cluster.await_ready()
    return cluster


@pytest.fixture(scope="module", params=["shm", "tcp"])
def stack(three: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With tcp the prefill process is replaced by one that insists on it."""
    decode, prefill = three.started[1:3]
    if request.param == "tcp":
        over_tcp = three.start("prefill", "--transport=tcp")
        prefill.kill()
        three.await_workers(decode, over_tcp)
        prefill = over_tcp
    yield three
    assert_crossed_by(prefill, request.param)


def assert_crossed_by(prefill: Process, transport: str) -> None:
    crossed = prefill.said(r"KV crosses by (\w+)")
    assert crossed and crossed[1] == transport


def assert_same(told: Answer, alone: Answer) -> None:
    assert told.error is None and told.finish == alone.finish
    assert told.tokens == alone.tokens and told.text == alone.text
    assert told.logprobs == pytest.approx(alone.logprobs, abs=1e-3)


def test_one_by_one_they_say_the_same(stack: Cluster, alone: list[Answer]):
    for body, expected in zip(BODIES, alone, strict=True):
        assert_same(stack.ask(**body), expected)
    stack.await_all_free()


def test_at_once_they_say_the_same(stack: Cluster, alone: list[Answer], pool: ThreadPoolExecutor):
    told = pool.map(lambda body: stack.ask(**body), BODIES * 2)
    for answer, expected in zip(told, alone * 2, strict=True):
        assert_same(answer, expected)
    stack.await_all_free()


def test_metrics_of_the_router_speak_of_all_workers(stack: Cluster):
    stack.ask(**BODIES[0])
    stack.await_all_free()  # and every worker has reported since
    names = set(stack.pages())
    assert len(names) == 2 and all(free == 2048 // 16 for free, _ in stack.pages().values())
    runs = {labels["worker"] for labels, value in stack.samples("decode_runs_total") if value}
    runs |= {labels["worker"] for labels, value in stack.samples("prefill_runs_total") if value}
    assert runs == names
    shipped = [value for _, value in stack.samples("shipped_bytes_total")]
    assert shipped and all(shipped)
    assert stack.samples("recompiles") == [({"model_name": "embedded"}, 0.0)]


def test_debug_of_the_router_speaks_of_what_other_processes_did(stack: Cluster):
    stack.ask(**BODIES[0])
    names = set(stack.pages())
    decision = stack.debug("decisions?n=1")["decisions"][0]
    assert set(decision["taken"].values()) == names
    assert " costs " in decision["reason"] and "(queue " in decision["reason"]
    (trace,) = stack.debug(f"requests/{decision['request_id']}")["requests"]
    assert trace["phase"] == "finished" and set(trace["workers"].values()) == names
    assert {"Reserved", "Progress", "Ended"} <= {message["message"] for message in trace["messages"]}
    assert trace["ledger"]["transfer_ns"]["exposed"] == trace["ledger"]["parts_ns"]["transfer"] > 0
    prefill = {name for name in names if name.startswith("prefill")}
    until(lambda: set(stack.debug("transfer")["workers"]) == prefill, "what the prefill process has learnt")
