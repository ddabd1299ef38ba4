"""The numbers of a model and arithmetic over them: weights, KV bytes and FLOPs. No arrays, no files, no tensors.

The engine, the roofline, the simulator's cost models and the planner all use these counts. They add the rates of a
chip, and the split of a model into stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jdisagg.core.layout.tensor_cut import Channels, KVHeads, QueryHeads

# The numbers of a mixture of experts (Shazeer et al. 2017), which replaces the MLP of a layer.

ROUTERS = (
    "softmax",  # probabilities over all experts, the highest are selected (Switch, Mixtral, Qwen, DeepSeek-V2)
    "chosen",  # the highest logits are selected, with probabilities over those alone (gpt-oss)
    "sigmoid",  # each expert's own score; a correction is added for the selection alone (DeepSeek-V3)
)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of `number` gated MLPs of `width` channels; every token is sent to `per_token` of them."""

    number: int
    per_token: int
    width: int
    router: str = "softmax"
    normalised: bool = False  # True: the weights of a token's experts are normalised to sum to 1
    scale: float = 1.0  # factor of those weights, applied last
    groups: int = 1  # groups of experts; a token's experts are all of `kept_groups` of them
    kept_groups: int = 1
    group_top: int = 1  # a group's score is the sum of this many of its best
    shared_width: int = 0  # channels of the shared MLP that every token is sent to as well
    router_bias: bool = False
    bias: bool = False
    clamped: bool = False  # True: the gate has the activation of gpt-oss, not the model's
    dense_layers: tuple[int, ...] = ()  # layers with a plain MLP instead

    def __post_init__(self) -> None:
        assert self.router in ROUTERS, f"router {self.router!r} is none of {', '.join(ROUTERS)}"

    @property
    def channels(self) -> int:
        """Returns the channels of all experts and of the shared MLP."""
        return self.number * self.width + self.shared_width

    def expected_distinct(self, tokens: float) -> float:
        """Returns the expected number of experts that `tokens` tokens are sent to, if all are equally likely."""
        return self.number * (1.0 - (1.0 - self.per_token / self.number) ** tokens)

    def layer_kinds(self, layers: range) -> tuple[tuple[int, int], ...]:
        """Returns (a layer of the kind, number of such layers) of the dense and of the sparse layers among `layers`."""
        dense = [layer for layer in layers if layer in self.dense_layers]
        sparse = [layer for layer in layers if layer not in self.dense_layers]
        return tuple((kind[0], len(kind)) for kind in (dense, sparse) if kind)

    def held(self, tp: int) -> int:
        """Returns the experts of one of `tp` shards."""
        return experts_held(self.number, tp)


def experts_held(number: int, tp: int) -> int:
    """Returns the experts of one of `tp` shards; the last ones may be padding that no token is sent to."""
    return -(-number // tp)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequency scaling, of one of four kinds. "linear"; "llama3" (Llama 3.1 technical report, long-context
    section); "yarn" (Peng et al. 2023, section 3.4); "longrope" (Ding et al. 2024), whose factors are those of prompts
    up to the original length."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0  # yarn, longrope: factor of cosines and sines
    beta_fast: float = 32.0  # yarn: rotations within the original length above which a frequency is not changed
    beta_slow: float = 1.0  # yarn: rotations below which it is interpolated
    truncate: bool = True  # yarn: bounds are rounded to whole pairs
    factors: tuple[float, ...] = ()  # longrope: a divisor for each frequency


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1). One row per token is cached for all heads: a latent
    from which every head's key and value are computed, and a rotated key that all heads share. Paged attention sees one
    KV head, of `row_size` numbers, whose first `kv_lora_rank` are V."""

    kv_lora_rank: int  # numbers of the latent
    q_lora_rank: int | None  # numbers of the queries' own latent; None if queries have none
    qk_nope_head_dim: int  # numbers of a head's query and key without rotation
    qk_rope_head_dim: int  # numbers with rotation
    v_head_dim: int
    mscale_all_dim: float = 0.0  # scale of the logits of an extended context; 0: none
    interleaved: bool = True  # True: rotated pairs are adjacent in the checkpoint

    @property
    def row_size(self) -> int:
        """Returns the cached numbers per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def q_head_dim(self) -> int:
        """Returns the numbers of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_size(self) -> int:
        """Returns the numbers computed from a latent for each head."""
        return self.qk_nope_head_dim + self.v_head_dim

    def layer_params(self, hidden_size: int, heads: int) -> int:
        """Returns the weights of the matrices around the attention of `heads` heads."""
        q = heads * self.q_head_dim
        rank = self.q_lora_rank
        queries = hidden_size * q if rank is None else rank * (hidden_size + q)
        latents = hidden_size * self.row_size + self.kv_lora_rank * heads * self.up_size
        return queries + latents + heads * self.v_head_dim * hidden_size

    def pair_flops(self, *, absorbed: bool) -> int:
        """Returns the FLOPs of a query and a key of one head: over latents, or over keys and values computed from
        them."""
        return 2 * (self.row_size + self.kv_lora_rank if absorbed else self.q_head_dim + self.v_head_dim)


class AttentionOptions(NamedTuple):
    """The options of attention kernels for one layer, with the kernels' names."""

    scale: float  # factor of the logits
    window: int | None  # tokens seen, the query's own included; None: all
    soft_cap: float | None  # logits become soft_cap * tanh(logits / soft_cap)
    value_size: int | None = None  # for pages that hold K alone: V is this many of its first numbers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated MLPs or experts. The last
    field is for published models that are only used in arithmetic."""

    family: str  # a name of `model/families`
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
    qk_norm_is_wide: bool = False  # True: that norm is over all heads at once (OLMo 2)
    layer_windows: tuple[int | None, ...] = ()  # sliding window per layer in tokens; () means none anywhere
    local_rope_theta: float | None = None  # of layers with a window, unscaled, if it differs (Gemma 3)
    rotary_dim: int = 0  # rotated numbers of a head, the first ones; 0: all
    norms: str = "before"  # position of a layer's norms: "before" attention and MLP, "after" (OLMo 2), "both" (Gemma 2)
    norm_offset: float = 0.0  # added to the weights of norms (Gemma: 1)
    activation: str = "silu"  # of the MLP's gate: "silu" or "gelu_tanh"
    embedding_scale: float = 1.0  # factor of embeddings (Gemma: sqrt(hidden_size))
    query_scale: float | None = None  # factor of attention logits; None: head_dim**-0.5
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None  # soft cap of token logits
    sinks: bool = False  # True: each head has a logit that takes its share of attention without a value (gpt-oss)
    experts: Experts | None = None  # replaces the MLP in all layers except `dense_layers`
    latent: Latent | None = None  # MLA: then num_kv_heads is 1, head_dim the latent's row_size
    mlp_matrices: int = 3  # 2 if the MLP has no gate

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of one layer in tokens (a query sees the last `window` tokens, itself
        included)."""
        return self.layer_windows[layer] if self.layer_windows else None

    def attention(self, layer: int) -> AttentionOptions:
        """Returns the attention options of one layer."""
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        rank = self.latent.kv_lora_rank if self.latent else None
        return AttentionOptions(scale, self.window(layer), self.attention_soft_cap, rank)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def q_cut(self) -> QueryHeads:
        """Returns the split of queries over shards."""
        return QueryHeads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def kv_cut(self) -> KVHeads:
        """Returns the split of keys and of values over shards."""
        return KVHeads(self.num_kv_heads, self.head_dim)

    def heads_of_shard(self, tp: int) -> int:
        """Returns the query heads of each of `tp` shards, padding included."""
        return self.q_cut.width(tp) // self.head_dim

    @property
    def mlp_cut(self) -> Channels:
        return Channels(self.intermediate_size)

    @property
    def attention_kind(self) -> str:
        """Returns MHA, GQA (Ainslie et al. 2023) or MLA."""
        return "MLA" if self.latent else "MHA" if self.num_kv_heads == self.num_heads else "GQA"

    # ------------------------------------------------------------ weights

    def is_sparse(self, layer: int) -> bool:
        """Returns True if the layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def layer_params(self, tp: int = 1, layer: int | None = None) -> int:
        """Returns the weights of one layer's matrices on one of `tp` shards; of the mean layer unless one is named.
        Norms and biases are left out, as they are negligible. Padded heads and channels count."""
        if layer is None:
            return sum(self.layer_params(tp, each) * count for each, count in self.layer_kinds()) // self.num_layers
        experts = self.experts.held(tp) if self.experts else 0
        return round(self._layer_params(tp, layer, experts))

    def active_params(self, tp: int = 1, layer: int | None = None) -> float:
        """Returns `layer_params`, but only the weights used for one token: of experts, those it is sent to."""
        if layer is None:
            return self._mean(self.active_params(tp, each) * count for each, count in self.layer_kinds())
        return self._layer_params(tp, layer, self.experts.per_token / tp if self.experts else 0)

    def read_params(self, tokens: float, tp: int = 1, layer: int | None = None) -> float:
        """Returns `layer_params`, but only the weights that a step of `tokens` tokens reads: of experts, those that any
        of them is sent to, all equally likely."""
        if layer is None:
            return self._mean(self.read_params(tokens, tp, each) * count for each, count in self.layer_kinds())
        return self._layer_params(tp, layer, self.experts.expected_distinct(tokens) / tp if self.experts else 0)

    def layer_kinds(self, layers: range | None = None) -> tuple[tuple[int, int], ...]:
        """Returns (a layer of the kind, number of such layers) of the dense and of the sparse layers among `layers`, or
        of all."""
        layers = range(self.num_layers) if layers is None else layers
        return ((layers.start, len(layers)),) if self.experts is None else self.experts.layer_kinds(layers)

    def _mean(self, sums: Iterable[float]) -> float:
        return sum(sums) / self.num_layers

    def _layer_params(self, tp: int, layer: int, experts: float) -> float:
        """Returns the weights on one of `tp` shards, counting `experts` of a sparse layer's experts."""
        return self._attention_params(tp) + self._mlp_params(tp, layer, experts)

    def _attention_params(self, tp: int) -> int:
        if self.latent:
            return self.latent.layer_params(self.hidden_size, self.heads_of_shard(tp))
        return self.hidden_size * (2 * self.q_cut.width(tp) + 2 * self.kv_cut.width(tp))

    def _mlp_params(self, tp: int, layer: int, experts: float) -> float:
        channel = self.mlp_matrices * self.hidden_size
        if self.experts is None or not self.is_sparse(layer):
            return channel * self.mlp_cut.width(tp)
        shared = Channels(self.experts.shared_width).width(tp)
        return channel * (experts * self.experts.width + shared) + self.hidden_size * self.experts.number

    @property
    def expert_params(self) -> int:
        """Returns the weights of the experts of all layers, the shared ones included."""
        layers = sum(count for layer, count in self.layer_kinds() if self.is_sparse(layer))
        return layers * self.mlp_matrices * self.hidden_size * self.experts.channels if self.experts else 0

    def widest_row(self, tp: int = 1) -> int:
        """Returns the most numbers that a layer computes per row on one of `tp` shards: each of its experts computes
        its own."""
        dense = any(not self.is_sparse(layer) for layer, _ in self.layer_kinds())
        widths = [2 * self.mlp_cut.width(tp)] if dense else []
        if self.experts is not None:
            widths.append(self.experts.per_token * max(2 * self.experts.width, self.hidden_size))
        return max(widths)

    @property
    def embedding_params(self) -> int:
        """Returns the weights of the embedding, which every shard of the first stage holds whole."""
        return self.vocab_size * self.hidden_size

    def head_params(self, tp: int = 1) -> int:
        """Returns the weights of the head on one of `tp` shards: all, if the vocabulary is not divisible."""
        return self.embedding_params // (tp if self.vocab_size % tp == 0 else 1)

    def num_params(self, tp: int = 1) -> int:
        """Returns the weights of all matrices, the embedding counted once when it is tied; layers as `tp` shards hold
        them."""
        return tp * sum(self.layer_params(tp, layer) * count for layer, count in self.layer_kinds()) + self._tables

    def num_active_params(self) -> int:
        """Returns the weights used for one token, counted as in `num_params`."""
        return round(self.num_layers * self.active_params()) + self._tables

    @property
    def _tables(self) -> int:
        return self.embedding_params * (1 if self.tie_embeddings else 2)

    # ------------------------------------------------------------ KV

    def layer_kv_size(self, tp: int = 1) -> int:
        """Returns the numbers that one token adds to the KV cache of one layer on one of `tp` shards."""
        return (1 if self.latent else 2) * self.kv_cut.width(tp)

    def kv_bytes(self, tokens: float, number_bytes: float = 2.0, tp: int = 1) -> float:
        """Returns the KV bytes of `tokens` tokens on one of `tp` shards, all layers, with `number_bytes` per number of
        K and V."""
        return self.num_layers * self.layer_kv_size(tp) * tokens * number_bytes

    # ------------------------------------------------------------ FLOPs

    def linear_flops(self, tokens: float, tp: int = 1, layer: int | None = None) -> float:
        """Returns the FLOPs of one layer's matrices over `tokens` tokens, on one of `tp` shards; of the mean layer
        unless named."""
        return 2 * self.active_params(tp, layer) * tokens

    def attention_flops(self, pairs: float, tp: int = 1, *, decoding: bool = False) -> float:
        """Returns the FLOPs of one layer's attention over `pairs` visible pairs of a query and a key, on one of `tp`
        shards."""
        if self.latent:
            return self.heads_of_shard(tp) * self.latent.pair_flops(absorbed=decoding) * pairs
        return 4 * self.q_cut.width(tp) * pairs

    def prefill_flops(self, tokens: float, cached: float = 0.0) -> float:
        """Returns the FLOPs of a prompt of `tokens` tokens of which the first `cached` are cached, all pairs counted.
        Mooncake (Qin et al., FAST 2025), equation 1; the head is left out."""
        return self.num_layers * (self.linear_flops(tokens - cached) + self.attention_flops(tokens**2 - cached**2))


# The number formats of a model's matrices, shared by loading, programs, identities and page budgets.

AS_ACTIVATIONS = "dtype"  # matrices have the dtype of --dtype
SCALED = ("int8", "fp8")  # one scale per output channel, activations rounded per token
# The shared expert is never scaled, as the other experts are not: its shards' sums are added to theirs, and each shard
# would round a token by the scale of its own channels alone.
SHARED = ".mlp.shared."
NAMES = (AS_ACTIVATIONS, "float32", "bfloat16", *SCALED)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of weights: "dtype", "float32", "bfloat16", "int8" or "fp8" for all matrices except those of `full`.
    Experts are never scaled: with int8 and fp8 they have the dtype of activations."""

    dtype: str = AS_ACTIVATIONS
    full: frozenset[str] = frozenset()  # as "11.mlp.down": a layer of the model and its matrix

    @property
    def is_scaled(self) -> bool:
        return self.dtype in SCALED

    def of(self, matrix: str) -> str:
        """Returns the dtype of one matrix, named as in `full`, or "head"."""
        return AS_ACTIVATIONS if matrix in self.full or (self.is_scaled and SHARED in matrix) else self.dtype

    @property
    def of_experts(self) -> str:
        """Returns the dtype of the experts' matrices."""
        return AS_ACTIVATIONS if self.is_scaled else self.dtype

    def __str__(self) -> str:
        return self.dtype + (f" but for {len(self.full)} matrices" if self.full else "")


AS_MADE = WeightFormat()
