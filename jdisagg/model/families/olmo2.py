"""OLMo 2: norms after attention and MLP instead of before, and over the whole q and k (report, section 3)."""

from jdisagg.model.families.family import ModelFamily, Numbers, biases_of_attention
from jdisagg.model.files import JsonFields


def _numbers(read: JsonFields) -> Numbers:
    return {**biases_of_attention(read), "norms": "after", "qk_norm": True, "qk_norm_is_wide": True}


OLMO2 = ModelFamily("olmo2", "Olmo2ForCausalLM", {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}, _numbers)
