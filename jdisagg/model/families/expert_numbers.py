"""What families with experts say alike."""

from __future__ import annotations

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.families.family import windows_json
from jdisagg.model.files import Fields, Json
from jdisagg.model.limits import MOST_EXPERTS

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
