"""--transfer_compress=auto: what packing a page costs each way, measured on warm programs and posted to the workers."""

from __future__ import annotations

from collections.abc import Mapping

from jdisagg.core.events import WiresTimed
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Compress, Role
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.driver.driver import LiveDriver


def post_compression_costs(
    driver: LiveDriver, deployment: Deployment, machines: Mapping[WorkerId, MeshExecutor]
) -> None:
    """Before the driver starts: until it does, nothing else uses the machines."""
    theirs = [deployment.shapes(place) for place in deployment.mesh.workers() if place.role is Role.DECODE]
    for worker, machine in machines.items():
        if theirs and machine.config.role is Role.PREFILL and machine.config.compress is Compress.AUTO:
            driver.post(worker, WiresTimed(machine.time_packs(theirs[0])))
