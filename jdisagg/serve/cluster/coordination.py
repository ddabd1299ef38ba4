"""The leader lease: which of several routers leads, and at what address, decided by an existing service.

`--coordination=` names the service: empty is this process alone, `redis://` and `rediss://` a Redis or Valkey,
`etcd://` an etcd by its HTTP gateway, `kubernetes` a Lease of the cluster's API server.

Every backend keeps two things: a record (holder, address, term) that ends when it is not renewed, and the last term.
A service that has no last term was emptied, or is new. A router that holds no lease then writes a record without a
holder and waits one TTL, because the router that led before the loss may lead for that long by its own clock. That
router alone may take the record at once.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from jdisagg.core.errors import ConfigError, JdisaggError

MAX_TERM = 1 << 31  # exclusive; a Kubernetes Lease counts its transitions in 32 bits
FIRST_SECOND = 1_735_689_600.0  # 2025-01-01, from which in-process terms count seconds
FORMS = "redis://HOST:PORT/0, rediss://, etcd://HOST:PORT, kubernetes or kubernetes:NAMESPACE/NAME"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SERVER = "https://kubernetes.default.svc"
ADDRESS_ANNOTATION = "jdisagg/router-address"
MAX_REPLY_BYTES = 1 << 20
SHORTEST_TIMEOUT_S = 0.2


class CoordinationError(JdisaggError):
    """The coordination service cannot be reached, or its reply cannot be read."""


class Lease(Protocol):
    """The leader lease of one deployment. Methods raise CoordinationError, or ConfigError for an unfit service."""

    def hold(self, above: int = 0) -> int | None:
        """Takes or renews the lease. Returns its term, which exceeds `above`; None while another router leads."""

    def leader(self) -> tuple[str, int] | None:
        """Returns the address and the term of the router that leads; None without a leader."""

    def release(self) -> None:
        """Releases the lease, if this router holds it, so that another may lead at once."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """A router as the lease's record names it: its host, and its ports for workers and clients."""

    host: str
    control_port: int
    http_port: int = -1
    grpc_port: int = -1

    @property
    def control(self) -> str:
        return f"{self.host}:{self.control_port}"

    def __str__(self) -> str:
        return f"{self.control}/{self.http_port}/{self.grpc_port}"

    @staticmethod
    def parse(text: str) -> RouterAddress:
        """Reads what `str` wrote. Raises CoordinationError."""
        try:
            control, http_port, grpc_port = text.split("/")
            host, _, port = control.rpartition(":")
            return RouterAddress(host, int(port), int(http_port), int(grpc_port))
        except ValueError:
            raise CoordinationError(f"the lease names the router {text[:80]!r}, expected HOST:PORT/HTTP/GRPC") from None


class InProcessLease:
    """The lease of a single router: it always leads, and every start has a higher term, by the clock."""

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        self._address = address
        self._term = max(1, int(clock() - FIRST_SECOND))

    def hold(self, above: int = 0) -> int | None:
        self._term = max(self._term, above + 1)
        return self._term

    def leader(self) -> tuple[str, int] | None:
        return self._address, self._term

    def release(self) -> None:
        """Does nothing: no other router waits for the lease."""


# KEYS: record, last term. ARGV: holder, address, TTL in ms, above, the term that the caller holds by its clock or 0.
_REDIS_HOLD = """
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder == '' and ARGV[5] ~= '0' then holder = false end
if holder and holder ~= ARGV[1] then return 0 end
local above = tonumber(ARGV[4])
local last = redis.call('GET', KEYS[2])
if not last and ARGV[5] == '0' then
  redis.call('SET', KEYS[2], above)
  redis.call('HSET', KEYS[1], 'holder', '')
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return 0
end
local term = tonumber(holder and redis.call('HGET', KEYS[1], 'term') or '0')
if not holder then above = math.max(above, tonumber(ARGV[5])) end
if term <= above then
  if tonumber(last or '0') < above then redis.call('SET', KEYS[2], above) end
  term = redis.call('INCR', KEYS[2])
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'address', ARGV[2], 'term', term)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return term
"""
_REDIS_RELEASE = "if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class RedisLease:
    """The lease in a Redis or Valkey that evicts nothing; scripts make each change atomic."""

    def __init__(self, url: str, address: str, ttl_s: float) -> None:
        """Connects at the first call. Raises ConfigError for a wrong URL or without the package."""
        try:
            self._redis: Any = importlib.import_module("redis")
        except ImportError as error:
            raise ConfigError(
                f'--coordination={_without_password(url)} needs redis-py: pip install "redis[hiredis]"'
            ) from error
        plain, _, name = url.partition("#")
        self._url, self._address, self._ttl_ms = plain, address, max(1, round(1000 * ttl_s))
        self._holder, self._term, self._is_checked = secrets.token_hex(8), 0, False
        self._keys = [f"jdisagg:{{{name or 'router'}}}:{each}" for each in ("leader", "term")]
        timeout_s = _timeout_s(ttl_s)
        retry, backoff = (importlib.import_module(f"redis.{each}") for each in ("retry", "backoff"))
        once_more = retry.Retry(backoff.NoBackoff(), 1, supported_errors=(self._redis.ConnectionError,))
        try:
            self._client = self._redis.Redis.from_url(
                plain,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                decode_responses=True,
                retry=once_more,
            )
        except ValueError as error:
            raise ConfigError(f"--coordination={_without_password(url)}: {error}; must be {FORMS}") from error
        self._hold_script = self._client.register_script(_REDIS_HOLD)
        self._release_script = self._client.register_script(_REDIS_RELEASE)

    def hold(self, above: int = 0) -> int | None:
        arguments = [self._holder, self._address, self._ttl_ms, above, self._term]
        self._term = _checked_term(self._call(lambda: self._hold_script(self._keys, arguments)))
        return self._term or None

    def leader(self) -> tuple[str, int] | None:
        record = self._call(lambda: self._client.hgetall(self._keys[0]))
        return (record["address"], _checked_term(record["term"])) if record.get("address") else None

    def release(self) -> None:
        self._term = 0
        self._call(lambda: self._release_script(self._keys[:1], [self._holder]))

    def _call(self, command: Callable[[], Any]) -> Any:
        """Returns the reply. Raises CoordinationError, and ConfigError if the server may evict the lease."""
        try:
            if not self._is_checked:
                policy = self._client.info("memory").get("maxmemory_policy", "noeviction")
                if policy != "noeviction":
                    raise ConfigError(
                        f"--coordination={_without_password(self._url)} has maxmemory-policy {policy}, which may evict"
                        " the lease, must be noeviction: set it, or name another server"
                    )
                self._is_checked = True
            return command()
        except (self._redis.RedisError, OSError) as error:
            self._is_checked = False
            where = _without_password(self._url)
            raise CoordinationError(f"{where}: {type(error).__name__}: {str(error)[:200]}") from error


class EtcdLease:
    """The lease in an etcd, by the HTTP gateway of its v3 interface. The record belongs to an etcd lease."""

    def __init__(self, url: str, address: str, ttl_s: float) -> None:
        """Connects at the first call. Raises ConfigError for a wrong URL."""
        parts = urlsplit(url)
        self._endpoints = [each for each in parts.netloc.split(",") if each]
        if not all(each.rpartition(":")[2].isdigit() and ":" in each for each in self._endpoints or [""]):
            raise ConfigError(f"--coordination={url} must name etcd as etcd://HOST:PORT[,HOST:PORT][/NAME]")
        self._prefix = f"jdisagg/{parts.path.strip('/') or 'router'}"
        self._address, self._ttl_s, self._timeout_s = address, ttl_s, _timeout_s(ttl_s)
        self._holder, self._term, self._lease_id = secrets.token_hex(8), 0, ""

    def hold(self, above: int = 0) -> int | None:
        record, last = self._read()
        is_ours = record is not None and record["holder"] == self._holder
        if record is not None and not is_ours and (record["holder"] or not self._term):
            self._term = 0
        elif last is None and not self._term:
            self._write(None, None, "", above)
        elif is_ours and record is not None and record["term"] > above:
            renewed = self._ask("lease/keepalive", {"ID": self._lease_id}).get("result", {})
            self._term = record["term"] if int(renewed.get("TTL", 0)) > 0 else 0
        else:
            term = _checked_term(1 + max(above, last or 0, self._term))
            self._term = term if self._write(record, last, self._holder, term) else 0
        return self._term or None

    def leader(self) -> tuple[str, int] | None:
        record, _ = self._read()
        return (record["address"], record["term"]) if record is not None and record["holder"] else None

    def release(self) -> None:
        if self._term:
            self._term = 0
            self._ask("lease/revoke", {"ID": self._lease_id})

    def _read(self) -> tuple[dict[str, Any] | None, int | None]:
        """Returns the record and the last term, both of one revision."""
        ranges = [{"requestRange": {"key": self._key(name)}} for name in ("leader", "term")]
        replies = self._ask("kv/txn", {"success": ranges}).get("responses", [{}, {}])
        found = [each.get("response_range", {}).get("kvs", []) for each in replies]
        leader, term = (base64.b64decode(each[0]["value"]).decode() if each else "" for each in found)
        try:
            record = json.loads(leader) if leader else None
            if record is not None:
                record = {"holder": str(record["holder"]), "address": str(record["address"]), "text": leader,
                          "term": _checked_term(record["term"])}  # fmt: skip
            return record, _checked_term(term) if term else None
        except (ValueError, KeyError, TypeError) as error:
            raise CoordinationError(f"etcd's record {self._prefix}/leader cannot be read: {error!r}") from error

    def _write(self, record: dict[str, Any] | None, last: int | None, holder: str, term: int) -> bool:
        """Writes the record and the last term if both are unchanged since they were read. Returns True if they were."""
        if record is None or record["holder"] != self._holder:
            granted = self._ask("lease/grant", {"TTL": str(math.ceil(self._ttl_s))})
            lease_id = str(granted["ID"])
        else:
            lease_id = self._lease_id
        text = json.dumps({"holder": holder, "address": self._address if holder else "", "term": term})
        unchanged = [
            self._compare("leader", None if record is None else record["text"]),
            self._compare("term", None if last is None else str(last)),
        ]
        puts = [
            {"requestPut": {"key": self._key("leader"), "value": _encoded(text), "lease": lease_id}},
            {"requestPut": {"key": self._key("term"), "value": _encoded(str(term))}},
        ]
        if not self._ask("kv/txn", {"compare": unchanged, "success": puts}).get("succeeded"):
            return False
        self._lease_id = lease_id
        return True

    def _compare(self, name: str, text: str | None) -> dict[str, Any]:
        if text is None:
            return {"key": self._key(name), "target": "CREATE", "create_revision": "0"}
        return {"key": self._key(name), "target": "VALUE", "value": _encoded(text)}

    def _key(self, name: str) -> str:
        return _encoded(f"{self._prefix}/{name}")

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply of the first endpoint that has one. Raises CoordinationError."""
        error: JdisaggError | None = None
        for endpoint in list(self._endpoints):
            try:
                status, reply = _request("POST", f"http://{endpoint}/v3/{path}", body, timeout_s=self._timeout_s)
                if status == 200:
                    return reply
                error = CoordinationError(f"etcd at {endpoint} answers {path} with {status}: {str(reply)[:200]}")
            except CoordinationError as failed:
                error = failed
            self._endpoints.append(self._endpoints.pop(0))  # the next call begins with another
        raise error or CoordinationError("etcd has no endpoint")


class KubernetesLease:
    """The lease as a Lease object of Kubernetes, by REST; a concurrent change is refused by the API server (409).

    A record counts as expired when it has not changed for its duration on this process's clock, so clocks of machines
    are never compared.
    """

    def __init__(
        self,
        names: str,
        address: str,
        ttl_s: float,
        server: str = API_SERVER,
        folder: Path = SERVICE_ACCOUNT,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`names` is NAMESPACE/NAME, or empty. Raises ConfigError outside a pod with a service account."""
        namespace, _, name = names.partition("/")
        if bool(namespace) != bool(name) or "/" in name:
            raise ConfigError(f"--coordination=kubernetes:{names} must be kubernetes, or kubernetes:NAMESPACE/NAME")
        try:
            namespace = namespace or (folder / "namespace").read_text().strip()
            (folder / "token").read_text()
            is_https = server.startswith("https:")
            self._tls = ssl.create_default_context(cafile=str(folder / "ca.crt")) if is_https else None
        except OSError as error:
            raise ConfigError(
                f"--coordination=kubernetes reads the service account in {folder}: {error.strerror or error}; run in a"
                " pod with a service account that may get, create and update leases"
            ) from error
        self._folder, self._address, self._ttl_s = folder, address, ttl_s
        self._objects = f"{server}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._clock, self._timeout_s = name or "jdisagg-router", clock or lease_clock_s, _timeout_s(ttl_s)
        self._holder, self._term = secrets.token_hex(8), 0
        self._seen: tuple[str, float] = "", 0.0  # the version of the record, and when it was first seen

    def hold(self, above: int = 0) -> int | None:
        record = self._read()
        spec = {} if record is None else record["spec"]
        holder, last = spec.get("holderIdentity") or "", int(spec.get("leaseTransitions") or 0)
        if record is None and not self._term:
            self._write(None, "", above)
        elif holder == self._holder and last > above:
            self._term = last if self._write(record, self._holder, last) else 0
        elif holder == self._holder or (self._term and not holder) or record is None or self._is_expired(spec):
            term = _checked_term(1 + max(above, last, self._term))
            self._term = term if self._write(record, self._holder, term) else 0
        else:
            self._term = 0
        return self._term or None

    def leader(self) -> tuple[str, int] | None:
        record = self._read()
        if record is None or not record["spec"].get("holderIdentity") or self._is_expired(record["spec"]):
            return None
        address = (record["metadata"].get("annotations") or {}).get(ADDRESS_ANNOTATION, "")
        return address, _checked_term(record["spec"].get("leaseTransitions"))

    def release(self) -> None:
        record = self._read() if self._term else None
        self._term = 0
        if record is not None and record["spec"].get("holderIdentity") == self._holder:
            self._write(record, "", int(record["spec"]["leaseTransitions"]), duration_s=1)

    def _is_expired(self, spec: dict[str, Any]) -> bool:
        return self._clock() >= self._seen[1] + int(spec.get("leaseDurationSeconds") or 0)

    def _read(self) -> dict[str, Any] | None:
        status, record = self._ask("GET", f"/{self._name}")
        if status == 404:
            return None
        if status != 200 or not isinstance(record.get("spec"), dict):
            raise CoordinationError(self._refusal("get", status, record))
        version = record["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, self._clock()
        return record

    def _write(self, record: dict[str, Any] | None, holder: str, term: int, duration_s: int = 0) -> bool:
        """Writes the object if it is unchanged since it was read. Returns False if another process changed it."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = {} if record is None else record["spec"]
        is_same = bool(holder) and old.get("holderIdentity") == holder and old.get("leaseTransitions") == term
        spec = {
            "leaseDurationSeconds": duration_s or math.ceil(self._ttl_s),
            "leaseTransitions": term,
            "renewTime": now,
            "acquireTime": old.get("acquireTime", now) if is_same else now,
        }
        annotations = {ADDRESS_ANNOTATION: self._address if holder else ""}
        document = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "annotations": annotations},
            "spec": spec | ({"holderIdentity": holder} if holder else {}),
        }
        if record is None:
            status, reply = self._ask("POST", "", document)
        else:
            metadata = record["metadata"]
            document["metadata"] = metadata | {"annotations": (metadata.get("annotations") or {}) | annotations}
            status, reply = self._ask("PUT", f"/{self._name}", document)
        if status in (404, 409):
            return False
        if status not in (200, 201):
            raise CoordinationError(self._refusal("create" if record is None else "update", status, reply))
        return True

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        token = (self._folder / "token").read_text().strip()  # Kubernetes renews it while the pod runs
        headers = {"authorization": f"Bearer {token}"}
        return _request(method, self._objects + path, body, headers, self._timeout_s, self._tls)

    def _refusal(self, verb: str, status: int, reply: dict[str, Any]) -> str:
        return f"Kubernetes answers {verb} of {self._objects}/{self._name} with {status}: {reply.get('message', '')}"


def open_lease(coordination: str, address: str, ttl_s: float) -> Lease:
    """Returns the lease that `--coordination` names; `address` is this router's. Raises ConfigError."""
    scheme = coordination.partition(":")[0]
    if not coordination:
        return InProcessLease(address)
    if scheme in ("redis", "rediss") and "://" in coordination:
        return RedisLease(coordination, address, ttl_s)
    if scheme == "etcd" and "://" in coordination:
        return EtcdLease(coordination, address, ttl_s)
    if scheme == "kubernetes" and "://" not in coordination:
        return KubernetesLease(coordination.partition(":")[2], address, ttl_s)
    raise ConfigError(f"--coordination={coordination} must be {FORMS}, or empty for one router")


def lease_clock_s() -> float:
    """Returns seconds of a clock that runs while the machine is suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _timeout_s(ttl_s: float) -> float:
    return max(SHORTEST_TIMEOUT_S, ttl_s / 5)


def _checked_term(value: Any) -> int:
    """Returns the term. Raises CoordinationError for one that is no term."""
    try:
        term = int(value)
    except (TypeError, ValueError):
        term = -1
    if not 0 <= term < MAX_TERM:
        raise CoordinationError(f"the lease has the term {str(value)[:40]}, must lie in [0, {MAX_TERM - 1}]")
    return term


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _request(
    method: str,
    url: str,
    body: dict[str, Any] | None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 1.0,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, Any]]:
    """Returns the status and the JSON object of a reply or an HTTP error. Raises CoordinationError without a reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    if tls is not None:
        opener.add_handler(urllib.request.HTTPSHandler(context=tls))
    try:
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                status, text = answer.status, answer.read(MAX_REPLY_BYTES)
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read(MAX_REPLY_BYTES)
        reply = json.loads(text or b"{}")
    except (OSError, ValueError) as error:
        raise CoordinationError(f"{url}: {type(error).__name__}: {str(error)[:200]}") from error
    return status, reply if isinstance(reply, dict) else {"message": str(reply)[:200]}
