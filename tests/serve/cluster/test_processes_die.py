"""Processes are killed at every moment: streams go on with the same tokens, or end with a clear error, and every page
comes back."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.serve.cluster.processes import Answer, Cluster, Process, status, until

pytestmark = pytest.mark.slow

LONG = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "logprobs": 1}
PROMPTS = ["def f(", "import os\n\n\nclass Tree:\n", "for name in names:\n    print(name)\n" * 9]
SEEDED = {"temperature": 0.7, "seed": 11}
BODIES = [{**LONG, **more, "prompt": prompt} for prompt in PROMPTS for more in ({}, SEEDED)]


class ClusterFixture:
    """A cluster with the processes that live at this moment, and what it says when nobody dies."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, cluster.mesh = cluster, "prefill:tp1,decode:tp1"
        self.router = cluster.start("router", "--queue_timeout_s=200")
        self.decodes = [cluster.start("decode"), cluster.start("decode")]
        self.prefills = [cluster.start("prefill"), cluster.start("prefill")]
        self.settle()
        self.undisturbed = cluster.ask_all(BODIES)

    def settle(self) -> None:
        """Two of each live and are known, and nothing is held anywhere."""
        for role, living in (("decode", self.decodes), ("prefill", self.prefills)):
            living[:] = [each for each in living if each.popen.poll() is None]
            living.extend(self.cluster.start(role) for _ in range(2 - len(living)))
        until(lambda: status(f"{self.cluster.url}/ready") == 200, "a router that is ready")
        self.cluster.await_workers(*self.decodes, *self.prefills)
        until(lambda: not self.cluster.held(), "everything to be free")  # that it stays so, each test has seen to

    def busy(self, processes: list[Process]) -> Process:
        """Whichever of them holds pages first."""
        return until(lambda: next((each for each in processes if self.cluster.used(each.worker)), None), "a busy one")

    def assert_undisturbed(self, told: Answer, body: int) -> None:
        expected = self.undisturbed[body]
        assert told.error is None and told.finish == expected.finish == "length"
        assert told.tokens == expected.tokens and told.text == expected.text


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> ClusterFixture:
    return ClusterFixture(cluster)


@pytest.fixture
def fixture(whole: ClusterFixture) -> Iterator[ClusterFixture]:
    whole.settle()
    yield whole
    for each in [*whole.decodes, *whole.prefills]:
        if each.popen.poll() is None:
            each.send(signal.SIGCONT)


def test_a_decode_process_killed_at_any_moment_is_replaced_by_the_other(fixture: ClusterFixture, pool):
    """Some decode; of the others some wait for a reservation, some for their prefill, some for their KV."""
    answers = [fixture.cluster.begin(pool, pieces=3 if number < 3 else 0, **body) for number, body in enumerate(BODIES)]
    fixture.busy(fixture.decodes).kill()
    for number, answer in enumerate(answers):
        fixture.assert_undisturbed(answer.result(), number)
    fixture.cluster.await_all_free()


def test_a_decode_process_killed_before_anything_was_shipped_is_replaced_by_the_other(fixture: ClusterFixture, pool):
    for prefill in fixture.prefills:
        prefill.send(signal.SIGSTOP)
    answer = fixture.cluster.begin(pool, pieces=0, **BODIES[4])
    fixture.busy(fixture.decodes).kill()
    for prefill in fixture.prefills:
        prefill.send(signal.SIGCONT)
    fixture.assert_undisturbed(answer.result(), 4)
    fixture.cluster.await_all_free()


def test_a_prefill_process_killed_with_a_prompt_in_hand_is_replaced_by_the_other(fixture: ClusterFixture, pool):
    for prefill in fixture.prefills:
        prefill.send(signal.SIGSTOP)
    answers = [fixture.cluster.begin(pool, pieces=0, **BODIES[body]) for body in (4, 5)]
    until(lambda: sum(fixture.cluster.used(each.worker) for each in fixture.decodes) > 0, "a reservation")
    dead, alive = fixture.prefills
    dead.kill()
    alive.send(signal.SIGCONT)
    for body, answer in zip((4, 5), answers, strict=True):
        fixture.assert_undisturbed(answer.result(), body)
    fixture.cluster.await_all_free()


def test_a_prefill_process_killed_after_shipping_is_not_missed(fixture: ClusterFixture, pool):
    answers = [fixture.cluster.begin(pool, pieces=2, **body) for body in BODIES[:4]]
    fixture.prefills[0].kill()
    for number, answer in enumerate(answers):
        fixture.assert_undisturbed(answer.result(), number)
    fixture.cluster.await_all_free()


def test_a_process_stopped_for_longer_than_the_silence_is_missed_and_joins_anew_when_it_goes_on(
    fixture: ClusterFixture, pool
):
    answers = [fixture.cluster.begin(pool, pieces=3, **BODIES[body]) for body in (0, 1, 2)]
    late = fixture.busy(fixture.decodes)
    late.send(signal.SIGSTOP)
    until(lambda: fixture.router.said(rf"{late.worker} is gone"), "the router to miss it")
    for body, answer in enumerate(answers):
        fixture.assert_undisturbed(answer.result(), body)
    assert late.worker not in fixture.cluster.pages()
    late.send(signal.SIGCONT)
    until(lambda: len(re.findall("joined the router", late.log.read_text())) == 2, "it to join anew")
    fixture.cluster.await_workers(*fixture.decodes, *fixture.prefills)
    fixture.cluster.await_all_free()
    fixture.assert_undisturbed(fixture.cluster.ask(**BODIES[3]), 3)
    fixture.cluster.await_all_free()


def test_by_a_signal_a_decode_process_ends_what_it_has_takes_nothing_new_and_leaves(fixture: ClusterFixture, pool):
    answers = [fixture.cluster.begin(pool, pieces=3, **BODIES[body]) for body in (0, 1)]
    leaving = fixture.busy(fixture.decodes)
    leaving.send(signal.SIGTERM)
    until(lambda: leaving.said("draining"), "its log line")
    answers += [fixture.cluster.begin(pool, pieces=0, **BODIES[body]) for body in (2, 3)]
    for body, answer in enumerate(answers):
        fixture.assert_undisturbed(answer.result(), body)
    assert leaving.popen.wait(timeout=60) == 0 and leaving.said("nothing is left here")
    assert fixture.router.said(f"{leaving.worker} is gone: it left")
    fixture.cluster.await_all_free()


def test_what_is_left_after_the_grace_goes_on_elsewhere(fixture: ClusterFixture, pool):
    hurried = fixture.cluster.start("decode", "--drain_s=0.01")
    fixture.decodes.append(hurried)
    fixture.cluster.await_workers(*fixture.decodes, *fixture.prefills)
    answers = [fixture.cluster.begin(pool, pieces=3, **BODIES[body]) for body in (0, 1, 2)]
    until(lambda: fixture.cluster.used(hurried.worker), "a sequence there")
    hurried.send(signal.SIGTERM)
    assert hurried.popen.wait(timeout=60) == 0 and hurried.said("others take over")
    for body, answer in enumerate(answers):
        fixture.assert_undisturbed(answer.result(), body)
    fixture.cluster.await_all_free()


def test_workers_are_replaced_one_after_the_other_under_load_and_no_client_notices(fixture: ClusterFixture, pool):
    """An upgrade: the new process serves before the old one is told to go."""
    answers: list[tuple[int, Future[Answer]]] = []
    before = len(fixture.router.log.read_text())

    def busy() -> None:
        """At any time three streams run, on whichever workers there are."""
        while sum(not answer.done() for _, answer in answers) < 3:
            body = len(answers) % len(BODIES)
            answers.append((body, fixture.cluster.begin(pool, pieces=0, **BODIES[body])))

    def replace(living: list[Process], new: Process) -> None:
        old = living.pop(0)
        living.append(new)
        until(lambda: busy() or new.said("joined the router"), "the new process")
        old.send(signal.SIGTERM)
        until(lambda: busy() or old.popen.poll() is not None, "the old one to end")
        assert old.popen.returncode == 0 and old.said("nothing is left here")

    decode, prefill = (fixture.cluster.start(role) for role in ("decode", "prefill"))
    replace(fixture.decodes, decode)
    replace(fixture.prefills, prefill)
    for body, answer in answers:
        fixture.assert_undisturbed(answer.result(), body)
    fixture.cluster.await_all_free()
    told = fixture.router.log.read_text()[before:]
    assert len(re.findall("is gone: it left", told)) == len(re.findall("is gone", told)) == 2


def test_a_prefill_process_leaves_by_a_signal_and_a_decode_process_at_once_by_a_second(fixture: ClusterFixture, pool):
    """The last test, so that nobody need be started in their places."""
    answers = [fixture.cluster.begin(pool, pieces=3, **BODIES[body]) for body in (0, 1)]
    answers += [fixture.cluster.begin(pool, pieces=0, **BODIES[body]) for body in (4, 5)]
    fixture.prefills[0].send(signal.SIGTERM)
    leaving = fixture.busy(fixture.decodes)
    leaving.send(signal.SIGTERM)
    until(lambda: leaving.said("draining"), "its log line")
    leaving.send(signal.SIGINT)
    assert leaving.popen.wait(timeout=5) == 130
    assert fixture.prefills[0].popen.wait(timeout=60) == 0
    for body, answer in zip((0, 1, 4, 5), answers, strict=True):
        fixture.assert_undisturbed(answer.result(), body)
    fixture.cluster.await_all_free()
