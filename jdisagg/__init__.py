"""jdisagg: disaggregated LLM inference for JAX. `LLM` and `SamplingParams` are its Python interface.

Importing this package imports neither jax nor the servers; accessing `LLM` does.
"""

import importlib
from typing import Any

_MODULES = {
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
    if name not in _MODULES:
        raise AttributeError(f"module 'jdisagg' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
