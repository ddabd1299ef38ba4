"""A Hugging Face folder's `config.json` and `generation_config.json` become our numbers; no tensor is touched here.

Both spellings are read: the old one (`rope_theta` and `rope_scaling` at the top) and the one transformers 5 writes
(`rope_parameters`). What a file leaves out has the value transformers gives it. What this project cannot compute
exactly is refused by name, never approximated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig, RopeScaling
from jdisagg.core.request import MAX_STOP_TOKENS
from jdisagg.model.files import Fields, Json, read_json, shown

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "linear", "llama3")
SAMPLING_RANGES = {  # [low, high] of what a generation config may say; (low, high] where low is 0 and in OPEN
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}
OPEN = ("top_p", "repetition_penalty")
# The most that a config may ask for, far over any published model: what it says is looped over and allocated.
MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM = 512, 4096, 4096
MOST_CHANNELS, MOST_VOCAB, MOST_POSITIONS = 1 << 20, 1 << 24, 1 << 27
MOST_FACTOR = 1e6  # of rotary frequencies
MOST_THETA = 1e15
# What transformers assumes where a family's file is silent (the rest is the same in all four).
DEFAULT_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
DEFAULT_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}
DEFAULT_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about ending and sampling when a request is silent."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)  # only the keys of SAMPLING_RANGES the file has


def read_config(folder: str | Path) -> ModelConfig:
    """Numbers of the model in `folder`, which needs nothing but its `config.json`. Raises `CheckpointError`."""
    path = Path(folder) / "config.json"
    return parse_config(read_json(path), str(path))


def parse_config(raw: Json, place: str = "config.json") -> ModelConfig:
    """`config.json` as a mapping -> `ModelConfig`; `place` names it in messages. Raises `UnsupportedModel`."""
    read = Fields(raw, place)
    family = _family(read)
    _refuse_options(read)
    heads, hidden = read.needed("num_attention_heads", MOST_HEADS), read.needed("hidden_size", MOST_CHANNELS)
    layers = read.needed("num_hidden_layers", MOST_LAYERS)
    kv_heads, head_dim = _attention(read, family, heads, hidden)
    theta, scaling = _rope(read)
    attention_bias = read.flag("attention_bias") and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=read.needed("vocab_size", MOST_VOCAB),
        hidden_size=hidden,
        intermediate_size=read.needed("intermediate_size", MOST_CHANNELS),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_positions(read) or DEFAULT_POSITIONS[family],
        rms_norm_eps=_or(read.number("rms_norm_eps", 0.0, 1.0), 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=read.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        layer_windows=_windows(read, family, layers),
    )


def _or(found: float | None, default: float) -> float:
    return default if found is None else found


def _positions(read: Fields) -> int | None:
    return read.whole("max_position_embeddings", 1, MOST_POSITIONS)


def _family(read: Fields) -> str:
    names = read.words("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    found = ", ".join(names)[:200] or f"none named (model_type {shown(read.raw.get('model_type'))})"
    raise UnsupportedModel(f"{read.place}: architecture {found} is not supported; supported: {', '.join(FAMILIES)}")


def _refuse_options(read: Fields) -> None:
    act = read.word("hidden_act")
    if act not in (None, "silu", "swish"):
        raise UnsupportedModel(f"{read.place}: hidden_act {shown(act)} is not supported; supported: silu")
    quantized = read.part("quantization_config")
    if quantized is not None and quantized.raw:
        method = quantized.raw.get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"{read.place}: quantization {shown(method)} is not supported;"
            " supported: bfloat16, float16, float32 weights"
        )


def _attention(read: Fields, family: str, heads: int, hidden: int) -> tuple[int, int]:
    """(KV heads, numbers a head): heads share KV evenly, and rotation needs pairs."""
    kv_heads = read.whole("num_key_value_heads", 1, MOST_HEADS) or DEFAULT_KV_HEADS[family] or heads
    head_dim = read.whole("head_dim", 2, MOST_HEAD_DIM) or DEFAULT_HEAD_DIM[family] or hidden // heads
    if heads % kv_heads:
        raise read.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads} ({kv_heads} is none)")
    if head_dim % 2 or not head_dim:
        raise read.wrong("head_dim", f"an even number ({head_dim} is none)")
    return kv_heads, head_dim


def _rope(read: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    old, new = read.part("rope_scaling"), read.part("rope_parameters")
    rope = next((each for each in (new, old) if each is not None and each.raw), Fields({}, read.place))
    nested = [key for key, value in rope.raw.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModel(
            f"{read.place}: rope parameters that differ by layer type ({shown(nested)}) are not supported"
        )
    theta = _theta(rope) or _theta(read) or 10_000.0
    kind = rope.word("rope_type") or rope.word("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"{read.place}: rope type {shown(kind)} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    for partial in (rope.number("partial_rotary_factor", 0, 1), read.number("partial_rotary_factor", 0, 1)):
        if partial not in (None, 1.0):
            raise UnsupportedModel(f"{read.place}: partial_rotary_factor {partial} is not supported; supported: 1.0")
    return theta, None if kind == "default" else _scaling(read, rope, kind)


def _theta(read: Fields) -> float | None:
    return read.number("rope_theta", 0.0, MOST_THETA, open_low=True)


def _scaling(read: Fields, rope: Fields, kind: str) -> RopeScaling:
    needed = ["factor"] if kind == "linear" else ["factor", "low_freq_factor", "high_freq_factor"]
    found = {key: rope.number(key, 0.0, MOST_FACTOR, open_low=True) for key in needed}
    factors = {key: value for key, value in found.items() if value is not None}
    missing = [key for key in needed if key not in factors]
    if missing:
        raise UnsupportedModel(
            f"{rope.place} rope type {kind!r} needs {', '.join(missing)}; found {shown(sorted(rope.raw))}"
        )
    if kind == "linear":
        return RopeScaling("linear", factors["factor"])
    if factors["low_freq_factor"] >= factors["high_freq_factor"]:
        raise rope.wrong("low_freq_factor", f"less than high_freq_factor = {factors['high_freq_factor']:g}")
    key = "original_max_position_embeddings"
    originals = (each.whole(key, 1, MOST_POSITIONS) for each in (read, rope))
    original = next(filter(None, originals), None) or _positions(read) or DEFAULT_POSITIONS["llama"]
    return RopeScaling("llama3", **factors, original_max_position=original)


def _windows(read: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """Window of each layer, or () where all are full: by `layer_types`, else by the family's own rule."""
    window = _window_size(read, family)
    if window is None:
        return ()
    kinds = read.words("layer_types") or _implied_kinds(read, family, layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(
            f"{read.place}: layer_types names {len(kinds)} layers of kinds {shown(sorted(set(kinds)))} for {layers}"
            " layers; supported: full_attention, sliding_attention"
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _window_size(read: Fields, family: str) -> int | None:
    said = read.whole("sliding_window", 1, MOST_POSITIONS)
    if "sliding_window" not in read.raw:
        said = 4096
    if family == "mistral" or (family in ("qwen2", "qwen3") and read.flag("use_sliding_window")):
        return said
    return None


def _implied_kinds(read: Fields, family: str, layers: int) -> list[str]:
    """Mistral slides in every layer; Qwen from `max_window_layers` up."""
    said = read.whole("max_window_layers", 0, MOST_POSITIONS)
    full = 0 if family == "mistral" else 28 if said is None else said
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """End tokens and sampling defaults: `generation_config.json`, then `config.json` for what it leaves out."""
    path, model_path = Path(folder) / "generation_config.json", Path(folder) / "config.json"
    own = Fields(read_json(path) if path.exists() else {}, str(path))
    model = Fields(read_json(model_path), str(model_path))
    vocab_size = model.whole("vocab_size", 1, MOST_VOCAB) or MOST_VOCAB
    eos, bos = (_ids(own if key in own.raw else model, key, vocab_size) for key in ("eos_token_id", "bos_token_id"))
    sampling = {
        key: value
        for key, (low, high) in SAMPLING_RANGES.items()
        if (value := own.number(key, low, high, open_low=key in OPEN)) is not None
    }
    if own.flag("do_sample") is False and "do_sample" in own.raw:
        sampling = {"temperature": 0.0}
    return GenerationDefaults(eos, bos[0] if bos else None, sampling)


def _ids(read: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    return read.ids(key, MAX_STOP_TOKENS, vocab_size) or ()
