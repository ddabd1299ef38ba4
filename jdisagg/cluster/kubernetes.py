"""Manifests of a job: the router, and its workers by a LeaderWorkerSet a role, a DisaggregatedSet or JobSets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jdisagg.cluster.job import Job, Part
from jdisagg.cluster.pods import Document, front_pod, labels, router_pod, told_by, worker_pod
from jdisagg.cluster.scalers import DISAGGREGATED_SCALER, pod_autoscalers, scaled

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
    """A Deployment of each, the Service of clients, those of workers, and what must not be evicted; fronts, if any."""
    ports = {"http": job.settings.http_port, "grpc": job.settings.grpc_port}
    served = "front" if job.fronts else "router"
    clients = _service(job.name, labels(job, served), {name: port for name, port in ports.items() if port > 0})
    found = [each for index in range(job.routers) for each in _router(job, index)]
    return [found[0], clients, *found[1:], *(_fronts(job) if job.fronts else [])]


def _router(job: Job, index: int) -> list[Document]:
    name = job.router_names[index]
    component = name.removeprefix(f"{job.name}-")
    selector = labels(job, component)
    deployment = _deployment(name, selector, 1, {"type": "Recreate"}, router_pod(job, index))  # two would be rivals
    control = _service(name, selector, {"control": job.control_ports[index]})
    control["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}  # ready once workers have come
    return [deployment, control, _budget(job, component, {"minAvailable": 1})]


def _fronts(job: Job) -> list[Document]:
    """They hold no state: one more may stand beside those that are replaced."""
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    deployment = _deployment(f"{job.name}-front", labels(job, "front"), job.fronts, rolling, front_pod(job))
    return [deployment, _budget(job, "front", {"maxUnavailable": 1})]


def _deployment(
    name: str, selector: Mapping[str, str], replicas: int, strategy: Mapping[str, Any], pod: Document
) -> Document:
    spec = {"replicas": replicas, "strategy": strategy, "selector": {"matchLabels": dict(selector)}, "template": pod}
    return _kind("apps/v1", "Deployment", name, selector) | {"spec": spec}


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
    """Prefill and decode as one, rolled out together; with --autoscale, how many of each is its own scalers' affair."""
    roles: list[Document] = [{"name": part.role, "spec": _set(job, part, {})} for part in job.parts]
    for role in roles if scaled(job) else []:
        del role["spec"]["replicas"]
        role["scaling"] = {"mode": "External"}
    document = _kind("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", job.name, labels(job, "workers"))
    budgets = [_budget(job, part.role, {"maxUnavailable": part.size}) for part in job.parts]
    followed = pod_autoscalers(job, DISAGGREGATED_SCALER) if scaled(job) else []
    return [document | {"spec": {"roles": roles}}, *budgets, *followed]


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
