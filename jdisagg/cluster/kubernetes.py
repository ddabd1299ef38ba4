"""Manifests of a job: the router, and its workers by a LeaderWorkerSet a role, a DisaggregatedSet or JobSets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jdisagg.cluster.job import Job, Part
from jdisagg.cluster.pods import Document, labels, router_pod, told_by, worker_pod

EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"
JOBSET_NAMES = {  # what `jdisagg.cluster.membership` reads -> JobSet's annotation of a pod
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
}
LWS_NAMES = {  # what `jdisagg.labels` reads beside what LeaderWorkerSets say -> their label of a pod
    "LWS_NAME": "leaderworkerset.sigs.k8s.io/name",
    "LWS_GROUP_INDEX": "leaderworkerset.sigs.k8s.io/group-index",
}
MAX_RESTARTS = 1000
Selectors = Callable[[Part], Mapping[str, str]]


def anywhere(part: Part) -> Mapping[str, str]:
    """No node is preferred to another."""
    return {}


def router(job: Job) -> list[Document]:
    """Its Deployment, the Service of clients, that of workers, and what must not be evicted."""
    selector = labels(job, "router")
    ports = {"http": job.settings.http_port, "grpc": job.settings.grpc_port}
    deployment = _kind("apps/v1", "Deployment", f"{job.name}-router", selector) | {
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # two at once would each take the other's workers
            "selector": {"matchLabels": selector},
            "template": router_pod(job),
        }
    }
    front = _service(job.name, selector, {name: port for name, port in ports.items() if port > 0})
    control = _service(f"{job.name}-router", selector, {"control": job.settings.control_port})
    control["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}  # ready once workers have come
    return [deployment, front, control, _budget(job, "router", {"minAvailable": 1})]


def leader_worker_sets(job: Job, selectors: Selectors = anywhere, exclusive: str = "") -> list[Document]:
    """One a role, and how many of its pods may be evicted at once. `exclusive`: a label that a group has for itself."""
    found: list[Document] = []
    for part in job.parts:
        document = _kind(
            "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", f"{job.name}-{part.role}", labels(job, part.role)
        )
        if exclusive and part.size > 1:
            document["metadata"]["annotations"] = {EXCLUSIVE: exclusive}
        found += [
            document | {"spec": _set(job, part, selectors(part))},
            _budget(job, part.role, {"maxUnavailable": part.size}),
        ]
    return found


def disaggregated_set(job: Job) -> list[Document]:
    """Prefill and decode as one, rolled out together."""
    roles = [{"name": part.role, "spec": _set(job, part, {})} for part in job.parts]
    document = _kind("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", job.name, labels(job, "workers"))
    budgets = [_budget(job, part.role, {"maxUnavailable": part.size}) for part in job.parts]
    return [document | {"spec": {"roles": roles}}, *budgets]


def job_sets(job: Job) -> list[Document]:
    """One a worker: a member that fails has its own worker's pods made anew, and nobody else's."""
    found: list[Document] = []
    for part in job.parts:
        for index in range(part.replicas):
            document = _kind(
                "jobset.x-k8s.io/v1alpha2", "JobSet", f"{job.name}-{part.role}-{index}", labels(job, part.role)
            )
            spec = {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": MAX_RESTARTS},
                "replicatedJobs": [_replicated(job, part)],
            }
            found.append(document | {"spec": spec})
        found.append(_budget(job, part.role, {"maxUnavailable": part.size}))
    return found


def _set(job: Job, part: Part, selector: Mapping[str, str]) -> Document:
    """The spec of a LeaderWorkerSet; where a group has members, its leader alone is asked whether it is well."""
    pods = {"workerTemplate": worker_pod(job, part, part.size == 1, selector)}
    if part.size > 1:
        pods["leaderTemplate"] = worker_pod(job, part, True, selector)
    for pod in pods.values():
        variables = pod["spec"]["containers"][0]["env"]
        variables += [told_by(name, f"metadata.labels['{label}']") for name, label in LWS_NAMES.items()]
    template: Document = {"size": part.size, "restartPolicy": "RecreateGroupOnPodRestart", **pods}
    rolling = {"maxUnavailable": 1, "maxSurge": 0}
    return {
        "replicas": part.replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": template,
    }


def _replicated(job: Job, part: Part) -> Document:
    pod = worker_pod(job, part, part.size == 1)
    container = pod["spec"]["containers"][0]
    for name, annotation in JOBSET_NAMES.items():
        container["env"].append(told_by(name, f"metadata.annotations['{annotation}']"))
    container["env"].append({"name": "NNODES", "value": str(part.size)})
    pod["spec"]["restartPolicy"] = "Never"
    counts = {"parallelism": part.size, "completions": part.size, "completionMode": "Indexed", "backoffLimit": 0}
    return {"name": "worker", "replicas": 1, "template": {"spec": {**counts, "template": pod}}}


def _kind(version: str, kind: str, name: str, labelled: Mapping[str, str]) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(labelled)}}


def _service(name: str, selector: Mapping[str, str], ports: Mapping[str, int]) -> Document:
    shown: list[dict[str, Any]] = [{"name": each, "port": port, "targetPort": each} for each, port in ports.items()]
    return _kind("v1", "Service", name, selector) | {"spec": {"selector": dict(selector), "ports": shown}}


def _budget(job: Job, component: str, bound: Mapping[str, int]) -> Document:
    selector = labels(job, component)
    document = _kind("policy/v1", "PodDisruptionBudget", f"{job.name}-{component}", selector)
    return document | {"spec": {**bound, "selector": {"matchLabels": selector}}}
