"""LoRA adapters: reads PEFT folders (`adapter_config.json`, `adapter_model.safetensors`), and applies adapters per
batch row.

Features that would change an adapter's meaning and are not supported are refused by name: weights that depend on the
base model's (DoRA, PiSSA), whole modules, biases and repeated layers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jdisagg.core.errors import CheckpointError, MissingTensor, UnsupportedModel, WrongDtype, WrongShape
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import Adapter
from jdisagg.model.files import JsonFields, first_line, read_json, regular
from jdisagg.model.names import LeafSpec, TensorSlice, layer_leaves
from jdisagg.model.products import MatrixFormat, product
from jdisagg.model.sources import FLOATS, STORED

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = 8 << 30  # largest file of adapter weights
LARGEST_RANK = 1024
_MATRIX = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
SPARSE, SHARED = ("mlp.gate_up", "mlp.down"), "mlp.shared."
# Keys of PEFT for adapters that are not plain pairs of low-rank matrices.
OTHERWISE = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "layer_replication"),
    *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "fan_in_fan_out", "arrow_config"),
)
ABOUT_BASE = ("pissa", "olora", "corda")  # initialisations that modify the base weights


class LowRankPair(NamedTuple):
    """The update of one matrix in f32: b [out, rank], already scaled, times a [rank, in]."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True)
class AdapterWeights:
    """All pairs of an adapter in host memory, by layer of the model and matrix name, such as "self_attn.q_proj"."""

    adapter: Adapter
    rank: int  # largest rank of its pairs
    pairs: Mapping[tuple[int, str], LowRankPair]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for pair in self.pairs.values() for part in pair)


def adapted_leaves(config: ModelConfig, layer: int) -> dict[str, LeafSpec]:
    """Returns the matrices of a layer that adapters can change, by path, such as "attention.qkv"; experts are
    excluded."""
    found = {
        path.removesuffix(".kernel"): leaf
        for path, leaf in layer_leaves(config, "").items()
        if path.endswith(".kernel")
    }
    latent = config.latent
    if latent is not None and latent.q_lora_rank is None:
        del found["attention.q_down"]
    if config.is_sparse(layer):
        return {path: leaf for path, leaf in found.items() if path not in SPARSE}
    return {path: leaf for path, leaf in found.items() if not path.startswith(SHARED)}


def target_of(part: TensorSlice) -> str:
    """Returns a checkpoint matrix's name within its layer, such as "self_attn.q_proj"."""
    return part.name.strip(".").removesuffix(".weight")


def identified(name: str, folder: str) -> Adapter:
    """Returns the adapter in `folder`, identified by a digest of its files. Raises CheckpointError."""
    place = Path(folder).expanduser().resolve()
    digest = hashlib.blake2b(digest_size=16)
    if not place.is_dir():
        raise CheckpointError(f"adapter {name}: {folder} is no folder")
    if not (place / WEIGHTS_FILE).exists() and (place / "adapter_model.bin").exists():
        raise CheckpointError(f"adapter {name}: {folder} has adapter_model.bin, a pickle; save it as {WEIGHTS_FILE}")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        with regular(place / file, MOST_BYTES).open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
        digest.update(file.encode())
    return Adapter(name, digest.hexdigest(), str(place))


def read_adapter(adapter: Adapter, model: ModelConfig, max_rank: int) -> AdapterWeights:
    """Reads and checks an adapter. Raises CheckpointError with the adapter, the field or tensor, and both values."""
    try:
        if identified(adapter.name, adapter.folder) != adapter:
            raise CheckpointError(f"the files of {adapter.folder} are others than when it was loaded; load it again")
        settings = _AdapterSettings(JsonFields(read_json(Path(adapter.folder) / CONFIG_FILE), CONFIG_FILE))
        tensors = dict(_tensors(Path(adapter.folder) / WEIGHTS_FILE))
        pairs = _pairs(tensors, settings, _shapes(model), max_rank)
    except CheckpointError as error:
        message = str(error)
        raise type(error)(message if adapter.name in message else f"adapter {adapter.name}: {message}") from error
    return AdapterWeights(adapter, max(len(pair.a) for pair in pairs.values()), pairs)


class _AdapterSettings:
    """The ranks and scales of `adapter_config.json`."""

    def __init__(self, fields: JsonFields) -> None:
        kind = fields.word("peft_type")
        if kind != "LORA":
            raise fields.wrong("peft_type", '"LORA"')
        for key in OTHERWISE:
            if fields.raw.get(key):
                raise fields.wrong(key, "nothing of the kind: only plain LoRA is served")
        if fields.raw.get("bias") not in (None, "none"):
            raise fields.wrong("bias", '"none"')
        initialisation = fields.raw.get("init_lora_weights")
        if isinstance(initialisation, str) and initialisation.startswith(ABOUT_BASE):
            raise fields.wrong("init_lora_weights", "an adapter of the base as it is; PEFT can convert it to one")
        self.rank, self.rooted = fields.needed("r", LARGEST_RANK), fields.flag("use_rslora")
        alpha = fields.number("lora_alpha", -1e6, 1e6)
        self.alpha = 8.0 if alpha is None else alpha
        self.ranks, self.alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")

    def rank_of(self, module: str) -> int:
        return int(_first_match(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        return _first_match(self.alphas, module, self.alpha) / (sqrt(rank) if self.rooted else rank)


def _pattern(fields: JsonFields, key: str) -> dict[re.Pattern[str], float]:
    """Returns numbers by regular expression of module name, with PEFT's matching rule."""
    part, found = fields.part(key), dict[re.Pattern[str], float]()
    for pattern in part.raw if part else ():
        assert part is not None
        try:
            found[re.compile(rf"(?:.*\.)?(?:{pattern})$")] = part.number(pattern, 0, 1e6, open_low=True) or 0.0
        except re.error as error:
            raise part.wrong(pattern, f"a number by a regular expression: {error}") from error
    return found


def _first_match(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        with safe_open(regular(path, MOST_BYTES), framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                stored = str(opened.get_slice(name).get_dtype())
                if STORED.get(stored, stored) not in FLOATS:
                    raise WrongDtype(f"tensor {name} has dtype {stored}; needed: {', '.join(FLOATS)}")
                yield name, opened.get_tensor(name).astype(np.float32)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {first_line(error)}") from error


def _shapes(model: ModelConfig) -> dict[tuple[int, str], tuple[int, ...]]:
    """Returns the shape [out, in] of every matrix that can be adapted."""
    return {
        (layer, target_of(part)): part.shape
        for layer in range(model.num_layers)
        for leaf in adapted_leaves(model, layer).values()
        for part in leaf.parts
    }


def _pairs(
    tensors: Mapping[str, np.ndarray],
    settings: _AdapterSettings,
    shapes: Mapping[tuple[int, str], tuple[int, ...]],
    max_rank: int,
) -> dict[tuple[int, str], LowRankPair]:
    halves: dict[tuple[int, str], dict[str, tuple[str, np.ndarray]]] = {}
    for name, tensor in tensors.items():
        found = _MATRIX.fullmatch(name)
        place = (int(found[1]), found[2]) if found is not None else (-1, "")
        if found is None or place not in shapes:
            names = ", ".join(dict.fromkeys(target.rpartition(".")[2] for _, target in shapes))
            raise UnsupportedModel(f"tensor {name[:200]} adds to no matrix that adapters of this model may: {names}")
        halves.setdefault(place, {})[found[3]] = name, tensor
    if not halves:
        raise MissingTensor(f"{WEIGHTS_FILE} has {len(tensors)} tensors, none of them of a matrix")
    return {
        place: _pair(halves[place], f"model.layers.{place[0]}.{place[1]}", settings, shapes[place], max_rank)
        for place in sorted(halves)
    }


def _pair(
    half: Mapping[str, tuple[str, np.ndarray]],
    module: str,
    settings: _AdapterSettings,
    shape: tuple[int, ...],
    max_rank: int,
) -> LowRankPair:
    rank, (outputs, inputs) = settings.rank_of(module), shape
    if rank > max_rank:
        raise UnsupportedModel(f"{module} has rank {rank}, over --max_lora_rank={max_rank}: raise that")
    for side, needed in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if side not in half:
            raise MissingTensor(f"{module} has no lora_{side} beside {next(iter(half.values()))[0]}")
        name, found = half[side]
        if found.shape != needed:
            raise WrongShape(f"tensor {name} has shape {found.shape}; rank {rank} and the model ask for {needed}")
        if not np.isfinite(found).all():
            raise CheckpointError(f"tensor {name} holds numbers that are not finite")
    return LowRankPair(half["A"][1], half["B"][1] * np.float32(settings.scale_of(module, rank)))


# Adapters in a batch: each row adds the low-rank product of its own adapter to the product with the model's matrix.
#
# A matrix has slots for a fixed number of adapters of a maximum rank, in one pair of arrays. All rows are multiplied
# with the A factors of all slots. This product has a fixed shape and the same form as the model's own (`products.py`),
# so a row's bits do not depend on the adapters of other rows. A row needs `rank` of the `slots * rank` resulting
# channels. Accelerators zero the others and multiply with all B factors. On a CPU such a product is slow: there each
# row's channels weight the rows of its own B factor, one sum per output, in a loop that XLA fuses with what follows.
# Eight rows of 1,280 outputs, eight slots of rank 8: 30 us as a product, and 9 alongside it; 20 as the fused loop.

VECTOR, VECTOR_PART = 16, 4  # lanes over which the CPU's products accumulate
TERMS = 32  # terms of one unrolled sum: with more, compiling takes seconds and the rows leave the cache
SKIPPING_ROWS = 64  # most rows for which the step branches on "no row has an adapter"; above, the branch costs more
NONE, MISSING = -1, -2  # slot values: no adapter; an adapter that could not be read


class LowRank(nnx.Module):
    """The adapter slots of one matrix, which consists of `parts` checkpoint matrices.

    a is [parts, slots, rank, in]; b holds one [slots, rank, out] per part. rows i32[rows] is each row's slot, set by
    the program that runs the module.
    """

    def __init__(self, a: Array, b: Sequence[Array]) -> None:
        self.a, self.b = nnx.Param(a), nnx.List([nnx.Param(each) for each in b])
        self.rows: Array | None = nnx.data(None)

    def __call__(self, x: Array, *, as_products: bool) -> Array:
        """Returns the adapters' contribution for x [..., in]. `as_products`: computed in the form of the CPU's
        products."""
        assert self.rows is not None, "the program sets each row's slot first"
        x, shape, made = x.reshape(-1, x.shape[-1]), x.shape[:-1], self._by_mask
        if as_products:
            made = self._if_any_adapter if len(x) <= SKIPPING_ROWS else self._fused
        y = made(x, self.rows)
        return y.reshape(*shape, y.shape[-1])

    def _if_any_adapter(self, x: Array, rows: Array) -> Array:
        """Returns `_own`, or zeros by a branch if no row has an adapter, so that such a step costs nothing extra."""
        nothing = jax.eval_shape(self._fused, x, rows)
        return jax.lax.cond(
            jnp.any(rows != NONE),
            lambda: self._fused(x, rows),
            lambda: jnp.zeros(nothing.shape, nothing.dtype),
        )

    def _by_mask(self, x: Array, rows: Array) -> Array:
        """Multiplies with all slots, with channels of other rows' slots set to zero in between."""
        parts, slots, rank, inputs = self.a.shape
        inner = _contract(x, self.a[...].reshape(-1, inputs), 1).reshape(-1, parts, slots, rank)
        own = jnp.arange(slots, dtype=jnp.int32)[None, :] == rows[:, None]
        inner = jnp.where(own[:, None, :, None], inner, jnp.zeros_like(inner))
        inner = jnp.where((rows == MISSING)[:, None, None, None], jnp.full_like(inner, jnp.nan), inner)
        flat = [inner[:, part].reshape(-1, slots * rank) for part in range(parts)]
        return _joined(
            _contract(each, b[...].reshape(slots * rank, -1), 0) for each, b in zip(flat, self.b, strict=True)
        )

    def _fused(self, x: Array, rows: Array) -> Array:
        """Multiplies with all A factors, then weights each row's own B rows with its own channels."""
        parts, slots, rank, inputs = self.a.shape
        inner = product(x, self.a[...].reshape(-1, inputs), None, MatrixFormat(out_first=True))
        slot = jnp.maximum(rows, 0)
        own = inner.reshape(-1, parts, slots, rank).at[jnp.arange(len(rows)), :, slot].get(mode="promise_in_bounds")
        own = jnp.where((rows == NONE)[:, None, None], jnp.zeros_like(own), own)
        own = jnp.where((rows == MISSING)[:, None, None], jnp.full_like(own, jnp.nan), own)
        return _joined(_weight_rows(own[:, part], b[...], slot * rank) for part, b in enumerate(self.b))


def _joined(made: Iterable[Array]) -> Array:
    parts = list(made)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _contract(rows: Array, matrix: Array, dimension: int) -> Array:
    return jax.lax.dot_general(rows, matrix, (((1,), (dimension,)), ((), ()))).astype(rows.dtype)


def _weight_rows(weights: Array, b: Array, first: Array) -> Array:
    """Returns [rows, out]: each row's weights [rows, rank] times `rank` rows of b [slots, rank, out] from flat row
    `first`.

    Each output is one sum in one order. The terms of one loop iteration are unrolled, at most TERMS of them.
    """
    rank, flat, weights = b.shape[1], b.reshape(-1, b.shape[2]), jax.lax.optimization_barrier(weights)
    size = rank if rank <= TERMS else gcd(rank, TERMS)

    def add(iteration: int | Array, y: Array) -> Array:
        chunk = jax.lax.dynamic_slice_in_dim(weights, iteration * size, size, 1).astype(jnp.float32)
        for term in range(size):
            row = flat.at[first + (iteration * size + term)].get(mode="promise_in_bounds")
            y = y + chunk[:, term, None] * row.astype(jnp.float32)
        return y

    y = jnp.zeros((weights.shape[0], flat.shape[1]), jnp.float32)
    y = add(0, y) if size == rank else jax.lax.fori_loop(0, rank // size, add, y)
    return y.astype(weights.dtype)


def give_rows(module: nnx.Module, rows: Array | None) -> None:
    """Sets each row's adapter slot, i32[rows], in all adapters within the module."""
    if rows is not None:
        for _, each in nnx.iter_modules(module):
            if isinstance(each, LowRank):
                each.rows = rows


@dataclass(frozen=True, slots=True)
class AdapterCapacity:
    """The number of adapter slots, their maximum rank and their dtype; see `room_for`."""

    slots: int
    rank: int
    dtype: DTypeLike


def room_for(adapters: int, rank: int, dtype: DTypeLike) -> AdapterCapacity:
    """Returns a capacity in whole vectors of channels, so that a row's sums have the same order, and bits, in every
    slot. Ranks are rounded up to VECTOR_PART, and slots until all channels together are a multiple of VECTOR."""
    rank = -(-rank // VECTOR_PART) * VECTOR_PART
    every = VECTOR // gcd(rank, VECTOR)
    return AdapterCapacity(-(-adapters // every) * every, rank, dtype)


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """One array of the adapters of a stage: its place in the stage and a shard's part of an adapter."""

    place: int  # index of the layer in its stage
    path: str  # path of the matrix in the layer, such as "attention.qkv"
    parts: tuple[TensorSlice, ...]  # all parts of the matrix for `a`, one part for `b`
    is_a: bool
    room: AdapterCapacity

    @property
    def slot_axis(self) -> int:
        return 1 if self.is_a else 0

    @property
    def cut_axis(self) -> int | None:
        """Dimension that is cut over shards; None if each shard has the whole."""
        if self.parts[0].cut is None:
            return None
        if self.is_a:
            return 3 if self.parts[0].axis == 1 else None
        return 2 if self.parts[0].axis == 0 else None

    def shape(self, tp: int) -> tuple[int, ...]:
        """Returns the shape of one shard's array."""
        part, room = self.parts[0], self.room
        size = part.shape[1] if self.is_a else len(part.rows) if part.rows is not None else part.shape[0]
        if self.cut_axis is not None:
            assert part.cut is not None
            size = part.cut.width(tp)
        return (len(self.parts), room.slots, room.rank, size) if self.is_a else (room.slots, room.rank, size)

    def new_shape(self, tp: int) -> tuple[int, ...]:
        shape = self.shape(tp)
        return shape[: self.slot_axis] + shape[self.slot_axis + 1 :]

    def of(self, weights: AdapterWeights | None, layer: int | None, shard: int, tp: int) -> np.ndarray:
        """Returns one adapter's factor of this shard, f32 `new_shape`; zeros without an adapter or an update of the
        matrix."""
        found = np.zeros(self.new_shape(tp), np.float32)
        for index, part in enumerate(self.parts):
            pair = None if weights is None or layer is None else weights.pairs.get((layer, target_of(part)))
            if pair is None:
                continue
            side = self._cut(pair.a if self.is_a else pair.b, part, shard, tp)
            into = found[index] if self.is_a else found
            into[tuple(slice(0, size) for size in side.shape)] = side
        return found

    def _cut(self, side: np.ndarray, part: TensorSlice, shard: int, tp: int) -> np.ndarray:
        """Returns the shard's rows of [out, rank], transposed, or its columns of [rank, in]."""
        rows, columns = part.index(shard, tp)
        return side[:, columns] if self.is_a else side[rows].T


def factors_of(model: ModelConfig, numbers: Sequence[int], room: AdapterCapacity) -> list[FactorSpec]:
    """Returns the factors of a stage with these layers, in a fixed order: for each matrix a, then every b."""
    return [
        FactorSpec(place, path, parts, is_a, room)
        for place, layer in enumerate(numbers)
        for path, leaf in sorted(adapted_leaves(model, layer).items())
        for parts, is_a in [(leaf.parts, True), *(((part,), False) for part in leaf.parts)]
    ]


def attached(stage: Any, factors: Sequence[FactorSpec], leaves: Sequence[Array]) -> Any:
    grouped: dict[tuple[int, str], list[Array]] = {}
    for factor, leaf in zip(factors, leaves, strict=True):
        grouped.setdefault((factor.place, factor.path), []).append(leaf)
    for (place, path), (a, *b) in grouped.items():
        reduce(getattr, path.split("."), stage.layers[place]).low_rank = LowRank(a, b)
    return stage
