"""What is wrong with a manifest, strictly and offline: unknown keys count, and pods inside of other kinds as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

VERSION = kubernetes_validate.latest_version()


def _object(needed: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": needed.split(),
        "properties": properties,
    }


NUMBER, TEXT, ANY = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}, {"type": "object"}
COUNT = {"anyOf": [NUMBER, {"type": "string", "pattern": "^[0-9]+%$"}]}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = _object("name", name=NAME, labels=TEXTS, annotations=TEXTS, namespace=NAME)
# By the API's Go types: sigs.k8s.io/lws, api/leaderworkerset/v1 and api/disaggregatedset/v1.
LEADER_WORKER_SPEC = _object(
    "leaderWorkerTemplate",
    replicas=NUMBER,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=_object("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=_object(
        "type",
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_object("", partition=NUMBER, maxUnavailable=COUNT, maxSurge=COUNT),
    ),
    leaderWorkerTemplate=_object(
        "workerTemplate",
        leaderTemplate=ANY,
        workerTemplate=ANY,
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        subGroupPolicy=ANY,
    ),
)
ROLE = _object(
    "name spec",
    name=NAME,
    metadata=ANY,
    spec=LEADER_WORKER_SPEC,
    scaling=_object("mode", mode={"enum": ["Static", "External"]}),
)
TARGET = _object("name", name=NAME, apiVersion=TEXT, kind=TEXT)
SCALED_OBJECT_SPEC = _object(  # by KEDA's api/keda/v1alpha1
    "scaleTargetRef triggers",
    scaleTargetRef=TARGET,
    pollingInterval=NUMBER,
    cooldownPeriod=NUMBER,
    idleReplicaCount=NUMBER,
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    fallback=_object("failureThreshold replicas", failureThreshold=NUMBER, replicas=NUMBER),
    advanced=ANY,
    triggers={
        "type": "array",
        "minItems": 1,
        "items": _object(
            "type metadata",
            type={"const": "prometheus"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=_object(
                "serverAddress query threshold",
                serverAddress=TEXT,
                query=TEXT,
                threshold={"type": "string", "pattern": "^[0-9]+$"},
            ),
        ),
    },
)
CUSTOM = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SPEC,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT_SPEC,
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): _object(
        "roles", roles={"type": "array", "items": ROLE, "minItems": 2, "maxItems": 10}
    ),
}
DEVICE = _object(
    "capabilities",
    driver=TEXT,
    device_ids={"type": "array", "items": TEXT, "uniqueItems": True},
    capabilities={"type": "array", "items": TEXT},
)
WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PERIOD = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
SERVICE = _object(  # by the Compose Specification
    "image command",
    image=TEXT,
    build=_object("context", context=TEXT, dockerfile=TEXT),
    command=WORDS,
    network_mode={"enum": ["host", "bridge", "none"]},
    ipc={"enum": ["host", "private", "shareable"]},
    restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
    stop_grace_period=PERIOD,
    secrets={"type": "array", "items": TEXT},
    volumes={
        "type": "array",
        "items": {"anyOf": [TEXT, _object("type", type=TEXT, source=TEXT, target=TEXT, read_only={"type": "boolean"})]},
    },
    depends_on={
        "type": "object",
        "additionalProperties": _object(
            "condition", condition={"enum": ["service_started", "service_healthy", "service_completed_successfully"]}
        ),
    },
    healthcheck=_object("test", test=WORDS, interval=PERIOD, timeout=PERIOD, retries=NUMBER, start_period=PERIOD),
    deploy=_object("", resources=_object("", reservations=_object("", devices={"type": "array", "items": DEVICE}))),
)
COMPOSE = _object(
    "services",
    name=NAME,
    services={"type": "object", "additionalProperties": SERVICE, "minProperties": 1},
    volumes={"type": "object", "additionalProperties": _object("")},
    secrets={"type": "object", "additionalProperties": _object("file", file=TEXT)},
)


def by_schema(document: Any, schema: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'/'.join(map(str, each.path))}: {each.message[:120]}" for each in found]


def faults(document: dict[str, Any]) -> list[str]:
    """Of any document of a manifest; nothing where a server would take it whole."""
    kind = document["apiVersion"], document["kind"]
    if kind in CUSTOM:
        whole = _object(
            "apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=CUSTOM[kind]
        )
        return [*by_schema(document, whole), *(fault for pod in pods(document) for fault in of_pod(pod))]
    if document["kind"] == "JobSet":
        return of_job_set(document)
    return of_core(document)


def of_core(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:120]}"]
    return []


def of_pod(template: dict[str, Any]) -> list[str]:
    return of_core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "inner"}, "template": template})


def of_job_set(document: dict[str, Any]) -> list[str]:
    kept = JobsetV1alpha2JobSet.from_dict(document)
    assert kept is not None
    found = [f"{each}: no such key" for each in _dropped(document, kept.to_dict(), "")]
    for job in document["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": spec}
        found += of_core(inner)
    return found


def _dropped(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Keys that a model read over."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from _dropped(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (each, other) in enumerate(zip(given, kept, strict=True)):
            yield from _dropped(each, other, f"{path}[{index}]")


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """Pod templates anywhere in a document."""
    if isinstance(document, dict):
        if "containers" in document.get("spec", {}):
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)
