"""Machines that load and warm at once: results in order, an error at once, and one progress of all."""

import threading
import time

import pytest

from jdisagg.core.request import WorkerId
from jdisagg.serve.driver.executors import JointProgress, Stopped, side_by_side

P, D = WorkerId("prefill-0"), WorkerId("decode-0")


def test_they_run_together_and_their_results_are_in_order():
    both = threading.Barrier(2)  # broken where one waits for the other to end

    def call(name: str) -> str:
        both.wait(timeout=30)
        return name

    assert side_by_side([lambda: call("a"), lambda: call("b")]) == ["a", "b"]
    assert side_by_side([lambda: "alone"]) == ["alone"] and side_by_side([]) == []


def test_an_error_of_any_is_raised_before_the_others_have_ended():
    release = threading.Event()

    def fail() -> None:
        raise ValueError("no such tensor")

    began_s = time.monotonic()
    with pytest.raises(ValueError, match="no such tensor"):
        side_by_side([lambda: release.wait(60), fail])
    assert not release.is_set() and time.monotonic() - began_s < 30
    release.set()


def test_the_progress_is_of_all_and_whoever_tells_more_after_the_end_is_stopped():
    told: list[tuple[str, int, int]] = []
    joint = JointProgress(lambda *each: told.append(each))
    joint.report(P, "prefill", 0, 4)
    joint.report(D, "decode", 0, 6)
    joint.report(P, "prefill", 3, 4)
    joint.stop()
    with pytest.raises(Stopped):
        joint.report(D, "decode", 1, 6)
    assert told == [("prefill-0 prefill", 0, 4), ("decode-0 decode", 0, 10), ("prefill-0 prefill", 3, 10)]
