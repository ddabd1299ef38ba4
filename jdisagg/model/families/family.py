"""The description of a model family, and config readers that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdisagg.core.errors import UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.files import Json, JsonFields, shown
from jdisagg.model.rope_config import MOST_EXPERTS, MOST_POSITIONS

Numbers = Mapping[str, Any]  # fields of `ModelConfig`
# keys for which null means "none", not the default
MEAN_NOTHING = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")


def like_a_llama(read: JsonFields) -> Numbers:
    return {}


def windows_json(config: ModelConfig) -> Json:
    """Returns the sliding-window fields of `config.json`: the size, and the type of each layer."""
    window = next(filter(None, config.layer_windows), None)
    kinds = ["full_attention" if each is None else "sliding_attention" for each in config.layer_windows]
    return {"sliding_window": window} | ({"layer_types": kinds} if window is not None else {})


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The names that checkpoints of a family give to a layer's experts."""

    block: str = "mlp"  # name of the layer's MLP block
    router: str = "gate"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: bool = False  # all experts in one tensor per matrix, as in gpt-oss


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture of `transformers`: its defaults, its differences from Llama and its tensor names."""

    name: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' values for keys that config.json omits
    numbers: Callable[[JsonFields], Numbers] = (
        like_a_llama  # `ModelConfig` fields that differ from a Llama without biases
    )
    written: Callable[[ModelConfig], Json] = windows_json  # the config.json fields for those numbers
    fused: bool = False  # q, k, v are one tensor of the checkpoint, gate and up another
    experts: ExpertKeys | None = None

    def silent(self, read: JsonFields) -> JsonFields:
        """Returns the fields of the file with this family's defaults for absent ones."""
        given = {key: value for key, value in read.raw.items() if value is not None or key in MEAN_NOTHING}
        return JsonFields({**self.defaults, **given}, read.place)


def biases_of_attention(read: JsonFields) -> Numbers:
    biased = read.flag("attention_bias")
    return {"qkv_bias": biased, "o_bias": biased}


def window_size(read: JsonFields) -> int | None:
    return read.whole("sliding_window", 1, MOST_POSITIONS)


def layer_windows(read: JsonFields, window: int | None, implied: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Returns the window of each layer, or () if all attend fully: from `layer_types`, else from `implied(layer)`."""
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


# Fields that families with experts share.

NUMBER_KEYS = ("num_local_experts", "num_experts")  # transformers 5 writes the first for all families


def number_of_experts(read: JsonFields) -> int:
    key = next((key for key in NUMBER_KEYS if read.raw.get(key) is not None), NUMBER_KEYS[0])
    return read.needed(key, MOST_EXPERTS)


def experts_per_token(read: JsonFields, number: int) -> int:
    return read.needed("num_experts_per_tok", number)


def experts_json(config: ModelConfig) -> Json:
    """Returns the `config.json` fields of windows and expert counts."""
    assert config.experts is not None, config
    counts = {"num_local_experts": config.experts.number, "num_experts_per_tok": config.experts.per_token}
    return {**windows_json(config), **counts}
