"""The numbers of a model and the arithmetic over them: weights, KV bytes and FLOPs. No arrays, no files, no tensors.

The engine, the roofline, the simulator's cost models and the planner all count by what is here; what they add is how
fast a chip is, and how a model is cut into stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.kv_layout import heads_per_shard


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequency scaling. `kind` is "linear" or "llama3" (Llama 3.1 technical report, long-context section)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    The last three fields are for models that others published and that only arithmetic knows.
    """

    family: str  # "llama", "mistral", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens, prompt and output together
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before the rotation
    layer_windows: tuple[int | None, ...] = ()  # sliding window per layer in tokens; () means none anywhere
    mlp_matrices: int = 3  # 2 where the MLP has no gate
    latent_size: int = 0  # MLA (DeepSeek-V2, 2024, section 2.1): numbers a token and layer keeps
    active_layer_params: int = 0  # where experts make it another number than the sizes above

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens (a query sees the last `window` tokens, itself included)."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_kind(self) -> str:
        """MHA, GQA (Ainslie et al. 2023) or MLA."""
        if self.latent_size:
            return "MLA"
        return "MHA" if self.num_kv_heads == self.num_heads else "GQA"

    # ------------------------------------------------------------ weights

    def layer_params(self, tp: int = 1) -> int:
        """Weights of one layer's matrices that one of `tp` shards holds; each multiplies and adds once a token.

        Norms and biases are left out: they are noise next to these. KV heads are replicated where tp is over them.
        """
        if self.active_layer_params:
            return self.active_layer_params // tp
        heads = 2 * self.num_heads // tp + 2 * heads_per_shard(self.num_kv_heads, tp)
        mlp = self.mlp_matrices * self.intermediate_size // tp
        return self.hidden_size * (heads * self.head_dim + mlp)

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding, which every shard of the first stage holds whole."""
        return self.vocab_size * self.hidden_size

    def head_params(self, tp: int = 1) -> int:
        """Weights of the head that one of `tp` shards multiplies by: all, where the vocabulary does not divide."""
        return self.embedding_params // (tp if self.vocab_size % tp == 0 else 1)

    def num_params(self) -> int:
        """Weights of all matrices, the embedding counted once when it is tied."""
        embeddings = self.embedding_params * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.layer_params() + embeddings

    # ------------------------------------------------------------ KV

    def layer_kv_size(self, tp: int = 1) -> int:
        """Numbers that one token leaves in the KV cache of one layer of one of `tp` shards."""
        return self.latent_size or 2 * heads_per_shard(self.num_kv_heads, tp) * self.head_dim

    def kv_bytes(self, tokens: float, number_bytes: float = 2.0) -> float:
        """Bytes of the KV of `tokens` tokens, all layers, `number_bytes` for each number of K and V."""
        return self.num_layers * self.layer_kv_size() * tokens * number_bytes

    # ------------------------------------------------------------ FLOPs

    def linear_flops(self, tokens: float, tp: int = 1) -> float:
        """FLOPs of one layer's matrices over `tokens` tokens, on one of `tp` shards."""
        return 2 * self.layer_params(tp) * tokens

    def attention_flops(self, pairs: float, tp: int = 1) -> float:
        """FLOPs of one layer's attention over `pairs` pairs of a query and a key that it sees."""
        return 4 * self.q_size * pairs / tp

    def prefill_flops(self, tokens: float, cached: float = 0.0) -> float:
        """FLOPs of a prompt of `tokens` tokens whose first `cached` are there already, all pairs counted.

        Mooncake (Qin et al., FAST 2025), equation 1; the head is left out.
        """
        return self.num_layers * (self.linear_flops(tokens - cached) + self.attention_flops(tokens**2 - cached**2))
