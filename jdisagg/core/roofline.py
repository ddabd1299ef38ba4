"""The least time a step can take on a chip: bytes over the memory's speed, or FLOPs over the peak, whichever is more.

Counted for one device of a stage. Every weight is read once a step, of experts those that its tokens are expected to be
sent to; every held token's K and V once; activations and collectives count nothing, so no program can be faster than
its floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def __add__(self, other: Work) -> Work:
        return Work(self.weight_bytes + other.weight_bytes, self.kv_bytes + other.kv_bytes, self.flops + other.flops)

    def times(self, number: float) -> Work:
        return Work(self.weight_bytes * number, self.kv_bytes * number, self.flops * number)

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
    weight_bytes: float  # of the mean number
    kv_bytes: float

    @property
    def held_bytes(self) -> float:
        """Bytes of the weights that this shard keeps: the embedding is whole on every shard of the first stage."""
        params = self._layers_params
        if self.layers.start == 0:
            params += self.model.embedding_params
        if self._has_head and not self._head_is_embedding:
            params += self.model.head_params(self.tp)
        return params * self.weight_bytes

    @property
    def _head_is_embedding(self) -> bool:
        whole = self.model.head_params(self.tp) == self.model.embedding_params
        return self.model.tie_embeddings and whole and self.layers.start == 0

    @property
    def _layers_params(self) -> int:
        return sum(self.model.layer_params(self.tp, layer) * count for layer, count in self._kinds)

    @property
    def _kinds(self) -> tuple[tuple[int, int], ...]:
        return self.model.layer_kinds(self.layers)

    @property
    def _has_head(self) -> bool:
        return self.layers.stop == self.model.num_layers

    @property
    def kv_bytes_per_token(self) -> float:
        """Of one layer."""
        return self.model.layer_kv_size(self.tp) * self.kv_bytes

    def seen(self, tokens: int) -> int:
        """Tokens that a query at the end of `tokens` sees, summed over the layers."""
        windows = (self.model.window(layer) for layer in self.layers)
        return sum(tokens if window is None else min(tokens, window) for window in windows)

    def decode(self, slots: int, context_tokens: int) -> Work:
        """One token of each of `slots` sequences that hold `context_tokens`; the last stage makes logits as well."""
        return self.decode_layers(slots, context_tokens) + (self.head(slots) if self._has_head else Work())

    def decode_layers(self, slots: int, context_tokens: int) -> Work:
        """As `decode`, without logits."""
        seen = slots * self.seen(context_tokens)
        return self._layers_work(slots, seen, seen, decoding=True)

    def prefill(self, tokens: int) -> Work:
        """A chunk that is one whole prompt of `tokens`; the head is a program of its own."""
        seen = tokens * self.seen(tokens // 2)  # the mean query sees half the prompt
        return self._layers_work(tokens, seen, len(self.layers) * tokens)

    def head(self, rows: int) -> Work:
        """Logits of `rows` rows."""
        params = self.model.head_params(self.tp)
        return Work(params * self.weight_bytes, 0.0, 2 * params * rows)

    def _layers_work(self, tokens: int, pairs: int, read: int, *, decoding: bool = False) -> Work:
        """pairs: of a query and a key; read: tokens whose K and V are read; both summed over the layers."""
        model, tp = self.model, self.tp
        linear = sum(model.linear_flops(tokens, tp, layer) * count for layer, count in self._kinds)
        weights = sum(model.read_params(tokens, tp, layer) * count for layer, count in self._kinds)
        flops = linear + model.attention_flops(pairs, tp, decoding=decoding)
        return Work(weights * self.weight_bytes, read * self.kv_bytes_per_token, flops)


def ring_tick(places: Sequence[Shard], stages: int, slots: int, context_tokens: int) -> Work:
    """One device of a ring at one tick: the layer at each of its places for a microbatch, padding as any other, and its
    share of the head, which is cut over all shards of all `stages`."""
    layers = sum((each.decode_layers(slots, context_tokens) for each in places), Work())
    return layers + places[0].head(slots).times(1 / stages)
