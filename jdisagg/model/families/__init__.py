"""The families that are served: a row each, by the architecture that a `config.json` names.

A family is one small file that says what `transformers` assumes where the file is silent, and which numbers of
`ModelConfig` differ from a Llama's. What the network has no number for yet is added there first.
"""

from jdisagg.model.families import gemma, llama, mistral, olmo2, phi3, qwen
from jdisagg.model.families.family import Family

TABLE: tuple[Family, ...] = (
    llama.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.PHI3,
    olmo2.OLMO2,
)
BY_ARCHITECTURE = {family.architecture: family for family in TABLE}
FAMILIES = {family.architecture: family.name for family in TABLE}
FUSED = frozenset(family.name for family in TABLE if family.fused)  # whose q, k, v and gate, up are one tensor each
