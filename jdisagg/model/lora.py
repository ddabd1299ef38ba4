"""An adapter's folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`, read and checked.

What would change what an adapter means and is not served is refused by name: weights that depend on the base's
(DoRA, PiSSA), whole modules beside the matrices, biases, layers that are repeated.
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
from jdisagg.model.files import Fields, first_line, read_json, regular
from jdisagg.model.names import Leaf, Part, layer_leaves
from jdisagg.model.products import MatrixForm, product
from jdisagg.model.sources import FLOATS, STORED

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = 8 << 30  # of an adapter's weights
LARGEST_RANK = 1024
_MATRIX = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
SPARSE, SHARED = ("mlp.gate_up", "mlp.down"), "mlp.shared."
# What PEFT writes where an adapter is more than two small matrices beside each it names, or other ones.
OTHERWISE = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "layer_replication"),
    *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "fan_in_fan_out", "arrow_config"),
)
ABOUT_BASE = ("pissa", "olora", "corda")  # ways to begin that take something away from the base


class Pair(NamedTuple):
    """What is added to one matrix: [out, rank] by [rank, in], scaled already. In f32."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True)
class AdapterWeights:
    """All of an adapter, on the host, by layer of the model and the name of a matrix in it, as "self_attn.q_proj"."""

    adapter: Adapter
    rank: int  # the largest
    pairs: Mapping[tuple[int, str], Pair]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for pair in self.pairs.values() for part in pair)


def adapted_leaves(config: ModelConfig, layer: int) -> dict[str, Leaf]:
    """The matrices of a layer that adapters may add to, by their place in it, as "attention.qkv"; experts are none."""
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


def target_of(part: Part) -> str:
    """The name in its layer of the checkpoint's matrix, as "self_attn.q_proj"."""
    return part.name.strip(".").removesuffix(".weight")


def identified(name: str, folder: str) -> Adapter:
    """The adapter in `folder`, by what its files are now. Raises CheckpointError."""
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
    """Reads and checks it. Raises CheckpointError, which names the adapter, the field or tensor, and both values."""
    try:
        if identified(adapter.name, adapter.folder) != adapter:
            raise CheckpointError(f"the files of {adapter.folder} are others than when it was loaded; load it again")
        settings = _Settings(Fields(read_json(Path(adapter.folder) / CONFIG_FILE), CONFIG_FILE))
        tensors = dict(_tensors(Path(adapter.folder) / WEIGHTS_FILE))
        pairs = _pairs(tensors, settings, _shapes(model), max_rank)
    except CheckpointError as error:
        told = str(error)
        raise type(error)(told if adapter.name in told else f"adapter {adapter.name}: {told}") from error
    return AdapterWeights(adapter, max(len(pair.a) for pair in pairs.values()), pairs)


class _Settings:
    """What `adapter_config.json` says of ranks and scales."""

    def __init__(self, fields: Fields) -> None:
        kind = fields.word("peft_type")
        if kind != "LORA":
            raise fields.wrong("peft_type", '"LORA"')
        for key in OTHERWISE:
            if fields.raw.get(key):
                raise fields.wrong(key, "nothing of the kind: only plain LoRA is served")
        if fields.raw.get("bias") not in (None, "none"):
            raise fields.wrong("bias", '"none"')
        begun = fields.raw.get("init_lora_weights")
        if isinstance(begun, str) and begun.startswith(ABOUT_BASE):
            raise fields.wrong("init_lora_weights", "an adapter of the base as it is; PEFT can convert it to one")
        self.rank, self.rooted = fields.needed("r", LARGEST_RANK), fields.flag("use_rslora")
        alpha = fields.number("lora_alpha", -1e6, 1e6)
        self.alpha = 8.0 if alpha is None else alpha
        self.ranks, self.alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")

    def rank_of(self, module: str) -> int:
        return int(_matched(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        return _matched(self.alphas, module, self.alpha) / (sqrt(rank) if self.rooted else rank)


def _pattern(fields: Fields, key: str) -> dict[re.Pattern[str], float]:
    """Numbers by patterns of modules' names, the way PEFT reads them."""
    part, found = fields.part(key), dict[re.Pattern[str], float]()
    for pattern in part.raw if part else ():
        assert part is not None
        try:
            found[re.compile(rf"(?:.*\.)?(?:{pattern})$")] = part.number(pattern, 0, 1e6, open_low=True) or 0.0
        except re.error as error:
            raise part.wrong(pattern, f"a number by a regular expression: {error}") from error
    return found


def _matched(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
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
    """[out, in] of every matrix that may be adapted."""
    return {
        (layer, target_of(part)): part.shape
        for layer in range(model.num_layers)
        for leaf in adapted_leaves(model, layer).values()
        for part in leaf.parts
    }


def _pairs(
    tensors: Mapping[str, np.ndarray],
    settings: _Settings,
    shapes: Mapping[tuple[int, str], tuple[int, ...]],
    max_rank: int,
) -> dict[tuple[int, str], Pair]:
    halves: dict[tuple[int, str], dict[str, tuple[str, np.ndarray]]] = {}
    for name, tensor in tensors.items():
        found = _MATRIX.fullmatch(name)
        place = (int(found[1]), found[2]) if found is not None else (-1, "")
        if found is None or place not in shapes:
            able = ", ".join(dict.fromkeys(target.rpartition(".")[2] for _, target in shapes))
            raise UnsupportedModel(f"tensor {name[:200]} adds to no matrix that adapters of this model may: {able}")
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
    settings: _Settings,
    shape: tuple[int, ...],
    max_rank: int,
) -> Pair:
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
    return Pair(half["A"][1], half["B"][1] * np.float32(settings.scale_of(module, rank)))


# Adapters in a batch: each row of a step adds its own one's two small products to those of the model's matrices.
#
# A matrix has room for so many adapters of so large a rank, side by side in one pair of arrays. All rows are
# multiplied with all first halves, so that the product is of a fixed shape, written as the model's own are
# (`products.py`), and a row has the same bits whatever the others ask for. Of its `slots * rank` channels each
# row needs `rank`. Accelerators set the others to zero and multiply with all second halves too. A CPU's products
# cost more than they compute: there a row's own channels weigh the rows of its own second half, one sum a number,
# which is a loop that XLA joins with what comes after it. Eight rows of 1,280 outputs, eight slots of rank 8: 30
# us as a product, and 9 beside it; 20 so.

VECTOR, VECTOR_PART = 16, 4  # numbers that the CPU's products add up side by side
TERMS = 32  # of a sum that one loop has: beyond, compilers take seconds and its rows are out of the cache
SKIPPING_ROWS = 64  # the most that skip what none of them asks for: a wider step's loops lose more by the branch
NONE, MISSING = -1, -2  # in the place of a row's slot: the model alone; one that could not be read


class LowRank(nnx.Module):
    """The adapters of one matrix, which is `parts` of the checkpoint's side by side.

    a [parts, slots, rank, in]; b of each part [slots, rank, out]. rows i32[rows]: each row's slot, which the program
    that runs it sets.
    """

    def __init__(self, a: Array, b: Sequence[Array]) -> None:
        self.a, self.b = nnx.Param(a), nnx.List([nnx.Param(each) for each in b])
        self.rows: Array | None = nnx.data(None)

    def __call__(self, x: Array, *, as_products: bool) -> Array:
        """What is added to the product of x [..., in] with the matrix; `as_products`: written as those of the CPU."""
        assert self.rows is not None, "the program sets each row's slot first"
        x, shape, made = x.reshape(-1, x.shape[-1]), x.shape[:-1], self._masked
        if as_products:
            made = self._where_asked if len(x) <= SKIPPING_ROWS else self._own
        y = made(x, self.rows)
        return y.reshape(*shape, y.shape[-1])

    def _where_asked(self, x: Array, rows: Array) -> Array:
        """As `_own`, or nothing at all where no row asks for any: a step then takes what it takes without room."""
        nothing = jax.eval_shape(self._own, x, rows)
        return jax.lax.cond(
            jnp.any(rows != NONE),
            lambda: self._own(x, rows),
            lambda: jnp.zeros(nothing.shape, nothing.dtype),
        )

    def _masked(self, x: Array, rows: Array) -> Array:
        """By products of all slots, what is not a row's own set to zero between them."""
        parts, slots, rank, inputs = self.a.shape
        inner = _contract(x, self.a[...].reshape(-1, inputs), 1).reshape(-1, parts, slots, rank)
        own = jnp.arange(slots, dtype=jnp.int32)[None, :] == rows[:, None]
        inner = jnp.where(own[:, None, :, None], inner, jnp.zeros_like(inner))
        inner = jnp.where((rows == MISSING)[:, None, None, None], jnp.full_like(inner, jnp.nan), inner)
        flat = [inner[:, part].reshape(-1, slots * rank) for part in range(parts)]
        return _joined(
            _contract(each, b[...].reshape(slots * rank, -1), 0) for each, b in zip(flat, self.b, strict=True)
        )

    def _own(self, x: Array, rows: Array) -> Array:
        """By a product of all slots, of which each row takes its own channels, and the rows of b that they weigh."""
        parts, slots, rank, inputs = self.a.shape
        inner = product(x, self.a[...].reshape(-1, inputs), None, MatrixForm(out_first=True))
        slot = jnp.maximum(rows, 0)
        own = inner.reshape(-1, parts, slots, rank).at[jnp.arange(len(rows)), :, slot].get(mode="promise_in_bounds")
        own = jnp.where((rows == NONE)[:, None, None], jnp.zeros_like(own), own)
        own = jnp.where((rows == MISSING)[:, None, None], jnp.full_like(own, jnp.nan), own)
        return _joined(_weighed(own[:, part], b[...], slot * rank) for part, b in enumerate(self.b))


def _joined(made: Iterable[Array]) -> Array:
    parts = list(made)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _contract(rows: Array, matrix: Array, dimension: int) -> Array:
    return jax.lax.dot_general(rows, matrix, (((1,), (dimension,)), ((), ()))).astype(rows.dtype)


def _weighed(weights: Array, b: Array, first: Array) -> Array:
    """[rows, rank] of b [slots, rank, out], each row's from row `first` of them all on -> [rows, out].

    Each number is one sum in one order. A loop's terms are written out, more than TERMS loop by loop.
    """
    rank, flat, weights = b.shape[1], b.reshape(-1, b.shape[2]), jax.lax.optimization_barrier(weights)
    size = rank if rank <= TERMS else gcd(rank, TERMS)

    def add(turn: int | Array, y: Array) -> Array:
        few = jax.lax.dynamic_slice_in_dim(weights, turn * size, size, 1).astype(jnp.float32)
        for term in range(size):
            row = flat.at[first + (turn * size + term)].get(mode="promise_in_bounds")
            y = y + few[:, term, None] * row.astype(jnp.float32)
        return y

    y = jnp.zeros((weights.shape[0], flat.shape[1]), jnp.float32)
    y = add(0, y) if size == rank else jax.lax.fori_loop(0, rank // size, add, y)
    return y.astype(weights.dtype)


def give_rows(module: nnx.Module, rows: Array | None) -> None:
    """Says which adapter each row asks for, i32[rows], to all within the module."""
    if rows is not None:
        for _, each in nnx.iter_modules(module):
            if isinstance(each, LowRank):
                each.rows = rows


@dataclass(frozen=True, slots=True)
class AdapterCapacity:
    """For how many adapters, of what rank at most, in numbers of what kind; see `room_for`."""

    slots: int
    rank: int
    dtype: DTypeLike


def room_for(adapters: int, rank: int, dtype: DTypeLike) -> AdapterCapacity:
    """Of whole vectors of channels: else a row's sums have another order, and other bits, in one slot than in another.

    Ranks are filled up to VECTOR_PART, and slots until all channels together are a multiple of VECTOR.
    """
    rank = -(-rank // VECTOR_PART) * VECTOR_PART
    every = VECTOR // gcd(rank, VECTOR)
    return AdapterCapacity(-(-adapters // every) * every, rank, dtype)


@dataclass(frozen=True, slots=True)
class Factor:
    """One array of `LowRank`: where it belongs in a stage, and what of an adapter a shard has in it."""

    place: int  # of the layer in its stage
    path: str  # of the matrix in the layer, as "attention.qkv"
    parts: tuple[Part, ...]  # all of the matrix's for `a`, one for a `b`
    is_a: bool
    room: AdapterCapacity

    @property
    def slot_axis(self) -> int:
        return 1 if self.is_a else 0

    @property
    def cut_axis(self) -> int | None:
        """The dimension that shards divide; None where each has all."""
        if self.parts[0].cut is None:
            return None
        if self.is_a:
            return 3 if self.parts[0].axis == 1 else None
        return 2 if self.parts[0].axis == 0 else None

    def shape(self, tp: int) -> tuple[int, ...]:
        """Of one shard."""
        part, room = self.parts[0], self.room
        size = part.shape[1] if self.is_a else len(part.rows) if part.rows is not None else part.shape[0]
        if self.cut_axis is not None:
            assert part.cut is not None
            size = part.cut.width(tp)
        return (len(self.parts), room.slots, room.rank, size) if self.is_a else (room.slots, room.rank, size)

    def new_shape(self, tp: int) -> tuple[int, ...]:
        """Of one adapter of it."""
        shape = self.shape(tp)
        return shape[: self.slot_axis] + shape[self.slot_axis + 1 :]

    def of(self, weights: AdapterWeights | None, layer: int | None, shard: int, tp: int) -> np.ndarray:
        """One adapter's numbers of this shard, f32 `new_shape`; zeros of none, or where it adds nothing."""
        found = np.zeros(self.new_shape(tp), np.float32)
        for index, part in enumerate(self.parts):
            pair = None if weights is None or layer is None else weights.pairs.get((layer, target_of(part)))
            if pair is None:
                continue
            side = self._cut(pair.a if self.is_a else pair.b, part, shard, tp)
            into = found[index] if self.is_a else found
            into[tuple(slice(0, size) for size in side.shape)] = side
        return found

    def _cut(self, side: np.ndarray, part: Part, shard: int, tp: int) -> np.ndarray:
        """The part's rows of [out, rank], or its columns of [rank, in]: those that the shard has of the matrix."""
        rows, columns = part.index(shard, tp)
        return side[:, columns] if self.is_a else side[rows].T


def factors_of(model: ModelConfig, numbers: Sequence[int], room: AdapterCapacity) -> list[Factor]:
    """Of a stage with these layers, in a fixed order: of each matrix a, then every b."""
    return [
        Factor(place, path, parts, is_a, room)
        for place, layer in enumerate(numbers)
        for path, leaf in sorted(adapted_leaves(model, layer).items())
        for parts, is_a in [(leaf.parts, True), *(((part,), False) for part in leaf.parts)]
    ]


def attached(stage: Any, factors: Sequence[Factor], leaves: Sequence[Array]) -> Any:
    """The stage, its matrices with their adapters."""
    grouped: dict[tuple[int, str], list[Array]] = {}
    for factor, leaf in zip(factors, leaves, strict=True):
        grouped.setdefault((factor.place, factor.path), []).append(leaf)
    for (place, path), (a, *b) in grouped.items():
        reduce(getattr, path.split("."), stage.layers[place]).low_rank = LowRank(a, b)
    return stage
