"""Coordination services for tests: a real Valkey, a real etcd, and an API server of Kubernetes written here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest

from jdisagg.serve.cluster.coordination import EtcdLease, KubernetesLease, Lease, RedisLease
from tests.kv.tiers.valkey import Valkey
from tests.ports import free_port

START_S = 60.0
LEASES = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([a-z-]+)/leases(?:/([a-z-]+))?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


class CoordinationService(Protocol):
    """A service that tests start, kill, empty and start again; `spec` names it to another process."""

    spec: str

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def empty(self) -> None: ...


class ValkeyService:
    """A Valkey that keeps its data over a restart."""

    def __init__(self, folder: Path) -> None:
        self._server = Valkey(policy="noeviction", keeps=("--dir", str(folder), "--appendonly", "yes"))
        self.spec, self.start, self.kill = self._server.url, self._server.start, self._server.kill

    def empty(self) -> None:
        self._server.client().flushall()


class EtcdService:
    """An etcd of one member, on free ports."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed: apt-get install etcd-server")
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._command = [program, f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={client}",
                         f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
                         f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]  # fmt: skip
        self._url, self.spec = client, client.replace("http", "etcd")
        self.start()

    def start(self) -> None:
        self._running = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            try:
                if b"true" in urllib.request.urlopen(f"{self._url}/health", timeout=1).read():
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"no etcd at {self._url} after {START_S} s")

    def kill(self) -> None:
        self._running.kill()
        self._running.wait(30)

    def empty(self) -> None:
        body = json.dumps({"key": "AA==", "range_end": "AA=="}).encode()  # all keys
        urllib.request.urlopen(f"{self._url}/v3/kv/deleterange", body, timeout=10).read()


class FakeKubernetes:
    """An API server with leases alone: resource versions, 409 for a stale one, and the checks of the real one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._port = folder, free_port()
        for name, text in (("namespace", "serving"), ("token", "a-token")):
            (folder / name).write_text(text)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.conflicts, self._version, self._lock = 0, 0, threading.Lock()
        self.spec = f"kubernetes http://127.0.0.1:{self._port} {folder}"
        self.start()

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), _answerer(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def kill(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def empty(self) -> None:
        with self._lock:
            self.objects.clear()

    def answer(self, method: str, path: str, token: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns status and object, as the API server would."""
        match = LEASES.fullmatch(path)
        if token != "Bearer a-token":
            return 401, {"message": "Unauthorized"}
        if match is None or (method == "POST") == bool(match[2]):
            return 404, {"message": "the server could not find the requested resource"}
        with self._lock:
            return self._change(method, (match[1], match[2] or body["metadata"]["name"]), body)

    def _change(self, method: str, key: tuple[str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        old = self.objects.get(key)
        if method == "GET":
            return (404, {"message": "not found"}) if old is None else (200, old)
        if wrong := _invalid(body):
            return 422, {"message": wrong}
        if (old is None) != (method == "POST"):
            self.conflicts += method == "POST"
            return (404, {"message": "not found"}) if old is None else (409, {"message": "already exists"})
        if old is not None and body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
            self.conflicts += 1
            return 409, {"message": "the object has been modified; please apply your changes to the latest version"}
        self._version += 1
        body["metadata"] |= {"resourceVersion": str(self._version), "namespace": key[0]}
        self.objects[key] = body
        return (201 if method == "POST" else 200), body


def _invalid(body: dict[str, Any]) -> str:
    """Returns what the API server's validation of a Lease would refuse."""
    spec = body.get("spec", {})
    wrong = [
        body.get("kind") != "Lease" or body.get("apiVersion") != "coordination.k8s.io/v1",
        set(spec) - {"holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime", "leaseTransitions"},
        spec.get("holderIdentity") == "",
        type(spec.get("leaseDurationSeconds")) is not int or spec["leaseDurationSeconds"] < 1,
        type(spec.get("leaseTransitions")) is not int or not 0 <= spec["leaseTransitions"] < 1 << 31,
        not all(MICRO_TIME.fullmatch(spec.get(name, "")) for name in ("acquireTime", "renewTime")),
    ]
    return f"Lease is invalid: {spec}" if any(wrong) else ""


def _answerer(api: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Answerer(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            text = self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}"
            token = self.headers.get("authorization", "")
            status, found = api.answer(self.command, self.path, token, json.loads(text))
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Writes nothing: a lease is renewed several times a second."""

    return Answerer


SERVICES = {"valkey": ValkeyService, "etcd": EtcdService, "kubernetes": FakeKubernetes}


def lease_at(spec: str, address: str, ttl_s: float) -> Lease:
    """Returns a lease of the service that `spec` names, in any process."""
    kind, *rest = spec.split()
    if kind == "kubernetes":
        return KubernetesLease("", address, ttl_s, rest[0], Path(rest[1]))
    return (EtcdLease if kind.startswith("etcd") else RedisLease)(spec, address, ttl_s)
