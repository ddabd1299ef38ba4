"""Scalers outside that follow what the autoscaler says the load asks for: `jdisagg_desired_replicas`, by role.

It rises at once and falls to the most of the last ten minutes: scalers add no patience of their own.
"""

from __future__ import annotations

from jdisagg.cluster.job import Job, Part
from jdisagg.cluster.pods import Document, labels

METRIC = "jdisagg_desired_replicas"
PROMETHEUS = "http://prometheus:9090"
GROWTH = 4  # times as many as the plan has: the most that a scaler may make of them
SETS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
DISAGGREGATED_SCALER = ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSetRoleScaler")  # one a role, made by its set


def scaled(job: Job) -> bool:
    """Whether the router tells how many workers the load asks for."""
    return job.settings.autoscale != "off"


def pod_autoscalers(job: Job, target: tuple[str, str] = SETS) -> list[Document]:
    """By an adapter that shows the metric as an external one."""
    return [_pod_autoscaler(job, part, target) for part in job.parts]


def _pod_autoscaler(job: Job, part: Part, target: tuple[str, str]) -> Document:
    metric = {"name": METRIC, "selector": {"matchLabels": {"role": part.role}}}
    wanted = {
        "type": "External",
        "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
    }
    at_once = {"stabilizationWindowSeconds": 0}
    spec = {
        "scaleTargetRef": _target(job, part, target),
        "minReplicas": 1,
        "maxReplicas": GROWTH * part.replicas,
        "metrics": [wanted],
        "behavior": {"scaleUp": at_once, "scaleDown": at_once},
    }
    return _document(job, part, ("autoscaling/v2", "HorizontalPodAutoscaler"), spec)


def scaled_objects(job: Job, target: tuple[str, str] = SETS) -> list[Document]:
    """Of KEDA, which asks Prometheus itself."""
    return [_scaled_object(job, part, target) for part in job.parts]


def _scaled_object(job: Job, part: Part, target: tuple[str, str]) -> Document:
    query = f'max({METRIC}{{role="{part.role}"}})'
    told = {"serverAddress": PROMETHEUS, "query": query, "threshold": "1"}
    spec = {
        "scaleTargetRef": _target(job, part, target),
        "pollingInterval": 15,
        "minReplicaCount": 1,
        "maxReplicaCount": GROWTH * part.replicas,
        "fallback": {"failureThreshold": 4, "replicas": part.replicas},  # where nobody tells: as planned
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": told}],
    }
    return _document(job, part, ("keda.sh/v1alpha1", "ScaledObject"), spec)


def _target(job: Job, part: Part, target: tuple[str, str]) -> Document:
    version, kind = target
    return {"apiVersion": version, "kind": kind, "name": f"{job.name}-{part.role}"}


def _document(job: Job, part: Part, kind: tuple[str, str], spec: Document) -> Document:
    metadata = {"name": f"{job.name}-{part.role}", "labels": labels(job, part.role)}
    return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, "spec": spec}
