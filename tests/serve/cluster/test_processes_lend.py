"""Workers of several processes lend each other pages; one that is stopped or killed meanwhile costs time alone."""

from __future__ import annotations

import signal

import pytest

from tests.serve.cluster.processes import Cluster, until

SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def prompt(number: int) -> str:
    return f"def number_{number}(value): return value + {number}\n" * 12


def fetched(cluster: Cluster) -> float:
    """Pages that came from other workers."""
    return sum(count for labels, count in cluster.samples("tier_pages_moved_total") if labels["source"] == "peer")


@pytest.mark.slow
def test_pages_cross_from_process_to_process_and_a_lender_that_is_stopped_or_killed_costs_time_alone(cluster: Cluster):
    cluster.mesh = "colocated:tp1"
    lending = ("--peer_fetch", "--routing=round_robin", "--transport=tcp", "--peer_silence_s=20")
    cluster.start("router,colocated", *lending)
    other = cluster.start("colocated", *lending)
    cluster.await_ready()
    until(lambda: len(cluster.pages()) == 2, "two workers")

    first, *rest = [cluster.ask(prompt=prompt(1), **SHORT).text for _ in range(2)]
    assert first and rest == [first]
    until(lambda: fetched(cluster) > 0, "pages that came from another process", 30)

    cluster.ask(prompt=prompt(2), **SHORT)  # the router's own worker's turn
    at_second = cluster.ask(prompt=prompt(3), **SHORT)
    other.send(signal.SIGSTOP)
    assert cluster.ask(prompt=prompt(3), **SHORT).text == at_second.text, "asked of one that does not answer, computed"
    other.kill()
    until(lambda: len(cluster.pages()) == 1, "the router to miss it")
    assert cluster.ask(prompt=prompt(3), **SHORT).text == at_second.text
    cluster.await_all_free()
