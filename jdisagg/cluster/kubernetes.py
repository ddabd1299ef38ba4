"""Writes a job's manifests: the router, and its workers as LeaderWorkerSets, a DisaggregatedSet or JobSets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from jdisagg.cluster.job import HEALTH_PORT, KV_PORT, ClusterJob, RoleWorkers, as_flags, shared_arguments, with_rings
from jdisagg.core.errors import ConfigError

# The pod templates of a job: of the router, a front and a worker.

Document = dict[str, Any]
SECRET_FOLDER, CACHE_FOLDER, SHARED_MEMORY = "/etc/jdisagg", "/cache", "/dev/shm"
START_S = 1800  # for reading weights and compiling programs
NOTICE_S = 5  # for endpoints to remove a pod before it drains
MARGIN_S = 10
RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}
USER = 1000


POD_NAMES = {  # of a worker: its KV address, and its location (`terminal.py`)
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
}


def field_variable(name: str, path: str) -> Document:
    """Returns an environment variable that Kubernetes fills with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def labels(job: ClusterJob, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, "app.kubernetes.io/component": component}


def router_pod(job: ClusterJob) -> Document:
    """Returns the pod template of a router; with several routers, each writes its own address into the lease."""
    coordination_flags = (
        {"control_advertise": "$(POD_IP)", "coordination": job.coordination} if job.coordination else {}
    )
    arguments = as_flags(
        role="router",
        host="0.0.0.0",
        control_port=job.settings.control_port,
        **coordination_flags,
        secret_file=f"{SECRET_FOLDER}/secret",
        compile_cache_dir=CACHE_FOLDER,
    )
    pod = _server_pod(job, "router", arguments, {"control": job.settings.control_port})
    if coordination_flags:
        pod["spec"]["containers"][0]["env"] = [field_variable("POD_IP", POD_NAMES["POD_IP"])]
    return pod


def front_pod(job: ClusterJob) -> Document:
    """Returns the pod template of a front, whose streams continue when another router leads."""
    arguments = as_flags(
        role="front",
        host="0.0.0.0",
        **job.where,
        secret_file=f"{SECRET_FOLDER}/secret",
        compile_cache_dir=CACHE_FOLDER,
    )
    return _server_pod(job, "front", arguments, {})


def _server_pod(job: ClusterJob, component: str, arguments: list[str], more: Mapping[str, int]) -> Document:
    """Returns the pod template of a router or front; `more`: further ports."""
    ports = {"http": job.settings.http_port, "grpc": job.settings.grpc_port, **more}
    named = [{"name": name, "containerPort": port} for name, port in ports.items() if port > 0]
    container = _container(job, component, arguments) | {
        "ports": named,
        "startupProbe": _http_probe("/live", 5, START_S // 5),
        "livenessProbe": _http_probe("/live", 10, 3),
        "readinessProbe": _http_probe("/ready", 5, 2),
        "lifecycle": {"preStop": {"sleep": {"seconds": NOTICE_S}}},
        "resources": {"requests": {"cpu": "4", "memory": "8Gi"}},
    }
    scraped = {"scrape": "true", "port": str(job.settings.http_port), "path": "/metrics"}
    annotations = {f"prometheus.io/{name}": value for name, value in scraped.items()}
    metadata = {"labels": labels(job, component), "annotations": annotations}
    return {"metadata": metadata, "spec": _pod(job, container)}


def worker_pod(job: ClusterJob, part: RoleWorkers, probed: bool, selector: Mapping[str, str] | None = None) -> Document:
    """Returns the pod template of one process of a worker; `probed`: it has health probes."""
    health = {"health_port": HEALTH_PORT} if probed else {}
    arguments = as_flags(
        role=part.role,
        host="0.0.0.0",
        **job.where,
        **health,
        kv_listen=f"0.0.0.0:{KV_PORT}",
        kv_advertise="$(POD_IP)",
        secret_file=f"{SECRET_FOLDER}/secret",
        compile_cache_dir=CACHE_FOLDER,
        group_size=part.size,
    )
    container = _container(job, part.role, arguments) | {
        "env": [field_variable(name, path) for name, path in POD_NAMES.items()],
        "ports": [
            {"name": "kv", "containerPort": KV_PORT},
            *({"name": "health", "containerPort": port} for port in health.values()),
        ],
        "resources": _resources(job, part),
    }
    if probed:
        container |= {
            "startupProbe": _http_probe("/live", 5, START_S // 5, "health"),
            "livenessProbe": _http_probe("/live", 10, 6, "health"),
            "readinessProbe": _http_probe("/ready", 5, 2, "health"),
        }
    placed = {"nodeSelector": dict(selector)} if selector else {}
    return {"metadata": {"labels": labels(job, part.role)}, "spec": {**placed, **_pod(job, container)}}


def _pod(job: ClusterJob, container: Document) -> Document:
    model = _model_folder(job)
    volumes: list[Document] = [
        {"name": "secret", "secret": {"secretName": job.name, "defaultMode": 0o440}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if model:
        claim = {"claimName": f"{job.name}-models", "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    grace_s = int(job.settings.drain_s) + NOTICE_S + MARGIN_S  # SIGTERM drains for at most --drain_s
    spec: Document = {"terminationGracePeriodSeconds": grace_s, "containers": [container], "volumes": volumes}
    if job.coordination.startswith("kubernetes"):
        spec["serviceAccountName"] = job.name
    if job.platform != "tpu":  # a TPU's driver needs more privileges
        user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
        spec["securityContext"] = {**user, "seccompProfile": {"type": "RuntimeDefault"}}
    return spec


def _container(job: ClusterJob, name: str, arguments: list[str]) -> Document:
    model = _model_folder(job)
    mounts: list[Document] = [
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": "shm", "mountPath": SHARED_MEMORY},
    ]
    if model:
        mounts.append({"name": "models", "mountPath": model, "readOnly": True})
    restrictions = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "name": name,
        "image": job.image,
        "command": ["python", "-m", "jdisagg.launch"],
        "args": [*shared_arguments(job), *arguments],
        "volumeMounts": mounts,
        **({} if job.platform == "tpu" else {"securityContext": restrictions}),
    }


def _model_folder(job: ClusterJob) -> str:
    """Returns the mount point of the model folder; empty for a model in the image or fetched by its name."""
    place = PurePosixPath(job.settings.model)
    return str(place.parent) if place.is_absolute() and str(place.parent) != "/" else ""


def _resources(job: ClusterJob, part: RoleWorkers) -> Document:
    if job.platform == "cpu":
        return {"requests": {"cpu": str(part.devices)}}
    count = {RESOURCES[job.platform]: part.devices}
    return {"requests": count, "limits": dict(count)}


def _http_probe(path: str, every_s: int, failures: int, port: str = "http") -> Document:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": every_s, "failureThreshold": failures}


# External scalers that follow the autoscaler's metric `jdisagg_desired_replicas`, by role.
#
# The metric rises at once and falls to the maximum of the last ten minutes, so scalers have no stabilization window.

METRIC = "jdisagg_desired_replicas"
PROMETHEUS = "http://prometheus:9090"
GROWTH = 4  # the largest multiple of the plan's replicas that a scaler may set
SETS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
DISAGGREGATED_SCALER = ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSetRoleScaler")  # one per role, made by its set


def scaled(job: ClusterJob) -> bool:
    """Returns True if the router publishes the number of workers that the load asks for."""
    return job.settings.autoscale != "off"


def pod_autoscalers(job: ClusterJob, target: tuple[str, str] = SETS) -> list[Document]:
    """Returns HorizontalPodAutoscalers, for an adapter that serves the metric as an external one."""
    return [_pod_autoscaler(job, part, target) for part in job.parts]


def _pod_autoscaler(job: ClusterJob, part: RoleWorkers, target: tuple[str, str]) -> Document:
    metric = {"name": METRIC, "selector": {"matchLabels": {"role": part.role}}}
    metric_target = {
        "type": "External",
        "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
    }
    at_once = {"stabilizationWindowSeconds": 0}
    spec = {
        "scaleTargetRef": _target(job, part, target),
        "minReplicas": 1,
        "maxReplicas": GROWTH * part.replicas,
        "metrics": [metric_target],
        "behavior": {"scaleUp": at_once, "scaleDown": at_once},
    }
    return _document(job, part, ("autoscaling/v2", "HorizontalPodAutoscaler"), spec)


def scaled_objects(job: ClusterJob, target: tuple[str, str] = SETS) -> list[Document]:
    """Returns KEDA ScaledObjects, which query Prometheus themselves."""
    return [_scaled_object(job, part, target) for part in job.parts]


def _scaled_object(job: ClusterJob, part: RoleWorkers, target: tuple[str, str]) -> Document:
    query = f'max({METRIC}{{role="{part.role}"}})'
    trigger = {"serverAddress": PROMETHEUS, "query": query, "threshold": "1"}
    spec = {
        "scaleTargetRef": _target(job, part, target),
        "pollingInterval": 15,
        "minReplicaCount": 1,
        "maxReplicaCount": GROWTH * part.replicas,
        "fallback": {"failureThreshold": 4, "replicas": part.replicas},  # without the metric: as planned
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
    }
    return _document(job, part, ("keda.sh/v1alpha1", "ScaledObject"), spec)


def _target(job: ClusterJob, part: RoleWorkers, target: tuple[str, str]) -> Document:
    version, kind = target
    return {"apiVersion": version, "kind": kind, "name": f"{job.name}-{part.role}"}


def _document(job: ClusterJob, part: RoleWorkers, kind: tuple[str, str], spec: Document) -> Document:
    metadata = {"name": f"{job.name}-{part.role}", "labels": labels(job, part.role)}
    return {"apiVersion": kind[0], "kind": kind[1], "metadata": metadata, "spec": spec}


EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"
JOBSET_NAMES = {  # variables that `membership.py` reads -> JobSet's annotation of a pod
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
}
LWS_NAMES = {  # variables that `terminal.py` reads in addition -> LeaderWorkerSet's label of a pod
    "LWS_NAME": "leaderworkerset.sigs.k8s.io/name",
    "LWS_GROUP_INDEX": "leaderworkerset.sigs.k8s.io/group-index",
}
MAX_RESTARTS = 1000
Selectors = Callable[[RoleWorkers], Mapping[str, str]]


def no_selector(part: RoleWorkers) -> Mapping[str, str]:
    """Returns no node selector."""
    return {}


ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def router(job: ClusterJob) -> list[Document]:
    """Returns the routers' Deployment, Services, disruption budgets and lease rights, and the fronts."""
    ports = {"http": job.settings.http_port, "grpc": job.settings.grpc_port}
    served = "front" if job.fronts else "router"
    clients = _service(job.name, labels(job, served), {name: port for name, port in ports.items() if port > 0})
    deployment, *more = _routers(job)
    return [deployment, clients, *more, *(_fronts(job) if job.fronts else [])]


def _routers(job: ClusterJob) -> list[Document]:
    name, selector = job.router_name, labels(job, "router")
    if job.coordination:  # workers and fronts find the leader's pod by its lease: no Service
        deployment = _deployment(name, selector, job.routers, ROLLING, router_pod(job))
        rights = _lease_rights(job) if job.coordination.startswith("kubernetes") else []
        return [deployment, _budget(job, "router", {"maxUnavailable": 1}), *rights]
    deployment = _deployment(name, selector, 1, {"type": "Recreate"}, router_pod(job))  # never two without a lease
    control = _service(name, selector, {"control": job.settings.control_port})
    control["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}  # ready once workers joined
    return [deployment, control, _budget(job, "router", {"minAvailable": 1})]


def _lease_rights(job: ClusterJob) -> list[Document]:
    """Returns the account of all pods, and its rights: to create leases, and to read and renew the router's."""
    named, group = labels(job, "router"), "rbac.authorization.k8s.io"
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    rules = [
        {**leases, "verbs": ["create"]},  # RBAC cannot restrict the name of a created object
        {**leases, "resourceNames": [job.router_name], "verbs": ["get", "update"]},
    ]
    account = {"kind": "ServiceAccount", "name": job.name, "namespace": job.namespace}
    role_ref = {"apiGroup": group, "kind": "Role", "name": job.router_name}
    return [
        _kind("v1", "ServiceAccount", job.name, named),
        _kind(f"{group}/v1", "Role", job.router_name, named) | {"rules": rules},
        _kind(f"{group}/v1", "RoleBinding", job.router_name, named) | {"subjects": [account], "roleRef": role_ref},
    ]


def _fronts(job: ClusterJob) -> list[Document]:
    """Returns the fronts' Deployment and budget; fronts hold no state, so a rollout may add one."""
    deployment = _deployment(f"{job.name}-front", labels(job, "front"), job.fronts, ROLLING, front_pod(job))
    return [deployment, _budget(job, "front", {"maxUnavailable": 1})]


def _deployment(
    name: str, selector: Mapping[str, str], replicas: int, strategy: Mapping[str, Any], pod: Document
) -> Document:
    spec = {"replicas": replicas, "strategy": strategy, "selector": {"matchLabels": dict(selector)}, "template": pod}
    return _kind("apps/v1", "Deployment", name, selector) | {"spec": spec}


def leader_worker_sets(job: ClusterJob, selectors: Selectors = no_selector, exclusive: str = "") -> list[Document]:
    """Returns a LeaderWorkerSet and a disruption budget per role; `exclusive`: a topology label with one group each."""
    documents: list[Document] = []
    for part in job.parts:
        document = _kind(
            "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", f"{job.name}-{part.role}", labels(job, part.role)
        )
        if exclusive and part.size > 1:
            document["metadata"]["annotations"] = {EXCLUSIVE: exclusive}
        documents += [
            document | {"spec": _set(job, part, selectors(part))},
            _budget(job, part.role, {"maxUnavailable": part.size}),
        ]
    return documents


def disaggregated_set(job: ClusterJob) -> list[Document]:
    """Returns one set of prefill and decode; with --autoscale, its own scalers set the replicas."""
    roles: list[Document] = [{"name": part.role, "spec": _set(job, part, {})} for part in job.parts]
    for role in roles if scaled(job) else []:
        del role["spec"]["replicas"]
        role["scaling"] = {"mode": "External"}
    document = _kind("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", job.name, labels(job, "workers"))
    budgets = [_budget(job, part.role, {"maxUnavailable": part.size}) for part in job.parts]
    autoscalers = pod_autoscalers(job, DISAGGREGATED_SCALER) if scaled(job) else []
    return [document | {"spec": {"roles": roles}}, *budgets, *autoscalers]


def job_sets(job: ClusterJob) -> list[Document]:
    """Returns a JobSet per worker: a failed member restarts the pods of its own worker only."""
    documents: list[Document] = []
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
            documents.append(document | {"spec": spec})
        documents.append(_budget(job, part.role, {"maxUnavailable": part.size}))
    return documents


def _set(job: ClusterJob, part: RoleWorkers, selector: Mapping[str, str]) -> Document:
    """Returns the spec of a LeaderWorkerSet; in a group only the leader has health probes."""
    pods = {"workerTemplate": worker_pod(job, part, part.size == 1, selector)}
    if part.size > 1:
        pods["leaderTemplate"] = worker_pod(job, part, True, selector)
    for pod in pods.values():
        variables = pod["spec"]["containers"][0]["env"]
        variables += [field_variable(name, f"metadata.labels['{label}']") for name, label in LWS_NAMES.items()]
    template: Document = {"size": part.size, "restartPolicy": "RecreateGroupOnPodRestart", **pods}
    rolling = {"maxUnavailable": 1, "maxSurge": 0}
    return {
        "replicas": part.replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": template,
    }


def _replicated(job: ClusterJob, part: RoleWorkers) -> Document:
    pod = worker_pod(job, part, part.size == 1)
    container = pod["spec"]["containers"][0]
    for name, annotation in JOBSET_NAMES.items():
        container["env"].append(field_variable(name, f"metadata.annotations['{annotation}']"))
    container["env"].append({"name": "NNODES", "value": str(part.size)})
    pod["spec"]["restartPolicy"] = "Never"
    counts = {"parallelism": part.size, "completions": part.size, "completionMode": "Indexed", "backoffLimit": 0}
    return {"name": "worker", "replicas": 1, "template": {"spec": {**counts, "template": pod}}}


def _kind(version: str, kind: str, name: str, labelled: Mapping[str, str]) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(labelled)}}


def _service(name: str, selector: Mapping[str, str], ports: Mapping[str, int]) -> Document:
    shown: list[dict[str, Any]] = [{"name": each, "port": port, "targetPort": each} for each, port in ports.items()]
    return _kind("v1", "Service", name, selector) | {"spec": {"selector": dict(selector), "ports": shown}}


def _budget(job: ClusterJob, component: str, bound: Mapping[str, int]) -> Document:
    selector = labels(job, component)
    document = _kind("policy/v1", "PodDisruptionBudget", f"{job.name}-{component}", selector)
    return document | {"spec": {**bound, "selector": {"matchLabels": selector}}}


# TPU slices on GKE: the topology and the number of hosts for a worker, and how a pod requests it.

WHOLE = 1 << 20  # devices of a host without limit: the slice decides over how many hosts a worker spans
POOL = "cloud.google.com/gke-nodepool"  # a slice of several hosts is a node pool of its own


@dataclass(frozen=True, slots=True)
class SliceSizes:
    """The slices that GKE has of one chip. `one_host`: chips of a single machine; else each host has `per_host`."""

    accelerator: str
    topologies: Mapping[int, str]  # chips -> topology
    one_host: tuple[int, ...]
    per_host: int = 4

    def topology(self, chips: int) -> tuple[int, str]:
        """Returns (chips, topology) of the smallest slice with at least `chips`. Raises ConfigError."""
        for count, topology in self.topologies.items():
            if count >= chips:
                return count, topology
        raise ConfigError(
            f"a worker of {chips} chips is over the largest slice of {self.accelerator}: {max(self.topologies)}"
        )

    def hosts(self, chips: int) -> int:
        return 1 if chips in self.one_host else chips // self.per_host


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
SLICES = {  # by the names of `core.targets`
    "v5e": SliceSizes("tpu-v5-lite-podslice", _FLAT, (1, 4, 8)),
    "v5p": SliceSizes("tpu-v5p-slice", _CUBES, (4,)),
    "v6e": SliceSizes("tpu-v6e-slice", _FLAT, (1, 4, 8)),
}


def slice_of(part: RoleWorkers, chip: str) -> tuple[RoleWorkers, str]:
    """Returns the worker's processes on a slice, one per host, and the slice's topology. Raises ConfigError. A worker
    smaller than its slice has the whole slice, and leaves the other chips idle."""
    wanted = part.size * part.devices
    chips, topology = SLICES[chip].topology(wanted)
    hosts = SLICES[chip].hosts(chips)
    if hosts > 1 and chips != wanted:
        raise ConfigError(
            f"{part.role} workers have {wanted} chips, and {chip} slices of several hosts {chips}: {topology}"
        )
    return replace(part, size=hosts, devices=chips // hosts), topology


def manifests(job: ClusterJob, chip: str) -> dict[str, list[Document]]:
    """Returns file -> documents: the router on any node, each worker on a slice of its own. Raises ConfigError."""
    placed = {part.role: slice_of(part, chip) for part in job.parts}
    slices = with_rings(replace(job, platform="tpu", parts=tuple(part for part, _ in placed.values())))

    def selector(part: RoleWorkers) -> Mapping[str, str]:
        topology = placed[part.role][1]
        names = {"accelerator": SLICES[chip].accelerator, "topology": topology}
        return {f"cloud.google.com/gke-tpu-{name}": value for name, value in names.items()}

    return {"router.yaml": router(slices), "lws.yaml": leader_worker_sets(slices, selector, POOL)}
