"""An adapter's folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`, read and checked.

What would change what an adapter means and is not served is refused by name: weights that depend on the base's
(DoRA, PiSSA), whole modules beside the matrices, biases, layers that are repeated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jdisagg.core.adapters import Adapter
from jdisagg.core.errors import CheckpointError, MissingTensor, UnsupportedModel, WrongDtype, WrongShape
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.files import Fields, first_line, read_json, regular
from jdisagg.model.names import Leaf, Part, layer_leaves
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
