"""The families that are served: a row each, by the architecture that a `config.json` names.

A family is one small file that says what `transformers` assumes where the file is silent, and which numbers of
`ModelConfig` differ from a Llama's. What the network has no number for yet is added there first.
"""

from jdisagg.model.families import deepseek, gemma, gpt_oss, llama, mistral, mixtral, olmo2, phi3, qwen, qwen3_moe
from jdisagg.model.families.family import ExpertNames, Family

TABLE: tuple[Family, ...] = (
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
FUSED = frozenset(family.name for family in TABLE if family.fused)  # whose q, k, v and gate, up are one tensor each
EXPERT_NAMES: dict[str, ExpertNames] = {family.name: family.experts for family in TABLE if family.experts}
