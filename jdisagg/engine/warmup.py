"""Warm-up: a machine's declared programs, each run once over null pages and zeros; see `programs.py`.

A program that is only compiled ahead of time would be compiled again by its first call, so each is called: idle slots
and null chunks write nothing but the null page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdisagg.engine.declaration import DeclaredProgram
from jdisagg.engine.layer_group import LayerGroup
from jdisagg.engine.ring_runner import LoadedRing
from jdisagg.parallel.submesh import placed

Progress = Callable[[str, int, int], None]


def null_batch(declared: DeclaredProgram) -> tuple[Any, ...]:
    """Zeros for what the layer group does not hold, where the program expects them."""
    return jax.tree.map(_zeros, declared.batch)


def run_null(group: LayerGroup | LoadedRing, declared: DeclaredProgram, batch: tuple[Any, ...]) -> Any:
    """Calls it for the weights and pools of the layer group that it runs on; the result says when it is done.

    The batch may be donated: each call needs one of its own.
    """
    first = declared.layers.start - group.kv_layers.start
    held = slice(0, 1) if group.joined else slice(first, first + len(declared.layers))
    weights = [] if declared.weights is None else [group.params.leaves]
    pools = [] if declared.pools is None else [group.kv.pools[held]]
    results = declared.program(*weights, *pools, *batch)
    if declared.writes_pools:
        group.kv.pools[held] = results[0]
    return results


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    assert shape.sharding is not None, shape
    return placed(np.zeros(shape.shape, shape.dtype), shape.sharding)
