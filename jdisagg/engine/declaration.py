"""One device program as it is declared: a jitted function, the shapes it is called with, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.parallel.submesh import WHOLE, Program, RingMesh, Signature, Submesh, signature_of

UNITS = {  # of sizes; else tokens
    "decode": "pages",
    "verify": "pages",
    "guess": "pages",
    "turns": "pages",
    "ring": "pages",
    "pack": "pages",
    "digest": "pages",
    "check": "pages",
    "insert": "pages",
    "draw": "rows",
}


@dataclass(frozen=True)
class DeclaredProgram:
    """One jitted function for one set of shapes."""

    kind: str  # "prefill", "head", "score", "states", "decode", "verify 4", "mixed", "mixed 4", "draw ...", "pack", ...
    stage: int  # group of the worker that it runs on
    size: int  # of the bucket: tokens of a chunk, pages of a table or a move, rows of a draw
    program: Program
    batch: tuple[Any, ...]  # arguments, as shapes, beyond the weights and pools that the layer group holds
    submesh: Submesh | RingMesh
    layers: range = range(0)  # of the model, that it is about
    weights: Any = None  # as shapes, the first argument; None where it reads none
    pools: list[jax.ShapeDtypeStruct] | None = None  # of `layers`, the next argument; None where it has none
    traits: tuple[Any, ...] = ()  # what else tells two programs of one kind apart, besides the numbers above
    batch_bytes: int = 0  # of one device: what temporaries may hold of the batch itself, generously
    donated_bytes: int = 0  # of one device: what the program must update in place
    collectives: dict[str, int] = field(default_factory=dict)  # what it is expected to hold, by HLO name
    loops: tuple[int, ...] = (1,)  # times that each goes round in a full step, from the outermost in

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(each for each in (self.weights, self.pools) if each is not None) + self.batch

    @property
    def writes_pools(self) -> bool:
        """Whether its first result takes the place of the pools."""
        return self.pools is not None and self.donated_bytes > 0

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.kind} of {self.size} {UNITS.get(self.kind.split()[0], 'tokens')}, stage {self.stage}"

    @property
    def key(self) -> tuple[int, Signature]:
        """Equal for declarations of what is compiled once."""
        return id(self.program), signature_of(self.arguments)

    @property
    def like(self) -> tuple[Any, ...]:
        """Equal for what is the same program but for the devices it runs on."""
        return (*self.family, len(self.layers), self.size)

    @property
    def family(self) -> tuple[Any, ...]:
        """Equal for what is the same program but for sizes."""
        return (self.kind, self.submesh.tp, *self.traits)


def whole(submesh: Submesh, shape: tuple[int, ...], dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that every shard of the submesh has."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=submesh.sharding(WHOLE))


def local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's shard, without padding."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return jnp.dtype(leaf.dtype).itemsize * prod(shape)


def logit_bytes(model: ModelConfig, rows: int) -> int:
    """Eight copies of the logits: sampling keeps several at once, and the least tile has eight rows."""
    return 8 * max(rows, 8) * model.vocab_size * 4


def abstract(arrays: Any) -> Any:
    """The same as shapes where they lie; those that are shapes already may say how as well."""

    def shape_of(each: Any) -> jax.ShapeDtypeStruct:
        if isinstance(each, jax.ShapeDtypeStruct):
            return each
        return jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)

    return jax.tree.map(shape_of, arrays)
