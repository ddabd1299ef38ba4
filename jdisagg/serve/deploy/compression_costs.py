"""--transfer_compress=auto: measures the time to pack a page with each codec and posts it to the workers."""

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
    """Posts the measured times. Called before the driver starts, while nothing else uses the executors."""
    decode_shapes = [deployment.shapes(place) for place in deployment.mesh.workers() if place.role is Role.DECODE]
    for worker, machine in machines.items():
        if decode_shapes and machine.config.role is Role.PREFILL and machine.config.compress is Compress.AUTO:
            driver.post(worker, WiresTimed(machine.time_packs(decode_shapes[0])))
