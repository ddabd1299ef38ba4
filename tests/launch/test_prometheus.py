"""The dashboard and the alert rules, held to the metrics that there are and to a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from docs.generate import dashboard
from docs.generate.alerts_table import RULES, rules
from jdisagg.policy.scaling import RoleScaler, Scaling
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.ports import free_port
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import toy_stack

LAUNCH = Path(__file__).parents[2] / "launch"
NAMES = re.compile(r"jdisagg_\w+")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus on this machine")
QUIET = "rejects|limited|preemptions|resent|failures|nan_logits|journal|cut|lag|http_connections"  # not fed here


def drawn_queries() -> list[str]:
    """As Grafana would ask them."""
    return [query.replace("$__rate_interval", "5s") for query in dashboard.queries()]


def exported() -> set[str]:
    """Every name that a query may use."""
    with toy_stack() as stack:
        stack.metrics.watch_scaling(RoleScaler(Scaling(), [each.config for each in stack.workers.values()]))
        families = text_string_to_metric_families(stack.metrics.render().decode())
        found: set[str] = set()
        for family in families:
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            found |= {family.name + suffix for suffix in suffixes}
        return found


def test_every_query_asks_for_metrics_that_are_exported() -> None:
    there = exported() | {"jdisagg_http_connections", "jdisagg_http_connections_cut_total"}
    asked = {name for query in [*drawn_queries(), *(rule["expr"] for rule in rules())] for name in NAMES.findall(query)}
    assert asked - there == set()


def test_no_two_panels_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells


def test_every_alert_says_what_is_wrong_and_why() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"] and rule["annotations"]["why"]
        assert rule["labels"]["severity"] in ("page", "ticket")


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """One that asks `target` every half second, and knows our rules; a client of its API."""
    config = yaml.safe_load((LAUNCH / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
                eventually(lambda: answers(client))
                yield client
        finally:
            process.terminate()


def answers(client: httpx.Client) -> bool:
    try:
        return bool(found(client, "up == 1"))
    except httpx.TransportError:
        return False


def found(client: httpx.Client, query: str) -> list[Any]:
    """The result of a query that must be one."""
    answer = client.get("/query", params={"query": query})
    if answer.status_code == 503:  # it is starting
        return []
    assert answer.status_code == 200, (query, answer.text)
    return answer.json()["data"]["result"]


def load(url: str, until: Callable[[], bool]) -> None:
    """Asks again and again for at most a minute."""
    end_s = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end_s, "Prometheus has not seen the load"
        body = {"prompt": [5, 6, 7] * 9, "max_tokens": 9, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        time.sleep(0.05)


@needs_prometheus
def test_every_query_of_the_dashboard_draws_something_from_a_real_prometheus(tmp_path: Path) -> None:
    fed = [query for query in drawn_queries() if not re.search(QUIET, query)]
    with (
        toy_stack() as stack,
        serving(create_app(stack.service, FrontSettings(), stack.metrics)) as url,
        prometheus(tmp_path, url.removeprefix("http://")) as client,
    ):
        load(url, lambda: all(found(client, query) for query in fed))
        for query in drawn_queries():
            found(client, query)  # those that nothing feeds here are at least understood


@needs_prometheus
def test_prometheus_takes_every_rule_and_pages_when_the_router_is_gone(tmp_path: Path) -> None:
    with toy_stack() as stack, ExitStack() as server:
        url = server.enter_context(serving(create_app(stack.service, FrontSettings(), stack.metrics)))
        with prometheus(tmp_path, url.removeprefix("http://")) as client:
            eventually(lambda: all(health == "ok" for health in healths(client).values()))
            assert len(healths(client)) == len(rules()) and firing(client) == set()
            server.close()
            eventually(lambda: "JdisaggDown" in firing(client))


def healths(client: httpx.Client) -> dict[str, str]:
    groups = client.get("/rules").json()["data"]["groups"]
    return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


def firing(client: httpx.Client) -> set[str]:
    """Alerts that are pending or fire."""
    return {alert["labels"]["alertname"] for alert in client.get("/alerts").json()["data"]["alerts"]}
