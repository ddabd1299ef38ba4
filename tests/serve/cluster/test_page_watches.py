"""Somebody watches the page of a cluster of processes while one of them is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.chromium import Reader, reader
from tests.serve.cluster.processes import Cluster, Process, until

pytestmark = pytest.mark.slow

LONG = {"prompt": "def f(", "temperature": 0, "max_tokens": 300, "ignore_eos": True}


def busy(somebody: Reader, processes: list[Process]) -> Process:
    """Whichever of them the page shows with a sequence."""

    def shown() -> Process | None:
        return next((each for each in processes if "0 of 4" not in somebody.card(each.worker).inner_text()), None)

    return until(shown, "a card of a worker that decodes")


def test_a_worker_killed_while_one_watches_is_shown_as_gone_and_the_answers_go_on(
    cluster: Cluster, browser: Any, pool: ThreadPoolExecutor
) -> None:
    cluster.mesh = "prefill:tp1,decode:tp1"
    cluster.start("router")
    decodes, prefill = [cluster.start("decode"), cluster.start("decode")], cluster.start("prefill")
    cluster.await_ready()
    cluster.await_workers(*decodes, prefill)
    with reader(browser, cluster.url) as somebody:
        for each in (prefill, *decodes):
            somebody.card(each.worker).wait_for()
        answer = cluster.begin(pool, pieces=2, **LONG)
        killed = busy(somebody, decodes)
        somebody.ask("def g(", 100)
        killed.kill()
        somebody.card(killed.worker).get_by_text("gone", exact=True).wait_for()
        assert "Its pages went with it." in somebody.card(killed.worker).inner_text()
        assert f"{killed.worker} is gone" in somebody.page.inner_text("#cluster-told")
        told = answer.result()
        assert told.finish == "length" and told.error is None
        somebody.await_ledger()
        assert not somebody.answer().locator(".wrong").count()
        joined = cluster.start("decode")
        somebody.card(joined.worker).wait_for()
    cluster.await_all_free()
