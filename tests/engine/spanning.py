"""One process of several that are one JAX world: python -m tests.engine.spanning PORT SIZE RANK DEVICES SCENE.

Every process calls the same methods of the same machines in the same order; each prints what it was told, as JSON.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.environment import QUICK_XLA

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=QUICK_XLA, PJRT_NPROC="8")
port, size, rank, devices = map(int, sys.argv[1:5])

import jax  # noqa: E402 (a world is joined before anything asks for devices)

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", devices)
jax.distributed.initialize(
    f"127.0.0.1:{port}",
    size,
    rank,
    coordinator_bind_address=f"127.0.0.1:{port}",
    heartbeat_timeout_seconds=60,
    initialization_timeout=120,
)

from tests.engine import scenes  # noqa: E402

scene: Callable[[], Any] = getattr(scenes, sys.argv[5])
try:
    print("told", json.dumps(scene()), flush=True)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # shutting down would wait for the others
jax.distributed.shutdown()
