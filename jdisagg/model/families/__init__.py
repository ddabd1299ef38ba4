"""The supported model families, one entry per architecture name in `config.json`.

Each family's file holds the defaults that `transformers` assumes and the `ModelConfig` fields that differ from a
Llama's. A feature that the network lacks is added to the network first.
"""

from jdisagg.model.families import deepseek, gemma, gpt_oss, llama, mistral, mixtral, olmo2, phi3, qwen, qwen3_moe
from jdisagg.model.families.family import ExpertKeys, ModelFamily

TABLE: tuple[ModelFamily, ...] = (
    llama.LLAMA,
    mistral.MISTRAL,
    mixtral.MIXTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen3_moe.QWEN3_MOE,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.PHI3,
    olmo2.OLMO2,
    gpt_oss.GPT_OSS,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
)
BY_ARCHITECTURE = {family.architecture: family for family in TABLE}
FAMILIES = {family.architecture: family.name for family in TABLE}
# Families that store q, k, v as one tensor and gate, up as another.
FUSED = frozenset(family.name for family in TABLE if family.fused)
EXPERT_NAMES: dict[str, ExpertKeys] = {family.name: family.experts for family in TABLE if family.experts}
