"""How the table of embeddings lies on a TPU: row by row, as tokens are looked up.

Left to itself a TPU puts the longer side last where the hidden size is no whole number of lanes, which pads less, and
copies the whole table at every lookup: 1.1 GiB a step of gpt-oss, whose rows are of 2,880 numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jdisagg.model.params import StageParams, dotted
from jdisagg.parallel.submesh import WHOLE, Submesh

TABLE = "embed"


def by_rows(params: StageParams, submesh: Submesh) -> StageParams:
    """The same weights, or shapes of weights, with the table laid out so; elsewhere than on a TPU it is already."""
    if submesh.devices[0].platform != "tpu":
        return params
    tree = jax.tree.unflatten(params.treedef, params.leaves)
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return replace(params, leaves=[_by_rows(leaf, submesh) if dotted(path) == TABLE else leaf for path, leaf in named])


def _by_rows(table: Any, submesh: Submesh) -> Any:
    form = submesh.row_major(WHOLE, 2)
    if isinstance(table, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=form)
    if submesh.spans_processes:
        return jax.jit(lambda each: each, out_shardings=form)(table)
    return jax.device_put(table, form)
