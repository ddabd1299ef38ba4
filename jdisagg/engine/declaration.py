"""The declaration of one device program: a jitted function, the shapes of its arguments, and its allowed costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jdisagg.core.model_config import ModelConfig
from jdisagg.parallel.submesh import WHOLE, Program, RingMesh, Signature, StageMesh, signature_of

UNITS = {  # of sizes; tokens for other kinds
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
    """A jitted function declared for one set of argument shapes."""

    kind: str  # "prefill", "head", "score", "states", "decode", "verify 4", "mixed", "mixed 4", "draw ...", "pack", ...
    stage: int  # layer group of the worker
    size: int  # bucket: tokens of a chunk, pages of a table or a transfer, rows of a sampling program
    program: Program
    batch: tuple[Any, ...]  # arguments, as shapes, beyond the weights and pools that the layer group holds
    submesh: StageMesh | RingMesh
    layers: range = range(0)  # layers of the model
    weights: Any = None  # shapes of the first argument; None if it reads no weights
    pools: list[jax.ShapeDtypeStruct] | None = None  # of `layers`, the next argument; None without pools
    traits: tuple[Any, ...] = ()  # further properties that distinguish programs of one kind
    batch_bytes: int = 0  # per device: bound of the batch's part of temporaries
    donated_bytes: int = 0  # per device: bytes that the program must update in place
    collectives: dict[str, int] = field(default_factory=dict)  # expected number, by HLO name
    loops: tuple[int, ...] = (1,)  # iterations of its nested loops in a full step, outermost first

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(each for each in (self.weights, self.pools) if each is not None) + self.batch

    @property
    def writes_pools(self) -> bool:
        """Returns True if the first result replaces the pools."""
        return self.pools is not None and self.donated_bytes > 0

    @property
    def label(self) -> str:
        """Returns a readable label for progress lines and reports."""
        return f"{self.kind} of {self.size} {UNITS.get(self.kind.split()[0], 'tokens')}, stage {self.stage}"

    @property
    def key(self) -> tuple[int, Signature]:
        """Returns a key that is equal for declarations of one compiled program."""
        return id(self.program), signature_of(self.arguments)

    @property
    def like(self) -> tuple[Any, ...]:
        """Returns a key that is equal for programs that differ only in their devices."""
        return (*self.family, len(self.layers), self.size)

    @property
    def family(self) -> tuple[Any, ...]:
        """Returns a key that is equal for programs that differ only in sizes."""
        return (self.kind, self.submesh.tp, *self.traits)


def whole(submesh: StageMesh, shape: tuple[int, ...], dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that is replicated on every shard of the submesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=submesh.sharding(WHOLE))


def local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's shard, without padding."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return jnp.dtype(leaf.dtype).itemsize * prod(shape)


def logit_bytes(model: ModelConfig, rows: int) -> int:
    """Returns the bytes of eight copies of the logits: sampling keeps several at once, and a tile has at least eight
    rows."""
    return 8 * max(rows, 8) * model.vocab_size * 4


def abstract(arrays: Any) -> Any:
    """Returns the arrays as shapes with their shardings; shapes are returned as they are, with their layouts."""

    def shape_of(each: Any) -> jax.ShapeDtypeStruct:
        if isinstance(each, jax.ShapeDtypeStruct):
            return each
        return jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)

    return jax.tree.map(shape_of, arrays)
