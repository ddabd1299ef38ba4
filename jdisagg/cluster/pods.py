"""Pods of a job as Kubernetes is told of them: the router's, and a worker's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from jdisagg.cluster.job import HEALTH_PORT, KV_PORT, Job, Part, as_flags, shared_arguments

Document = dict[str, Any]
SECRET_FOLDER, CACHE_FOLDER, SHARED_MEMORY = "/etc/jdisagg", "/cache", "/dev/shm"
START_S = 1800  # for weights to be read and programs to be compiled
NOTICE_S = 5  # for endpoints to forget a pod before it drains
MARGIN_S = 10
RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}
USER = 1000


POD_NAMES = {  # of a worker's own: where its KV is pulled, and where it stands (`jdisagg.labels`)
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
}


def told_by(name: str, path: str) -> Document:
    """A variable that Kubernetes fills with what it knows of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def labels(job: Job, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, "app.kubernetes.io/component": component}


def router_pod(job: Job, index: int = 0) -> Document:
    """The pod template of a router: its probes ask the routes that people ask."""
    control_port = job.control_ports[index]
    told = as_flags(
        role="router",
        host="0.0.0.0",
        control_port=control_port,
        **({"router": job.router} if job.routers > 1 else {}),
        secret_file=f"{SECRET_FOLDER}/secret",
        compile_cache_dir=CACHE_FOLDER,
    )
    component = job.router_names[index].removeprefix(f"{job.name}-")
    return _server_pod(job, component, told, {"control": control_port})


def front_pod(job: Job) -> Document:
    """The pod template of a front: whoever leads, its clients' streams go on."""
    told = as_flags(
        role="front",
        host="0.0.0.0",
        router=job.router,
        secret_file=f"{SECRET_FOLDER}/secret",
        compile_cache_dir=CACHE_FOLDER,
    )
    return _server_pod(job, "front", told, {})


def _server_pod(job: Job, component: str, told: list[str], more: Mapping[str, int]) -> Document:
    """What answers clients, or could; more: ports beside theirs."""
    ports = {"http": job.settings.http_port, "grpc": job.settings.grpc_port, **more}
    named = [{"name": name, "containerPort": port} for name, port in ports.items() if port > 0]
    container = _container(job, component, told) | {
        "ports": named,
        "startupProbe": _asks("/live", 5, START_S // 5),
        "livenessProbe": _asks("/live", 10, 3),
        "readinessProbe": _asks("/ready", 5, 2),
        "lifecycle": {"preStop": {"sleep": {"seconds": NOTICE_S}}},
        "resources": {"requests": {"cpu": "4", "memory": "8Gi"}},
    }
    scraped = {"scrape": "true", "port": str(job.settings.http_port), "path": "/metrics"}
    annotations = {f"prometheus.io/{name}": value for name, value in scraped.items()}
    metadata = {"labels": labels(job, component), "annotations": annotations}
    return {"metadata": metadata, "spec": _pod(job, container)}


def worker_pod(job: Job, part: Part, probed: bool, selector: Mapping[str, str] | None = None) -> Document:
    """The pod template of one process of a worker; `probed`: it is asked for its health."""
    health = {"health_port": HEALTH_PORT} if probed else {}
    told = as_flags(
        role=part.role,
        host="0.0.0.0",
        router=job.router,
        **health,
        kv_listen=f"0.0.0.0:{KV_PORT}",
        kv_advertise="$(POD_IP)",
        secret_file=f"{SECRET_FOLDER}/secret",
        compile_cache_dir=CACHE_FOLDER,
        group_size=part.size,
    )
    container = _container(job, part.role, told) | {
        "env": [told_by(name, path) for name, path in POD_NAMES.items()],
        "ports": [
            {"name": "kv", "containerPort": KV_PORT},
            *({"name": "health", "containerPort": port} for port in health.values()),
        ],
        "resources": _resources(job, part),
    }
    if probed:
        container |= {
            "startupProbe": _asks("/live", 5, START_S // 5, "health"),
            "livenessProbe": _asks("/live", 10, 6, "health"),
            "readinessProbe": _asks("/ready", 5, 2, "health"),
        }
    placed = {"nodeSelector": dict(selector)} if selector else {}
    return {"metadata": {"labels": labels(job, part.role)}, "spec": {**placed, **_pod(job, container)}}


def _pod(job: Job, container: Document) -> Document:
    model = _model_folder(job)
    volumes: list[Document] = [
        {"name": "secret", "secret": {"secretName": job.name, "defaultMode": 0o440}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if model:
        claim = {"claimName": f"{job.name}-models", "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    grace_s = int(job.settings.drain_s) + NOTICE_S + MARGIN_S  # SIGTERM drains, for --drain_s at most
    found: Document = {"terminationGracePeriodSeconds": grace_s, "containers": [container], "volumes": volumes}
    if job.platform != "tpu":  # a TPU's driver wants more rights than these
        person = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
        found["securityContext"] = {**person, "seccompProfile": {"type": "RuntimeDefault"}}
    return found


def _container(job: Job, name: str, told: list[str]) -> Document:
    model = _model_folder(job)
    mounts: list[Document] = [
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": "shm", "mountPath": SHARED_MEMORY},
    ]
    if model:
        mounts.append({"name": "models", "mountPath": model, "readOnly": True})
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "name": name,
        "image": job.image,
        "command": ["python", "-m", "jdisagg.launch"],
        "args": [*shared_arguments(job), *told],
        "volumeMounts": mounts,
        **({} if job.platform == "tpu" else {"securityContext": rights}),
    }


def _model_folder(job: Job) -> str:
    """Where the folder of models is mounted; empty for a model that is in the image or fetched by its name."""
    place = PurePosixPath(job.settings.model)
    return str(place.parent) if place.is_absolute() and str(place.parent) != "/" else ""


def _resources(job: Job, part: Part) -> Document:
    if job.platform == "cpu":
        return {"requests": {"cpu": str(part.devices)}}
    count = {RESOURCES[job.platform]: part.devices}
    return {"requests": count, "limits": dict(count)}


def _asks(path: str, every_s: int, failures: int, port: str = "http") -> Document:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": every_s, "failureThreshold": failures}
