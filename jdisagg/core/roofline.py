"""The least time a step can take on a chip: bytes over the memory's speed, or FLOPs over the peak, whichever is more.

Counted for one device of a stage. Every weight is read once a step, every held token's K and V once; activations and
collectives count nothing, so no program can be faster than its floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.kv_layout import heads_per_shard
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.targets import Chip


@dataclass(frozen=True, slots=True)
class Work:
    """What one device does in one step."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    flops: float = 0.0

    def floor_s(self, chip: Chip) -> float:
        return max(self.memory_s(chip), self.flops / chip.flops_per_s)

    def memory_s(self, chip: Chip) -> float:
        return (self.weight_bytes + self.kv_bytes) / chip.memory_bytes_per_s

    def bound(self, chip: Chip) -> str:
        return "memory" if self.memory_s(chip) >= self.flops / chip.flops_per_s else "compute"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `tp` shards of a run of layers, and the bytes of a weight and of a K or V number."""

    model: ModelConfig
    layers: range
    tp: int
    weight_bytes: int
    kv_bytes: int

    @property
    def layer_params(self) -> float:
        """Weights of one layer's matrices that this shard holds."""
        kv_heads = heads_per_shard(self.model.num_kv_heads, self.tp)
        heads = 2 * self.model.num_heads // self.tp + 2 * kv_heads
        return self.model.hidden_size * (heads * self.model.head_dim + 3 * self.model.intermediate_size / self.tp)

    @property
    def head_params(self) -> float:
        """Those of the head, whether or not this stage has it."""
        shards = self.tp if self.model.vocab_size % self.tp == 0 else 1
        return self.model.vocab_size * self.model.hidden_size / shards

    @property
    def held_bytes(self) -> float:
        """Bytes of the weights that this shard keeps: the embedding is whole on every shard of the first stage."""
        params = len(self.layers) * self.layer_params
        if self.layers.start == 0:
            params += self.model.vocab_size * self.model.hidden_size
        if self.layers.stop == self.model.num_layers and not self._head_is_embedding:
            params += self.head_params
        return params * self.weight_bytes

    @property
    def _head_is_embedding(self) -> bool:
        return self.model.tie_embeddings and self.tp == 1 and self.layers.start == 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one layer."""
        return 2 * heads_per_shard(self.model.num_kv_heads, self.tp) * self.model.head_dim * self.kv_bytes

    def seen(self, tokens: int) -> int:
        """Tokens that a query at the end of `tokens` sees, summed over the layers."""
        windows = (self.model.window(layer) for layer in self.layers)
        return sum(tokens if window is None else min(tokens, window) for window in windows)

    def decode(self, slots: int, context_tokens: int) -> Work:
        """One token of each of `slots` sequences that hold `context_tokens`; the last stage makes logits as well."""
        params = len(self.layers) * self.layer_params
        if self.layers.stop == self.model.num_layers:
            params += self.head_params
        seen = slots * self.seen(context_tokens)
        flops = 2 * params * slots + 4 * self.model.q_size / self.tp * seen
        return Work(params * self.weight_bytes, seen * self.kv_bytes_per_token, flops)

    def prefill(self, tokens: int) -> Work:
        """A chunk that is one whole prompt of `tokens`; the head is a program of its own."""
        params = len(self.layers) * self.layer_params
        seen = tokens * self.seen(tokens // 2)  # the mean query sees half the prompt
        flops = 2 * params * tokens + 4 * self.model.q_size / self.tp * seen
        return Work(params * self.weight_bytes, len(self.layers) * tokens * self.kv_bytes_per_token, flops)

    def head(self, rows: int) -> Work:
        """Logits of `rows` rows."""
        return Work(self.head_params * self.weight_bytes, 0.0, 2 * self.head_params * rows)
