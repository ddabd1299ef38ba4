"""Topologies of TPUs and GPUs that are not attached: programs are compiled for them and never run.

The devices of a topology are created once, because devices of two descriptions of the same machine cannot be mixed.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from jdisagg.core.errors import ConfigError, MeshError
from jdisagg.core.hardware import Chip, Target
from jdisagg.parallel.submesh import Device

# Variables that an entry file sets before the compilers are loaded. The first lets several processes load libtpu at
# once; the others stop libtpu from querying TPU metadata and the CUDA plugin from requiring libraries that only running
# needs.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_PLUGINS = ("xla_cuda13", "xla_cuda12")


@cache
def devices_of(target: Target) -> tuple[Device, ...]:
    """Returns all devices of the target, in the order of a run on it. Raises ConfigError if its compiler is not
    installed, MeshError if the compiler refuses the shape."""
    check_compiler(target.chip)
    try:
        found = _tpus(target) if target.chip.gpu is None else _gpus(target.chip, target.sides)
    except JaxRuntimeError as error:
        raise MeshError(f"target {target}: {str(error).splitlines()[0]}") from error
    assert len(found) == target.num_devices, (target, found)
    return found


def check_compiler(chip: Chip) -> None:
    """Raises ConfigError with the extra to install if the compiler for this chip is missing."""
    if chip.gpu is None:
        found = find_spec("libtpu") is not None
    else:
        found = find_spec("jax_plugins") is not None and any(find_spec(f"jax_plugins.{name}") for name in _PLUGINS)
    if not found:
        extra = f"aot-{chip.platform}"
        raise ConfigError(f"the compiler for {chip.name} is not installed: pip install -e '.[{extra}]' in the source")


def _tpus(target: Target) -> tuple[Device, ...]:
    name = f"{target.chip.compiled_as or target.chip.name}:" + "x".join(map(str, target.sides))
    host = tuple(min(side, 2) for side in (*target.sides, 1)[:3])  # 2 x 2 chips per host, if there are as many
    if target.sides == (2, 4):
        host = (2, 4, 1)  # this slice of eight chips is a single host
    host = (*host[:2], 1)
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=host).devices
    return tuple(np.array(found).flat)


def _gpus(chip: Chip, sides: tuple[int, ...]) -> tuple[Device, ...]:
    hosts, gpus = sides
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{hosts}x{gpus}", target_config=gpu_config(chip)
    ).devices
    return tuple(np.array(found).flat)


def gpu_config(chip: Chip) -> str:
    """Returns the chip as XLA's GpuTargetConfigProto in text format."""
    sheet = chip.gpu
    assert sheet is not None, chip
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {sheet.cores} fpus_per_core: {sheet.fpus_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {sheet.shared_bytes_per_core}
  shared_memory_per_block_optin: {sheet.shared_bytes_per_block}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(chip.memory_bytes_per_s)} l2_cache_size: {sheet.l2_bytes} clock_rate_ghz: {sheet.clock_ghz}
  device_memory_size: {chip.memory_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {sheet.compute_capability} minor: 0 }}
  device_vendor: "NVIDIA Corporation" name: "{sheet.description}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{sheet.description}"
"""


# Identification of this machine for caches of compiled programs.


def machine_name() -> str:
    """Returns a name for this kind of processor and compiler, so that machines that share a home folder have separate
    caches."""
    words = [platform.machine(), _processor(), jax.__version__, version("jaxlib")]
    return f"jax-{jax.__version__}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}"


@cache
def has_feature(name: str) -> bool:
    """Returns True if this machine's processor has a feature, named as in Linux ("avx512f")."""
    return name in _processor().split()


def _processor() -> str:
    """Returns the processor's feature flags, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
