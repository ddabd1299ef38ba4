"""LLaMA3-70B as Mooncake counts it (Qin et al., FAST 2025, table 3): 22 FLOPs a token, layer and hidden_size**2."""

from dataclasses import replace

from jdisagg.sim.arithmetic import model

MOONCAKE_70B = replace(
    model("llama3-70b"), family="llama3-70b as Mooncake counts", active_layer_params=11 * 8192**2, vocab_size=0
)
