"""Workers of other processes change their roles: streams go on with the same tokens, nothing compiles meanwhile."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, private, until

pytestmark = pytest.mark.slow

LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True, "logprobs": 1}
PROMPTS = ["def f(", "for name in names:\n    print(name)\n" * 9]
BODIES = [{**LONG, "prompt": prompt} for prompt in PROMPTS]


class Operated:
    """A router, two prefill workers and a decode worker, each a process."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, cluster.mesh = cluster, "prefill:tp1,decode:tp1"
        keys = private(cluster.folder / "keys", "admin the-key-of-the-operator\n")
        self.router = cluster.start("router", f"--api_keys_file={keys}", "--queue_timeout_s=200")
        self.decode, self.prefills = cluster.start("decode"), [cluster.start("prefill"), cluster.start("prefill")]
        self.settle()
        self.undisturbed = [cluster.ask(**body) for body in BODIES]

    def settle(self) -> None:
        """Two prefill workers live and are known."""
        self.prefills = [each for each in self.prefills if each.popen.poll() is None]
        self.prefills += [self.cluster.start("prefill") for _ in range(2 - len(self.prefills))]
        self.cluster.await_ready()
        self.cluster.await_workers(self.decode, *self.prefills)

    def admin(self, path: str = "", body: dict[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": "Bearer the-key-of-the-operator"}
        request = urllib.request.Request(f"{self.cluster.url}/admin/workers{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    def worker(self, process: Process) -> dict[str, Any]:
        """As the router sees it; nothing where it knows no such worker."""
        return next((each for each in self.admin()[1]["workers"] if each["worker"] == process.worker), {})

    def flip(self, process: Process, role: str) -> None:
        told = self.admin(f"/{process.worker}/role", {"role": role, "drain_s": 2})
        assert told[0] == 202, told

    def await_role(self, process: Process, role: str) -> dict[str, Any]:
        until(lambda: self._is(process, role), f"{process.worker} to {role}")
        return self.worker(process)

    def _is(self, process: Process, role: str) -> bool:
        found = self.worker(process)
        return found.get("role") == role and found["standing"] == "serving"

    def assert_undisturbed(self, told: Answer, body: int) -> None:
        expected = self.undisturbed[body]
        assert told.error is None and told.finish == "length" and told.tokens == expected.tokens


@pytest.fixture(scope="module")
def operated(cluster: Cluster) -> Operated:
    return Operated(cluster)


@pytest.fixture
def loaded(operated: Operated, pool: ThreadPoolExecutor) -> Iterator[Operated]:
    """Streams come one after the other, and none is disturbed."""
    operated.settle()
    stop, told = threading.Event(), list[tuple[int, Answer]]()

    def ask(body: int) -> None:
        while not stop.is_set():
            told.append((body, operated.cluster.ask(**BODIES[body])))

    asking = [pool.submit(ask, body) for body in range(len(BODIES))]
    yield operated
    stop.set()
    for each in asking:
        each.result()
    assert told
    for body, answer in told:
        operated.assert_undisturbed(answer, body)
    operated.cluster.await_all_free()


def test_a_worker_of_another_process_changes_its_role_there_and_back_under_load(loaded: Operated):
    flipped = loaded.prefills[0]
    assert loaded.worker(flipped)["can_be"] == ["prefill:tp1", "decode:tp1", "colocated:tp1"]
    for role in ("decode", "prefill"):
        loaded.flip(flipped, role)
        loaded.await_role(flipped, role)
    until(lambda: loaded.worker(flipped)["took"], "what it took")
    assert loaded.worker(flipped)["took"]["reshard_s"] > 0
    assert [value for _, value in loaded.cluster.samples("recompiles")] == [0.0]


def test_a_worker_that_is_killed_while_it_changes_is_lost_and_the_others_serve(loaded: Operated):
    flipped = loaded.prefills[0]
    loaded.flip(flipped, "colocated")
    until(lambda: loaded.worker(flipped)["standing"] == "changing", "it to change")
    flipped.kill()
    until(lambda: not loaded.worker(flipped), "the router to miss it")
    assert loaded.worker(loaded.decode)["standing"] == "serving"
    loaded.assert_undisturbed(loaded.cluster.ask(**BODIES[0]), 0)


def test_what_a_worker_of_another_process_cannot_be_is_refused_in_one_line(operated: Operated):
    operated.settle()
    code, why = operated.admin(f"/{operated.decode.worker}/role", {"role": "prefill"})
    assert code == 409 and why == f"{operated.decode.worker} is the last worker for decode"
    code, why = operated.admin(f"/{operated.prefills[0].worker}/role", {"role": "decode", "mesh": "pp2"})
    assert code == 400 and why == "mesh pp2 is of 2 devices, and the worker stands on 1"
