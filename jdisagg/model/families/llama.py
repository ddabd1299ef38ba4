"""Llama 2 and 3: the reference family."""

from jdisagg.model.families.family import ModelFamily, Numbers, biases_of_attention
from jdisagg.model.files import JsonFields


def _numbers(read: JsonFields) -> Numbers:
    return {**biases_of_attention(read), "mlp_bias": read.flag("mlp_bias")}


LLAMA = ModelFamily("llama", "LlamaForCausalLM", {"max_position_embeddings": 2048}, _numbers)
