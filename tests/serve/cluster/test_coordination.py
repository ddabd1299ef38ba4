"""The lease of every backend: one leader, growing terms, and what leaders and services do when they fail."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.cluster.coordination import (
    CoordinationError,
    InProcessLease,
    KubernetesLease,
    RedisLease,
    RouterAddress,
    open_lease,
)
from jdisagg.serve.cluster.router_process import roles_of
from tests.kv.tiers.valkey import Valkey
from tests.serve.cluster.coordination_services import SERVICES, CoordinationService, FakeKubernetes, lease_at
from tests.serve.cluster.processes import until

TTL_S = 2.0  # an etcd gives no shorter one
WITHIN_S = 60.0
ADDRESS = {name: str(RouterAddress("127.0.0.1", port)) for name, port in (("one", 1), ("two", 2), ("three", 3))}
Start = Callable[[str], "Contender"]


class Contender:
    """A process that competes for the lease; `acts` are the times and terms of what it did as leader."""

    def __init__(self, spec: str, name: str, folder: Path) -> None:
        self._path = folder / f"acts-{name}"
        self._path.touch()
        command = [sys.executable, "-m", "tests.serve.cluster.contender", spec, ADDRESS[name], str(TTL_S)]
        self.process = subprocess.Popen([*command, str(self._path)], stdout=subprocess.PIPE, text=True)

    @property
    def acts(self) -> list[tuple[float, int]]:
        whole = [line.split() for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [(float(at_s), int(term)) for at_s, term in whole]

    @property
    def is_acting(self) -> bool:
        return bool(self.acts) and self.acts[-1][0] > time.monotonic() - 0.5

    def await_acts(self) -> int:
        """Returns the term with which it acts, once it does."""
        until(lambda: self.is_acting, "the contender to lead", WITHIN_S)
        return self.acts[-1][1]

    def await_end(self) -> str:
        return self.process.communicate(timeout=WITHIN_S)[0]


@pytest.fixture(params=SERVICES)
def service(request, tmp_path) -> Iterator[CoordinationService]:
    made = SERVICES[request.param](tmp_path)
    yield made
    made.kill()


@pytest.fixture
def start(service, tmp_path) -> Iterator[Start]:
    started: list[Contender] = []

    def begin(name: str) -> Contender:
        started.append(Contender(service.spec, name, tmp_path))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


def assert_one_led_at_a_time(*contenders: Contender) -> None:
    """Asserts that the acts of a term all lie before those of the next one, and that no term has two leaders."""
    spans: dict[int, list[float]] = {}
    for contender in contenders:
        terms = {term for _, term in contender.acts}
        assert not terms & spans.keys(), "a term has two leaders"
        spans |= {term: [at_s for at_s, each in contender.acts if each == term] for term in terms}
    ordered = sorted(spans)
    for earlier, later in pairwise(ordered):
        assert max(spans[earlier]) < min(spans[later]), f"terms {earlier} and {later} overlap"


def hold_until_given(lease, above: int = 0) -> int:
    return until(lambda: lease.hold(above), "the lease", WITHIN_S)


def test_one_holds_the_lease_and_the_next_term_is_higher_and_above_what_workers_report(service):
    one, two = (lease_at(service.spec, ADDRESS[name], TTL_S) for name in ("one", "two"))
    worker = lease_at(service.spec, "", TTL_S)
    term = hold_until_given(one)
    assert one.hold() == term and two.hold() is None, "it is renewed, and another is refused"
    assert one.leader() == two.leader() == worker.leader() == (ADDRESS["one"], term)
    raised = hold_until_given(one, above=term + 40)
    assert raised == term + 41 and one.hold() == raised and two.hold(above=99) is None
    two.release()
    assert worker.leader() == (ADDRESS["one"], raised), "a standby releases nothing"
    one.release()
    assert worker.leader() is None
    assert hold_until_given(two) > raised and worker.leader() == (ADDRESS["two"], two.hold())
    assert one.hold() is None


def test_an_emptied_service_keeps_others_waiting_and_gives_the_leader_its_next_term(service):
    one, two = (lease_at(service.spec, ADDRESS[name], TTL_S) for name in ("one", "two"))
    term = hold_until_given(one)
    service.empty()
    assert two.hold() is None, "the leader of before may lead for one TTL more"
    assert two.leader() is None
    assert one.hold() == term + 1 and two.hold() is None
    service.empty()
    assert one.hold() == term + 2
    service.empty()
    assert two.hold() is None
    began_s = time.monotonic()
    hold_until_given(two)
    assert time.monotonic() - began_s > 0.9 * TTL_S, "it waits one TTL"


def test_a_service_is_as_good_as_another_after_a_term_of_two_to_the_thirty(service):
    lease = lease_at(service.spec, ADDRESS["one"], TTL_S)
    hold_until_given(lease)
    assert lease.hold(above=1 << 30) == (1 << 30) + 1


@pytest.mark.slow
def test_after_kill_9_of_the_leader_a_standby_leads_with_a_higher_term(start: Start):
    one = start("one")
    one.await_acts()
    standbys = [start("two"), start("three")]
    time.sleep(2 * TTL_S)
    assert one.is_acting and not any(each.acts for each in standbys), "standbys wait while it is renewed"
    one.process.kill()
    until(lambda: any(each.is_acting for each in standbys), "a standby to lead", WITHIN_S)
    time.sleep(TTL_S)
    assert sum(bool(each.acts) for each in standbys) == 1
    assert_one_led_at_a_time(one, *standbys)


@pytest.mark.slow
def test_a_leader_that_is_stopped_past_its_lease_does_nothing_when_it_goes_on(start: Start):
    one = start("one")
    one.await_acts()
    two = start("two")
    time.sleep(TTL_S / 2)
    one.process.send_signal(signal.SIGSTOP)
    num_acts = len(one.acts)
    two.await_acts()
    one.process.send_signal(signal.SIGCONT)
    assert "stepped down" in one.await_end()
    assert len(one.acts) == num_acts, "it acted after another led"
    assert two.is_acting
    assert_one_led_at_a_time(one, two)


@pytest.mark.slow
def test_a_service_that_is_restarted_within_the_lease_costs_no_leader(start: Start, service):
    one = start("one")
    term = one.await_acts()
    service.kill()
    service.start()
    time.sleep(2 * TTL_S)
    assert one.is_acting and {each for _, each in one.acts} == {term}


@pytest.mark.slow
def test_a_service_that_is_emptied_leaves_one_leader_with_a_higher_term(start: Start, service):
    one = start("one")
    term = one.await_acts()
    two = start("two")
    time.sleep(TTL_S)
    service.empty()
    time.sleep(2 * TTL_S)
    until(lambda: one.is_acting or two.is_acting, "a leader", WITHIN_S)
    if two.acts:  # the service had forgotten the old term, and a worker would report it
        one.await_end()
        (end_s, _), (begin_s, _) = one.acts[-1], two.acts[0]
        assert end_s < begin_s, "two led at once"
    else:
        assert one.acts[-1][1] > term


@pytest.mark.slow
def test_a_service_that_is_gone_ends_the_leader_before_its_lease_would_and_is_led_again_when_it_is_back(
    start: Start, service
):
    one = start("one")
    one.await_acts()
    service.kill()
    gone_s = time.monotonic()
    assert "was not renewed" in one.await_end()
    assert one.acts[-1][0] < gone_s + TTL_S
    service.start()
    two = start("two")
    assert two.await_acts() > one.acts[-1][1]
    assert_one_led_at_a_time(one, two)


def test_who_asks_a_service_that_is_gone_is_told_where_it_was(service):
    lease = lease_at(service.spec, ADDRESS["one"], TTL_S)
    hold_until_given(lease)
    service.kill()
    for ask in (lease.hold, lease.leader):
        with pytest.raises(CoordinationError, match=r"127\.0\.0\.1:\d+"):
            ask()
    service.start()


def test_routers_that_write_at_once_are_told_apart_by_409(tmp_path):
    api = FakeKubernetes(tmp_path)
    clock_s = 0.0
    one, two = (
        KubernetesLease("", ADDRESS[name], TTL_S, api.spec.split()[1], tmp_path, lambda: clock_s)
        for name in ("one", "two")
    )
    assert one.hold() is None and two.hold() is None, "a new object belongs to no router for one TTL"
    record = two._read()
    assert one.hold() is None
    clock_s = TTL_S + 1
    term = one.hold()
    assert term == 1 and record is not None
    assert not two._write(record, "two", 9) and api.conflicts == 1, "the object has changed since it was read"
    assert two.leader() == (ADDRESS["one"], term)
    (found,) = api.objects.values()
    assert found["metadata"]["namespace"] == "serving" and found["spec"]["leaseTransitions"] == term
    (tmp_path / "token").write_text("another")
    with pytest.raises(CoordinationError, match="401: Unauthorized"):
        one.hold()
    api.kill()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_redis_that_evicts_is_refused_by_name(policy: str):
    with Valkey(policy=policy) as server:
        lease = RedisLease(server.url, ADDRESS["one"], TTL_S)
        with pytest.raises(ConfigError, match=rf"maxmemory-policy {policy}, .*must be noeviction"):
            lease.hold()


def test_in_process_the_router_always_leads_and_a_later_start_has_a_higher_term():
    earlier, later = (InProcessLease("a:1/2/3", clock=lambda at_s=at_s: at_s) for at_s in (1.8e9, 1.8e9 + 1))
    term, again = earlier.hold(), later.hold()
    assert term is not None and again == term + 1
    assert earlier.leader() == ("a:1/2/3", term) and earlier.hold(above=term + 5) == term + 6
    earlier.release()
    assert earlier.hold() == term + 6


@pytest.mark.parametrize(
    "wrong", ["zookeeper://a:1", "redis", "etcd://", "etcd://host", "kubernetes:a", "kubernetes:a/b/c"]
)
def test_what_is_no_service_is_refused_with_the_forms_there_are(wrong: str):
    with pytest.raises(ConfigError, match=f"--coordination={wrong}.* must "):
        open_lease(wrong, "", TTL_S)


def test_kubernetes_outside_a_pod_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"service account in .*No such file"):
        KubernetesLease("", "", TTL_S, folder=tmp_path)


ETCD = "etcd://127.0.0.1:2379"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"role": "decode", "router": "a:1,b:2"}, "--router=a:1,b:2 names several routers.*--coordination="),
        ({"role": "router", "router": "a:1,b:2"}, "--router=a:1,b:2 names several routers.*--coordination="),
        ({"role": "router", "router": "a:1"}, "--router=a:1 is for workers and fronts"),
        ({"role": "decode", "router": "a:1", "coordination": ETCD}, "both say where the router is"),
        ({"role": "decode"}, "needs --router=HOST:PORT.*or --coordination"),
        ({"role": "router", "coordination": ETCD, "host": "0.0.0.0"}, "--control_advertise=HOST"),
        ({"role": "all", "coordination": ETCD}, "--role=all is one process"),
        ({"role": "router", "coordination": ETCD, "control_port": 0}, "--control_port=0 with .* choose one"),
    ],
)
def test_processes_that_could_not_find_the_router_are_refused_in_one_line(given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says) as raised:
        settings = Settings(**given)
        settings.check()
        roles_of(settings)
    assert "\n" not in str(raised.value)


def test_a_worker_with_a_service_needs_no_router():
    assert roles_of(Settings(role="decode", coordination=ETCD)) == {"decode"}
    assert "router" in roles_of(
        Settings(role="router", coordination=ETCD, host="0.0.0.0", control_advertise="10.0.0.1")
    )
