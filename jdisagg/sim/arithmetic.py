"""Disaggregation on the back of an envelope: KV bytes, prefill FLOPs, seconds over a link, and what tokens cost.

Formulas only, no queue and no fit. Sources: KV bytes and FLOPs a layer as in Mooncake (Qin et al., FAST 2025, eq. 1
and 2); attention kinds MHA, GQA (Ainslie et al. 2023), MLA (DeepSeek-V2, 2024, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jdisagg.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Attention:
    """What a model's KV and prefill cost depend on. For MLA `kv_width` is the latent and the rotary key together."""

    name: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    kind: str = "GQA"  # MHA, GQA or MLA
    kv_width: int = 0  # MLA: numbers a token and layer keeps
    linear_flops: float = 22.0  # a token and layer, times hidden_size**2
    attention_flops: float = 4.0  # a pair of tokens and layer, times hidden_size
    vocab_size: int = 0  # 0: embedding and head are left out of all counts

    @property
    def layer_params(self) -> float:
        """Weights of one layer's matrices, each of which multiplies and adds once a token."""
        return self.linear_flops / 2 * self.hidden_size**2

    @property
    def head_params(self) -> int:
        """Weights of the head; the embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token leaves in the KV cache of all layers."""
        width = self.kv_width if self.kind == "MLA" else 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * width

    def kv_bytes(self, tokens: float, dtype: str = "bfloat16") -> float:
        """Bytes of `tokens` tokens, scales of quantised types left out."""
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"no dtype {dtype!r}; there are {', '.join(DTYPE_BYTES)}")
        return self.kv_numbers * tokens * DTYPE_BYTES[dtype]

    def prefill_flops(self, tokens: float, cached: float = 0.0) -> float:
        """FLOPs of a prompt of `tokens` tokens whose first `cached` are there already (eq. 1, full pairs)."""
        linear = self.linear_flops * (tokens - cached) * self.hidden_size**2
        pairs = self.attention_flops * (tokens**2 - cached**2) * self.hidden_size
        return self.num_layers * (linear + pairs)


def dense(
    name: str, num_layers: int, hidden_size: int, heads: tuple[int, int], mlp: tuple[int, int], vocab_size: int,
    head_dim: int = 128,
) -> Attention:  # fmt: skip
    """A dense decoder. heads: of queries, of keys and values; mlp: its matrices (3 where gated, else 2), its width."""
    query_heads, kv_heads = heads
    matrices, width = mlp
    attention = 2 * (query_heads + kv_heads) * head_dim
    return Attention(
        name,
        num_layers,
        hidden_size,
        kv_heads,
        head_dim,
        "MHA" if query_heads == kv_heads else "GQA",
        linear_flops=2.0 * (attention + matrices * width) / hidden_size,
        attention_flops=4.0 * query_heads * head_dim / hidden_size,
        vocab_size=vocab_size,
    )


MODELS = {
    each.name: each
    for each in (
        dense("llama2-7b", 32, 4096, (32, 32), (3, 11008), 32000),
        dense("llama2-70b", 80, 8192, (64, 8), (3, 28672), 32000),
        dense("llama3-8b", 32, 4096, (32, 8), (3, 14336), 128256),
        dense("llama3-70b", 80, 8192, (64, 8), (3, 28672), 128256),
        dense("llama3-405b", 126, 16384, (128, 8), (3, 53248), 128256),
        dense("qwen2.5-7b", 28, 3584, (28, 4), (3, 18944), 152064),
        dense("qwen3-32b", 64, 5120, (64, 8), (3, 25600), 151936),
        dense("yi-34b", 60, 7168, (56, 8), (3, 20480), 64000),
        dense("mistral-7b", 32, 4096, (32, 8), (3, 14336), 32768),
        dense("opt-13b", 40, 5120, (40, 40), (2, 20480), 50272),
        dense("opt-66b", 64, 9216, (72, 72), (2, 36864), 50272),
        dense("bloom-176b", 70, 14336, (112, 112), (2, 57344), 250880),
        Attention("deepseek-v3", 61, 7168, 128, 128, "MLA", kv_width=576),
    )
}
# LLaMA3-70B as Mooncake counts it (FAST 2025, table 3): 22 for the linear part, embedding and head left out.
MOONCAKE_70B = replace(MODELS["llama3-70b"], name="llama3-70b as Mooncake counts", linear_flops=22.0, vocab_size=0)


def model(name: str) -> Attention:
    """Raises ConfigError naming those there are."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


def transfer_s(size_bytes: float, bytes_per_s: float) -> float:
    """Seconds over a link with nothing else on it."""
    return size_bytes / bytes_per_s


def least_reuse_bytes_per_s(attention: Attention, tokens: float, flops: float, dtype: str = "bfloat16") -> float:
    """Bandwidth from which fetching the KV of `tokens` tokens beats computing it at `flops` (Mooncake, eq. 2)."""
    return attention.kv_bytes(tokens, dtype) * flops / attention.prefill_flops(tokens)


def least_disaggregation_bytes_per_s(kv_bytes: float, prefill_s: float, exposed: float = 0.0) -> float:
    """Bandwidth at which a streamed handoff ends no later than `exposed` x prefill_s after prefill.

    The link works while prefill computes; with one chunk's KV left at its end, it must have kept up.
    """
    return kv_bytes / (prefill_s * (1.0 + exposed))


@dataclass(frozen=True, slots=True)
class PoolPrices:
    """USD a million tokens."""

    input_tokens: float
    uncached_input_tokens: float
    output_tokens: float


def pool_prices(
    prefill_usd_per_s: float, decode_usd_per_s: float, cached_tps: float, uncached_tps: float, output_tps: float
) -> PoolPrices:
    """A pool's cost over the tokens it served within its objectives; idle room is paid by those."""
    million = 1e6
    return PoolPrices(
        prefill_usd_per_s / (cached_tps + uncached_tps) * million,
        prefill_usd_per_s / uncached_tps * million,
        decode_usd_per_s / output_tps * million,
    )
