"""TPU kernels with no TPU: the interpreters that run them, and the topologies that they are compiled for."""

import os
from functools import cache

import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from jdisagg.parallel.submesh import Device

# Read when libtpu is loaded, which importing it by name does not do. The first lets several test processes load it.
QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
FAST = True  # numerics alone: a missing wait passes, an index out of range is clamped
LATE = pltpu.InterpretParams(dma_execution_mode="on_wait")  # a copy not awaited leaves NaN; out of range raises
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)  # prints the races it sees
RACE = "RACE DETECTED"


@cache
def tpu_devices(chip: str, count: int) -> tuple[Device, ...]:
    """`count` (1 or 4) devices of one host of v5e, v6e or v5p; they compile and never run."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sides = (1, 1, 1) if count == 1 else (2, 2, 1)
    name = "x".join(str(side) for side in (sides if chip == "v5p" else sides[:2]))
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip}:{name}", chips_per_host_bounds=sides
    ).devices
    assert len(found) == count, found
    return tuple(np.array(found).flat)
