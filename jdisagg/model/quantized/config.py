"""What a checkpoint says of its quantisation: one table from `quant_method` to how its weights are read.

What is not in the table, or would be read wrongly, is refused by name with what was found and what is supported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jdisagg.core.errors import UnsupportedModel
from jdisagg.model.files import Fields, read_json, shown
from jdisagg.model.quantized.awq import AWQ
from jdisagg.model.quantized.awq import BITS as AWQ_BITS
from jdisagg.model.quantized.gptq import GPTQ
from jdisagg.model.quantized.mxfp4 import MXFP4
from jdisagg.model.quantized.packed import Packed
from jdisagg.model.quantized.scaled import Scaled
from jdisagg.model.quantized.scheme import Quantization, Scheme

KEYS = ("quantization_config", "compression_config")  # the second is what compressed-tensors wrote first
MODELOPT_FILE = "hf_quant_config.json"  # where ModelOpt wrote it before it was in config.json
MOST_GROUP = 1 << 20
E4M3 = "float8_e4m3fn"
FP8 = "fp8 e4m3"


def read_quantization(folder: Path) -> Quantization | None:
    """How the weights in `folder` are quantised; None where they are plain. Raises `CheckpointError`."""
    found = quantization_of(Fields(read_json(folder / "config.json"), str(folder / "config.json")))
    if found is not None or not (folder / MODELOPT_FILE).exists():
        return found
    own = Fields(read_json(folder / MODELOPT_FILE), str(folder / MODELOPT_FILE)).part("quantization")
    return None if own is None or own.word("quant_algo") is None else _modelopt(own)


def quantization_of(read: Fields) -> Quantization | None:
    """What a `config.json` says. Raises `UnsupportedModel`."""
    parts = (read.part(key) for key in KEYS)
    said = next((part for part in parts if part is not None and part.raw), None)
    if said is None:
        return None
    method = said.word("quant_method") or ("compressed-tensors" if "config_groups" in said.raw else "unnamed")
    if method not in METHODS:
        raise UnsupportedModel(
            f"{read.place}: quantization {shown(method)} is not supported; supported: {', '.join(METHODS)},"
            " and plain bfloat16, float16, float32"
        )
    return METHODS[method](said)


def _one_of(read: Fields, key: str, supported: tuple[object, ...], default: object = None) -> None:
    """Refuses a value of `key` that is none of `supported`; `default` is what its absence means."""
    value = read.raw.get(key, default)
    if not any(type(value) is type(each) and value == each for each in supported):
        raise UnsupportedModel(
            f"{read.place} has {key} = {shown(value)}, which is not supported; supported:"
            f" {', '.join(str(each) for each in supported)}"
        )


def _group_size(read: Fields, *keys: str) -> int:
    """Inputs that share a scale; 0 where all do, which is written as -1."""
    key = next((key for key in keys if key in read.raw), keys[0])
    size = read.whole(key, -1, MOST_GROUP)
    if size in (None, 0):
        raise read.wrong(key, f"-1, or a whole number from 1 to {MOST_GROUP}")
    return max(size or 0, 0)


def _groups(size: int) -> str:
    return f"groups of {size}" if size else "a scale a row"


def _pair(read: Fields, key: str) -> tuple[int, int] | None:
    value = read.raw.get(key)
    if value is None:
        return None
    good = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
    if not good:
        raise read.wrong(key, "a list of two whole numbers over 0")
    return value[0], value[1]


def _fp8(read: Fields) -> Quantization:
    """DeepSeek V3, Qwen3 (blocks), AutoFP8 and Mistral (a scale a tensor)."""
    _one_of(read, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    _one_of(read, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = _pair(read, "weight_block_size")
    how = "a scale a tensor or row" if block is None else f"blocks of {block[0]} x {block[1]}"
    return Quantization(Scaled(E4M3, block, f"{FP8}, {how}"), activations=True)


def _fbgemm(read: Fields) -> Quantization:
    return Quantization(Scaled(E4M3, label=f"{FP8}, a scale a row"), activations=True)


def _modelopt(read: Fields) -> Quantization:
    _one_of(read, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
    kv = read.raw.get("kv_cache_quant_algo") or read.raw.get("kv_cache_scheme")
    return Quantization(Scaled(E4M3, label=f"{FP8}, a scale a tensor or row"), activations=True, kv_cache=bool(kv))


def _awq(read: Fields) -> Quantization:
    _one_of(read, "bits" if "bits" in read.raw else "w_bit", (AWQ_BITS,), AWQ_BITS)
    _one_of(read, "zero_point", (True,), True)
    layout = "version" if "version" in read.raw else "format"
    _one_of(read, layout, ("gemm", "GEMM"), "gemm")
    size = _group_size(read, "group_size", "q_group_size")
    return Quantization(AWQ(size, f"awq of {AWQ_BITS} bits, {_groups(size)}"))


def _gptq(read: Fields) -> Quantization:
    _one_of(read, "bits", (2, 4, 8))
    key = "checkpoint_format" if "checkpoint_format" in read.raw else "format"
    _one_of(read, key, ("gptq", "gptq_v2"), "gptq")
    _one_of(read, "pack_dtype", ("int32",), "int32")
    _one_of(read, "is_marlin_format", (False,), False)
    dynamic = read.part("dynamic")
    if dynamic is not None and any(not rule.startswith("-:") for rule in dynamic.raw):
        raise read.wrong("dynamic", 'rules that begin with "-:", which leave modules as they are')
    bits, size = read.needed("bits", 8), _group_size(read, "group_size")
    offset = 0 if read.raw.get(key) == "gptq_v2" else 1
    label = f"gptq of {bits} bits, {_groups(size)}"
    return Quantization(GPTQ(bits, size, read.flag("desc_act"), offset, label))


def _mxfp4(read: Fields) -> Quantization:
    return Quantization(MXFP4())


def _compressed_tensors(read: Fields) -> Quantization:
    """One way of quantising weights for all groups; a folder of several is refused."""
    _one_of(read, "quantization_status", ("compressed", "frozen"), "compressed")
    sparsity, transform = read.part("sparsity_config"), read.part("transform_config")
    if sparsity is not None and sparsity.raw:
        _one_of(sparsity, "format", ("dense",))
    if transform is not None and transform.raw:
        raise read.wrong("transform_config", "none")
    groups = read.part("config_groups")
    kinds = [groups.part(name) for name in groups.raw] if groups is not None else []
    found = {_of_group(read, kind) for kind in kinds if kind is not None and kind.raw.get("weights") is not None}
    if len(found) != 1:
        labels = "; ".join(sorted(scheme.label for scheme in found)) or "none"
        raise UnsupportedModel(f"{read.place} config_groups quantise weights as {labels}; supported: one way for all")
    keys = ("input_activations", "output_activations")
    activations = any(kind.raw.get(key) for kind in kinds if kind is not None for key in keys)
    return Quantization(found.pop(), activations, kv_cache=bool(read.raw.get("kv_cache_scheme")))


def _of_group(read: Fields, group: Fields) -> Scheme:
    own = group if group.raw.get("format") is not None else read
    _one_of(own, "format", ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"))
    weights = group.part("weights")
    assert weights is not None
    _one_of(weights, "dynamic", (False, None), False)
    _one_of(weights, "type", ("int", "float"), "int")
    if own.raw["format"] == "pack-quantized":
        return _packed(weights)
    _one_of(weights, "num_bits", (8,), 8)
    block, how = _sharing(weights)
    is_float = weights.raw.get("type") == "float"
    return Scaled(E4M3 if is_float else "int8", block, f"{FP8 if is_float else 'int8'}, {how}")


def _sharing(weights: Fields) -> tuple[tuple[int, int] | None, str]:
    """The rows and columns that share a scale, and in words."""
    _one_of(weights, "strategy", ("tensor", "channel", "group", "block"), "tensor")
    match weights.raw.get("strategy"):
        case "group":
            size = _group_size(weights, "group_size")
            return ((1, size), _groups(size)) if size else (None, _groups(size))
        case "block":
            block = _pair(weights, "block_structure")
            if block is None:
                raise weights.wrong("block_structure", "a list of two whole numbers over 0")
            return block, f"blocks of {block[0]} x {block[1]}"
        case "channel":
            return None, "a scale a row"
    return None, "a scale a tensor"


def _packed(weights: Fields) -> Scheme:
    _one_of(weights, "type", ("int",), "int")
    _one_of(weights, "num_bits", (4, 8), 8)
    _one_of(weights, "strategy", ("group", "channel"))
    bits = weights.needed("num_bits", 8)
    size = _group_size(weights, "group_size") if weights.raw["strategy"] == "group" else 0
    symmetric = weights.flag("symmetric") or "symmetric" not in weights.raw
    label = f"packed int{bits}, {_groups(size)}"
    return Packed(bits, size, not symmetric, weights.raw.get("actorder") == "group", label)


METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
