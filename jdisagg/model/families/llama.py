"""Llama 2 and 3: the reference family."""

from jdisagg.model.families.family import Family, Numbers, biases_of_attention
from jdisagg.model.files import Fields


def _numbers(read: Fields) -> Numbers:
    return {**biases_of_attention(read), "mlp_bias": read.flag("mlp_bias")}


LLAMA = Family("llama", "LlamaForCausalLM", {"max_position_embeddings": 2048}, _numbers)
