"""LLaMA3-70B as Mooncake counts it (Qin et al., FAST 2025, table 3): 22 FLOPs a token, layer and hidden_size**2.

That is 11 hidden_size**2 weights a layer: 2.25 of attention, and 8.75 of an MLP of two matrices.
"""

from dataclasses import replace

from jdisagg.sim.arithmetic import model

MOONCAKE_70B = replace(
    model("llama3-70b"),
    family="llama3-70b as Mooncake counts",
    mlp_matrices=2,
    intermediate_size=35 * 8192 // 8,
    vocab_size=0,
)
