"""GPUs for programs to be compiled for, with no GPU: a topology of H100s as the CUDA plugin's compiler sees them."""

import os
from functools import cache

import numpy as np
from jax.experimental import topologies

from jdisagg.parallel.submesh import Device

# What the compiler asks of a device: limits of a block and of a core, memory, and the toolkit it would run under.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H100 80GB HBM3" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
NO_DRIVER = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # the plugin would ask libraries that compiling does not need


@cache
def gpu_devices(count: int) -> tuple[Device, ...]:
    """`count` H100s of one host; they compile and never run. Devices of two calls do not mix in one program."""
    for name, value in NO_DRIVER.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{count}", target_config=H100
    )
    assert len(topology.devices) == count, topology.devices
    return tuple(np.array(topology.devices).flat)
