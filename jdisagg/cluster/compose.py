"""Writes a Compose file for one machine, with a container for the router and one per worker, and their Dockerfile."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from jdisagg.cluster.job import ClusterJob, RoleWorkers, as_flags, shared_arguments
from jdisagg.core.errors import ConfigError

POOL_IMAGE, POOL_MEMORY = "valkey/valkey:8", "16gb"
BUILD = {"context": "..", "dockerfile": "launch/Dockerfile"}
SECRET = "/run/secrets/jdisagg"
READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/ready', timeout=5)"  # an error status raises


def compose(job: ClusterJob) -> dict[str, Any]:
    """Returns `compose.yaml`: all services on the host's network, so that KV uses shared memory. Raises ConfigError."""
    if job.settings.http_port <= 0:
        raise ConfigError(f"--http_port={job.settings.http_port}: a container is asked for its health there")
    services = {"router": _router(job)}
    if job.settings.pool:
        services |= _pool(job, job.settings.pool)
    first = 0
    for part in job.parts:
        for index in range(part.replicas):
            devices = range(first, first + part.size * part.devices)
            services[f"{part.role}-{index}"] = _worker(job, part, devices)
            first = devices.stop
    return {
        "name": job.name,
        "services": services,
        "volumes": {"cache": {}},
        "secrets": {"jdisagg": {"file": "./secret"}},
    }


def _pool(job: ClusterJob, url: str) -> dict[str, Any]:
    """Returns the shared pool's services if it is on this machine; a remote one and an object store exist already."""
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost"):
        return {}
    if address.scheme == "mooncake":
        return _mooncake(job, address.port or 50051)
    if address.scheme != "redis":
        return {}
    limits = ("--save", "", "--maxmemory", POOL_MEMORY, "--maxmemory-policy", "allkeys-lru")
    command = ["valkey-server", "--bind", "127.0.0.1", "--port", str(address.port or 6379), *limits]
    return {"pool": {"image": POOL_IMAGE, "command": command, "network_mode": "host", "restart": "on-failure"}}


def _mooncake(job: ClusterJob, port: int) -> dict[str, Any]:
    """Returns a master and a storage node; both come with the package that the image has for its client."""
    master = ["mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    master_address = f"--master_server_address=127.0.0.1:{port}"
    memory = f"--global_segment_size={POOL_MEMORY.removesuffix('gb')} GB"
    node = ["mooncake_client", "--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", master_address, memory]
    return {"pool-master": _server(job, master), "pool-node": _server(job, node)}


def _server(job: ClusterJob, command: list[str]) -> dict[str, Any]:
    return {"image": job.image, "build": BUILD, "command": command, "network_mode": "host", "restart": "on-failure"}


def _router(job: ClusterJob) -> dict[str, Any]:
    arguments = as_flags(
        role="router",
        host=job.settings.host,
        control_port=job.settings.control_port,
        secret_file=SECRET,
        compile_cache_dir="/cache",
    )
    test = ["CMD", "python", "-c", READY.format(port=job.settings.http_port)]
    healthcheck = {"test": test, "interval": "10s", "timeout": "6s", "retries": 3, "start_period": "1800s"}
    return _service(job, arguments) | {"healthcheck": healthcheck}


def _worker(job: ClusterJob, part: RoleWorkers, devices: range) -> dict[str, Any]:
    arguments = as_flags(
        role=part.role,
        router=f"127.0.0.1:{job.settings.control_port}",
        secret_file=SECRET,
        compile_cache_dir="/cache",
        group_size=1,
    )
    service = _service(job, arguments) | {"depends_on": {"router": {"condition": "service_started"}}}
    if job.platform == "gpu":
        device = {"driver": "nvidia", "device_ids": [str(each) for each in devices], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _service(job: ClusterJob, arguments: list[str]) -> dict[str, Any]:
    model = job.settings.model
    volumes: list[Any] = ["cache:/cache"]
    if model.startswith("/"):
        volumes.append({"type": "bind", "source": model, "target": model, "read_only": True})
    return {
        "image": job.image,
        "build": BUILD,
        "command": ["python", "-m", "jdisagg.launch", *shared_arguments(job), *arguments],
        "network_mode": "host",
        "ipc": "host",
        "restart": "on-failure",
        "stop_grace_period": f"{int(job.settings.drain_s) + 10}s",
        "secrets": ["jdisagg"],
        "volumes": volumes,
    }


def _installed(pool: str) -> str:
    """Returns the Dockerfile lines that install the project with the package of the pool's client."""
    extra = "mooncake" if pool.startswith("mooncake:") else "pool" if pool else ""
    ibverbs = "RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1\n" * (extra == "mooncake")
    project = f'".[{extra}]"' if extra else "."
    return f'{ibverbs}RUN pip install --no-cache-dir {project} "$JAX"'


def dockerfile(job: ClusterJob, note: str) -> str:
    """Returns the Dockerfile of all processes; the accelerator's package is a build argument."""
    jax = {"cpu": "jax", "gpu": "jax[cuda13]", "tpu": "jax[tpu]"}[job.platform]
    return f"""# {note}
# docker build --file launch/Dockerfile --build-arg JAX="{jax}" --tag {job.image} .
FROM python:3.12-slim
ARG JAX="{jax}"
WORKDIR /app
COPY pyproject.toml README.md LICENSE NOTICE MANIFEST.in ./
COPY jdisagg jdisagg
COPY pallas_kernels pallas_kernels
{_installed(job.settings.pool)}
# The source tree comes first in the path, with the embedded model that a wheel does not have.
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp
# Large host copies of KV are bound by page faults with glibc's defaults.
ENV MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
EXPOSE 8000 8080 8100 8101
CMD ["python", "-m", "jdisagg.launch", "--host=0.0.0.0"]
"""
