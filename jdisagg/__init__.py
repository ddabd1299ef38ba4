"""jdisagg: disaggregated LLM inference for JAX. `LLM` and `SamplingParams` are the way in from Python.

Importing this package imports neither jax nor the servers; asking it for `LLM` does.
"""

import importlib
from typing import Any

_ROOMS = {
    "LLM": "jdisagg.llm",
    "Completion": "jdisagg.serve.frontends.offline",
    "Choice": "jdisagg.serve.frontends.offline",
    "SamplingParams": "jdisagg.core.request",
    "Settings": "jdisagg.core.settings",
    "MeshSpec": "jdisagg.core.mesh_spec",
}
__all__ = ["LLM", "Choice", "Completion", "MeshSpec", "SamplingParams", "Settings"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'jdisagg' has no attribute {name!r}; it has {', '.join(_ROOMS)}")
    return getattr(importlib.import_module(_ROOMS[name]), name)
