"""What `GET /health` says of a stack that serves with less than there was."""

from __future__ import annotations

import httpx

from jdisagg.core.events import WorkerJoined, WorkerLeaving, WorkerLost
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.health import FORGOTTEN_S
from jdisagg.serve.observability.metrics import Metrics
from tests.serve.live_http import serving
from tests.serve.live_toy import worker_config
from tests.serve.scripted import ScriptedService

LOST = WorkerLost(WorkerId("decode-0"))


def said(metrics: Metrics, now_s: float) -> list[str]:
    return metrics.troubles.told(now_s)


def test_a_worker_that_went_without_a_word_is_missed_until_it_is_back_or_forgotten() -> None:
    metrics = Metrics("m")
    metrics.observe("router", LOST, 10.0)
    assert said(metrics, 14.2) == ["decode-0 is gone for 4 s"]
    assert "jdisagg_workers_missing{" in metrics.render().decode() and " 1.0" in metrics.render().decode()
    assert said(metrics, 10.0 + FORGOTTEN_S) == []
    metrics.observe("router", WorkerJoined(worker_config("decode-0", Role.DECODE, 8)), 20.0)
    assert said(metrics, 20.0) == []


def test_a_worker_that_said_goodbye_is_not_missed() -> None:
    metrics = Metrics("m")
    for each in (WorkerLeaving(WorkerId("decode-0")), LOST):
        metrics.observe("router", each, 1.0)
    assert said(metrics, 2.0) == []
    metrics.observe("router", LOST, 3.0)  # it came back unseen, and fell
    assert said(metrics, 3.0) == ["decode-0 is gone for 0 s"]


def test_health_tells_what_is_wrong_while_requests_are_served() -> None:
    service, metrics = ScriptedService(), Metrics("tiny")
    with serving(create_app(service, FrontSettings(), metrics)) as url:
        assert httpx.get(f"{url}/health").json() == {
            "status": "ok",
            "live": True,
            "ready": True,
            "why": [],
            "model_fingerprint": "",
        }
        metrics.observe("router", LOST, service.now_s())
        metrics.journal_dropped()
        degraded = httpx.get(f"{url}/health")
        assert degraded.status_code == 200 and degraded.json()["status"] == "degraded"
        gone, journal = degraded.json()["why"]
        assert gone.startswith("decode-0 is gone for ") and journal == "the journal of --record_dir takes no more"
        service.ready = False
        unready = httpx.get(f"{url}/health")
        assert unready.status_code == 503 and unready.json()["status"] == "unready" and not unready.json()["ready"]
        service.draining = True
        assert httpx.get(f"{url}/health").json()["status"] == "draining"
