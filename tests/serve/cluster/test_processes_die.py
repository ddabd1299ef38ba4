"""Processes are killed at every moment: streams go on with the same tokens, or end with a clear error, and every page
comes back."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, status, until

pytestmark = pytest.mark.slow

LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "logprobs": 1}
PROMPTS = ["def f(", "import os\n\n\nclass Tree:\n", "for name in names:\n    print(name)\n" * 9]
SEEDED = {"temperature": 0.7, "seed": 11}
BODIES = [{**LONG, **more, "prompt": prompt} for prompt in PROMPTS for more in ({}, SEEDED)]


class Town:
    """A cluster with the processes that live at this moment, and what it says when nobody dies."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, cluster.mesh = cluster, "prefill:tp1,decode:tp1"
        self.router = cluster.start("router", "--queue_timeout_s=200")
        self.decodes = [cluster.start("decode"), cluster.start("decode")]
        self.prefills = [cluster.start("prefill"), cluster.start("prefill")]
        self.settle()
        self.undisturbed = [cluster.ask(**body) for body in BODIES]

    def settle(self) -> None:
        """Two of each live and are known, and nothing is held anywhere."""
        for role, living in (("decode", self.decodes), ("prefill", self.prefills)):
            living[:] = [each for each in living if each.popen.poll() is None]
            living.extend(self.cluster.start(role) for _ in range(2 - len(living)))
        until(lambda: status(f"{self.cluster.url}/ready") == 200, "a router that is ready")
        self.cluster.await_workers(*self.decodes, *self.prefills)
        self.cluster.await_all_free()

    def busy(self, processes: list[Process]) -> Process:
        """Whichever of them holds pages first."""
        return until(lambda: next((each for each in processes if self.cluster.used(each.worker)), None), "a busy one")

    def assert_undisturbed(self, told: Answer, body: int) -> None:
        expected = self.undisturbed[body]
        assert told.error is None and told.finish == expected.finish == "length"
        assert told.tokens == expected.tokens and told.text == expected.text


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Town:
    return Town(cluster)


@pytest.fixture
def town(whole: Town) -> Iterator[Town]:
    whole.settle()
    yield whole
    for each in [*whole.decodes, *whole.prefills]:
        if each.popen.poll() is None:
            each.send(signal.SIGCONT)


def test_a_decode_process_killed_at_any_moment_is_replaced_by_the_other(town: Town, pool):
    """Some decode; of the others some wait for a bed, some for their prefill, some for their KV."""
    answers = [town.cluster.begin(pool, pieces=3 if number < 3 else 0, **body) for number, body in enumerate(BODIES)]
    town.busy(town.decodes).kill()
    for number, answer in enumerate(answers):
        town.assert_undisturbed(answer.result(), number)
    town.cluster.await_all_free()


def test_a_decode_process_killed_before_anything_was_shipped_is_replaced_by_the_other(town: Town, pool):
    for prefill in town.prefills:
        prefill.send(signal.SIGSTOP)
    answer = town.cluster.begin(pool, pieces=0, **BODIES[4])
    town.busy(town.decodes).kill()
    for prefill in town.prefills:
        prefill.send(signal.SIGCONT)
    town.assert_undisturbed(answer.result(), 4)
    town.cluster.await_all_free()


def test_a_prefill_process_killed_with_a_prompt_in_hand_is_replaced_by_the_other(town: Town, pool):
    for prefill in town.prefills:
        prefill.send(signal.SIGSTOP)
    answers = [town.cluster.begin(pool, pieces=0, **BODIES[body]) for body in (4, 5)]
    until(lambda: sum(town.cluster.used(each.worker) for each in town.decodes) > 0, "a bed")
    dead, alive = town.prefills
    dead.kill()
    alive.send(signal.SIGCONT)
    for body, answer in zip((4, 5), answers, strict=True):
        town.assert_undisturbed(answer.result(), body)
    town.cluster.await_all_free()


def test_a_prefill_process_killed_after_shipping_is_not_missed(town: Town, pool):
    answers = [town.cluster.begin(pool, pieces=2, **body) for body in BODIES[:4]]
    town.prefills[0].kill()
    for number, answer in enumerate(answers):
        town.assert_undisturbed(answer.result(), number)
    town.cluster.await_all_free()


def test_a_signal_makes_a_process_leave_cleanly_and_its_streams_go_on_elsewhere(town: Town, pool):
    answers = [town.cluster.begin(pool, pieces=3, **BODIES[body]) for body in (0, 1)]
    leaving = town.busy(town.decodes)
    leaving.send(signal.SIGTERM)
    assert leaving.popen.wait(timeout=60) == 0
    for body, answer in enumerate(answers):
        town.assert_undisturbed(answer.result(), body)
    town.cluster.await_all_free()


def test_a_stream_waits_for_a_decode_process_to_come_back(town: Town, pool):
    answer = town.cluster.begin(pool, pieces=3, **BODIES[1])
    for decode in town.decodes:
        decode.kill()
    until(lambda: len(town.cluster.pages()) == 2, "a router that misses them")
    town.settle()
    town.assert_undisturbed(answer.result(), 1)
    town.cluster.await_all_free()


def test_workers_join_a_router_that_was_killed_and_restarted_and_hold_nothing(town: Town, pool):
    answer = town.cluster.begin(pool, pieces=3, **BODIES[0])
    town.router.kill()
    assert answer.result().finish is None, "it broke off, and does not look like an end"
    town.router = town.cluster.start("router", "--queue_timeout_s=3")
    town.settle()
    town.assert_undisturbed(town.cluster.ask(**BODIES[0]), 0)
    town.cluster.await_all_free()


def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error_at_its_deadline(town: Town, pool):
    """The router of the test before gives a request three seconds to find a bed."""
    answer = town.cluster.begin(pool, pieces=3, **BODIES[0])
    for decode in town.decodes:
        decode.kill()
    told = answer.result()
    assert told.finish in ("error", "timeout") or told.error is not None
    assert told.finish != "length" and told.tokens == town.undisturbed[0].tokens[: len(told.tokens)]
    town.cluster.await_all_free()
