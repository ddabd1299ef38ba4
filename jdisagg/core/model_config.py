"""The numbers of a model, and nothing else: no arrays, no files, no names of tensors."""

from __future__ import annotations

from dataclasses import dataclass


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
    """One decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

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

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens (a query sees the last `window` tokens, itself included)."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layer_params(self) -> int:
        """Weights of one layer's matrices (norms and biases left out: they are noise next to these)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def num_params(self) -> int:
        """Weights of all matrices, the embedding counted once when it is tied."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.layer_params() + embeddings
