"""What a family says of itself, and readings that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.files import Fields, Json, shown
from jdisagg.model.rope_config import MOST_EXPERTS, MOST_POSITIONS

Numbers = Mapping[str, Any]  # fields of `ModelConfig`
# null means none, not a default
MEAN_NOTHING = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")


def like_a_llama(read: Fields) -> Numbers:
    return {}


def windows_json(config: ModelConfig) -> Json:
    """Windows as every family reads them: their size, and where they are."""
    window = next(filter(None, config.layer_windows), None)
    kinds = ["full_attention" if each is None else "sliding_attention" for each in config.layer_windows]
    return {"sliding_window": window} | ({"layer_types": kinds} if window is not None else {})


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How checkpoints of a family call a layer's experts."""

    block: str = "mlp"  # of the layer
    router: str = "gate"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False  # one tensor of all experts for each matrix, as gpt-oss has it


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of `transformers`."""

    name: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what transformers assumes where config.json is silent
    numbers: Callable[[Fields], Numbers] = like_a_llama  # what differs from a Llama without biases
    written: Callable[[ModelConfig], Json] = windows_json  # the fields of config.json that say those numbers
    fused: bool = False  # q, k, v are one tensor of the checkpoint, gate and up another
    experts: ExpertNames | None = None

    def silent(self, read: Fields) -> Fields:
        """The file with this family's defaults where it says nothing."""
        said = {key: value for key, value in read.raw.items() if value is not None or key in MEAN_NOTHING}
        return Fields({**self.defaults, **said}, read.place)


def biases_of_attention(read: Fields) -> Numbers:
    biased = read.flag("attention_bias")
    return {"qkv_bias": biased, "o_bias": biased}


def window_size(read: Fields) -> int | None:
    """`sliding_window` in tokens; None where there is none."""
    return read.whole("sliding_window", 1, MOST_POSITIONS)


def layer_windows(read: Fields, window: int | None, implied: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Window of each layer, or () where all are full: by `layer_types`, else where `implied` says of a layer."""
    if window is None:
        return ()
    layers = read.raw["num_hidden_layers"]
    kinds = read.words("layer_types")
    if kinds is None:
        return windows_where(window, [implied(layer) for layer in range(layers)])
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(
            f"{read.place}: layer_types names {len(kinds)} layers of kinds {shown(sorted(set(kinds)))} for {layers}"
            " layers; supported: full_attention, sliding_attention"
        )
    return windows_where(window, [kind == "sliding_attention" for kind in kinds])


def windows_where(window: int, slides: Sequence[bool]) -> tuple[int | None, ...]:
    return tuple(window if each else None for each in slides) if any(slides) else ()


# What families with experts say alike.

NUMBER_KEYS = ("num_local_experts", "num_experts")  # transformers 5 writes the first for all families


def number_of_experts(read: Fields) -> int:
    """How many experts a layer has."""
    key = next((key for key in NUMBER_KEYS if read.raw.get(key) is not None), NUMBER_KEYS[0])
    return read.needed(key, MOST_EXPERTS)


def experts_per_token(read: Fields, number: int) -> int:
    """How many of `number` experts a token is sent to."""
    return read.needed("num_experts_per_tok", number)


def experts_json(config: ModelConfig) -> Json:
    """Windows, and how many experts there are, as the families of here read them."""
    assert config.experts is not None, config
    counts = {"num_local_experts": config.experts.number, "num_experts_per_tok": config.experts.per_token}
    return {**windows_json(config), **counts}
